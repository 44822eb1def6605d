"""Attention over a paged KV cache for a batch of rows of different lengths.

`interface` is what models call; `xla` runs anywhere; `reference` is the float64 judge of both.
"""

"""Attention over a paged KV cache for a batch of rows of different lengths.

`api` is what models call, and chooses the implementation: `tpu`, three Pallas kernels, or `xla`,
which runs anywhere. `reference` is the float64 judge of both.
"""

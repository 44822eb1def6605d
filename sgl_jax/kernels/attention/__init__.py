"""Attention over a paged KV cache for a batch of rows of different lengths.

Models call `api`, which selects the implementation: `tpu` (three Pallas kernels) or `xla` (any
platform). Both are tested against the float64 reference `tests/kernels/attention/reference.py`.
"""

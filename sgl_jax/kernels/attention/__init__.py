"""Attention over a paged KV cache for a batch of rows of different lengths.

Models call `api`, which chooses the implementation: `tpu`, three Pallas kernels, or `xla`,
which runs anywhere. `tests/kernels/attention/reference.py` is
the float64 judge of both.
"""

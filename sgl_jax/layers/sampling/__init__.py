"""Choosing the next token on the device: parameters per row, penalties, filters, noise.

Owns the order in which a request's sampling parameters act on its logits. Never reads the host:
everything comes from device-resident tables indexed by row, so a step needs no upload for it.
"""

from sgl_jax.layers.sampling.draw import draw_tokens, score_tokens
from sgl_jax.layers.sampling.logprobs import LogprobArrays, no_logprobs, token_logprobs
from sgl_jax.layers.sampling.row_params import (
    PACKED_WIDTH,
    RowParams,
    pack_row_params,
    unpack_row_params,
)
from sgl_jax.layers.sampling.sample import SampledRows, sample_tokens
from sgl_jax.layers.sampling.split_logits import SplitLogits

__all__ = [
    "PACKED_WIDTH",
    "LogprobArrays",
    "RowParams",
    "SampledRows",
    "SplitLogits",
    "draw_tokens",
    "no_logprobs",
    "pack_row_params",
    "sample_tokens",
    "score_tokens",
    "token_logprobs",
    "unpack_row_params",
]

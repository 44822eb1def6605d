"""Gated delta nets for TPU: the convolution, and the rule as two kernels, one after the other.

`decode` and `prefill` each read the values of their rows from one array, replace them by outputs,
and leave the other kernel's values unchanged. Both change the states in place. `shared` has their
common parts.
"""

import jax

from sgl_jax.kernels.gated_delta.batch import DeltaInputs, StateBatch, check_heads
from sgl_jax.kernels.gated_delta.tpu.conv import causal_conv
from sgl_jax.kernels.gated_delta.tpu.decode import decode_gated_delta
from sgl_jax.kernels.gated_delta.tpu.prefill import prefill_gated_delta

__all__ = ["causal_conv", "gated_delta"]


def gated_delta(
    tokens: DeltaInputs,
    states: jax.Array,
    layer: jax.Array,
    batch: StateBatch,
    *,
    is_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Implement `api.GatedDelta`; padding tokens' outputs are their values.

    With `is_invariant`, the bits of a token's result depend only on the tokens before it. Raises
    ValueError if heads do not have 128 dimensions, or there are more than 128.
    """
    check_heads(tokens.v.shape[1], tokens.k.shape[2], tokens.v.shape[2])
    if is_invariant:
        return decode_gated_delta(tokens, states, layer, batch, of_all_rows=True)
    for compute in (decode_gated_delta, prefill_gated_delta):
        out, states = compute(tokens, states, layer, batch)
        tokens = tokens._replace(v=out)
    return tokens.v, states

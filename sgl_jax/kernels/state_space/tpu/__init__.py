"""State space models for TPU: a kernel of decode rows, then a kernel of prefill rows."""

import jax

from sgl_jax.kernels.gated_delta.batch import DeltaInputs, StateBatch
from sgl_jax.kernels.state_space.api import check_state_space
from sgl_jax.kernels.state_space.tpu.decode import decode_state_space
from sgl_jax.kernels.state_space.tpu.prefill import prefill_state_space

__all__ = ["state_space"]


def state_space(
    tokens: DeltaInputs,
    states: jax.Array,
    layer: jax.Array,
    batch: StateBatch,
    *,
    is_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Implement `api.StateSpace`; padding tokens' outputs are their values.

    With `is_invariant`, the bits of a token's result depend only on the tokens before it. Raises
    ValueError if two heads do not have 128 values, or a state not 128 keys.
    """
    check_state_space(tokens.log_decay.shape[1], tokens.k.shape[2], tokens.v.shape[2])
    if is_invariant:
        return decode_state_space(tokens, states, layer, batch, of_all_rows=True)
    for compute in (decode_state_space, prefill_state_space):
        out, states = compute(tokens, states, layer, batch)
        tokens = tokens._replace(v=out)
    return tokens.v, states

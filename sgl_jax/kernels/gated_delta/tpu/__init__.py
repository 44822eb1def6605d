"""Gated delta nets for TPU: the convolution, and the rule as two kernels, one after the other.

`decode` and `prefill` each find their rows' values in an array and put the outputs where the values
were, and leave the other's values alone. Both change the states in place. `shared` has their common
parts.
"""

from typing import Any

import jax

from sgl_jax.kernels.gated_delta.batch import StateBatch, check_heads
from sgl_jax.kernels.gated_delta.tpu.conv import causal_conv
from sgl_jax.kernels.gated_delta.tpu.decode import decode_gated_delta
from sgl_jax.kernels.gated_delta.tpu.prefill import prefill_gated_delta

__all__ = ["causal_conv", "gated_delta"]


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    states: jax.Array,
    layer: jax.Array,
    batch: StateBatch,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.GatedDelta`; padding tokens' outputs are their values.

    `interpret` simulates the kernels on a CPU: `pltpu.InterpretParams`.

    Raises:
        ValueError: heads are not of 128 dimensions, or more than 128.
    """
    check_heads(v.shape[1], k.shape[2], v.shape[2])
    out = v
    for compute in (decode_gated_delta, prefill_gated_delta):
        out, states = compute(q, k, out, log_decay, beta, states, layer, batch, interpret=interpret)
    return out, states

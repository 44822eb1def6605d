"""The calls of layers with a recurrence.

Every implementation has the signature of `GatedDelta` or `CausalConv` and is tested against
`tests/kernels/gated_delta/reference.py`, which computes token by token in float64.
"""

from typing import Protocol

import jax

from sgl_jax.kernels.gated_delta.batch import DeltaInputs, StateBatch


class GatedDelta(Protocol):
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464) over states in slots."""

    def __call__(
        self, tokens: DeltaInputs, states: jax.Array, layer: jax.Array, batch: StateBatch
    ) -> tuple[jax.Array, jax.Array]:
        """Run one layer's recurrence with the shapes of one chip of one data-parallel rank.

        Let q and k be scaled to length 1 (x * rsqrt(sum(x^2) + 1e-6)), q divided by sqrt(key_dim),
        and both repeated over the value heads of a key head. A token changes the state S
        [key_dim, value_dim] of each value head, and reads it. Its rows decay alike, or each by a
        factor of its own (arXiv 2510.26692):

            S = exp(log_decay)[:, None] * S
            S = S + k (beta * (v - S^T k))^T
            out = S^T q

        Args:
            tokens: the step's tokens, with q and k not scaled yet.
            states: [layers, slots, value_heads, key_dim, value_dim], float32 or bfloat16; computed
                with in float32. Updated in place when the caller donates it or carries it through
                a loop.
            layer: int32 [], the layer's index in the states.
            batch: rows, slots and chunks.

        Returns:
            out: [T, value_heads, value_dim] in v's dtype; finite but unspecified for padding.
            states: with the new states in the batch's slots.
        """
        ...


class CausalConv(Protocol):
    """A causal depthwise convolution over the last K tokens, then silu."""

    def __call__(
        self,
        u: jax.Array,
        weight: jax.Array,
        states: jax.Array,
        layer: jax.Array,
        batch: StateBatch,
        bias: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Convolve one layer's tokens: out[t] = silu(bias + sum_j weight[j] * u[t - K + 1 + j]).

        Tokens before a row's first token of the step are in its state: the last K - 1 rows of u,
        in order, and zeros before the first token of a request.

        Args:
            u: [T, channels].
            weight: [K, channels]; the last row is for the token itself.
            states: [layers, slots, *conv_state_shape(K, channels)] (`core.layer_configs`) in u's
                dtype. Read and written in the same slots and at the same lengths as the states of
                `GatedDelta`.
            layer: int32 [].
            batch: rows, slots and chunks.
            bias: [channels]; None for zeros.

        Returns:
            out: [T, channels] in u's dtype; finite but unspecified for padding.
            states: with the new states in the batch's slots.
        """
        ...

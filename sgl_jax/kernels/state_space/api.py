"""The call of state space models.

Every implementation has the signature of `StateSpace` and is tested against
`tests/kernels/state_space/reference.py`, which computes token by token in float64.
"""

from typing import Protocol

import jax

from sgl_jax.kernels.gated_delta.batch import DeltaInputs, StateBatch
from sgl_jax.kernels.tpu_chip import LANES


def check_state_space(num_heads: int, state_dim: int, packed_dim: int) -> None:
    """Raise ValueError unless the Pallas kernel can compute a chip's heads; XLA can compute any.

    `packed_dim` is the size of the values of two heads that share a state's rows.
    """
    if (state_dim, packed_dim) != (LANES, LANES) or num_heads > LANES or num_heads % 2:
        raise ValueError(
            f"the Pallas kernels of state space models compute an even number of up to {LANES} "
            f"heads a chip, in pairs of {LANES} values with states of {LANES} keys; got "
            f"{num_heads} heads, and pairs of {packed_dim} values with {state_dim} keys: "
            "--attention-backend xla takes any"
        )


class StateSpace(Protocol):
    """The recurrence of a state space model (Dao and Gu 2024, arXiv 2405.21060)."""

    def __call__(
        self, tokens: DeltaInputs, states: jax.Array, layer: jax.Array, batch: StateBatch
    ) -> tuple[jax.Array, jax.Array]:
        """Run one layer's recurrence with the shapes of one chip of one data-parallel rank.

        Let q (C) and k (B) be repeated over the heads of a group. A token changes the state S
        [state_dim, head_dim] of each head, and reads it:

            S = exp(log_decay) * S + k (beta * v)^T
            out = S^T q

        A line is the values of one or more heads of a group, side by side (`packed_heads`).

        Args:
            tokens: the step's tokens, with v [T, lines, values]; q and k are of groups; log_decay
                [T, heads, 1] and beta [T, heads], a token's step (dt), are of heads.
            states: [layers, slots, *state_shape] (`core.layer_configs.StateSpaceConfig`), float32
                or bfloat16; computed with in float32. Updated in place when the caller donates it
                or carries it through a loop.
            layer: int32 [], the layer's index in the states.
            batch: rows, slots and chunks.

        Returns:
            out: [T, lines, values] in v's dtype; finite but unspecified for padding.
            states: with the new states in the batch's slots.
        """
        ...

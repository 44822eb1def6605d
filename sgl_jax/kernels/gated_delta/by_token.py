"""A recurrence token after token in XLA, if results must not depend on the batch.

A chunk's products and one token's change of the state round differently. So tokens of prompts, too,
are computed as decode rows are, and a row's result does not depend on how its prompt is cut. See
`kernels.row_blocks` for other layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.gated_delta.batch import NO_SLOT, DeltaInputs, StateBatch
from sgl_jax.kernels.gated_delta.xla import RecurrenceRule, write_states
from sgl_jax.kernels.row_blocks import row_wise

_ROWS = 8  # rows computed at once


def recur_by_token(
    rule: RecurrenceRule,
    tokens: DeltaInputs,
    states: jax.Array,
    layer: jax.Array,
    batch: StateBatch,
) -> tuple[jax.Array, jax.Array]:
    """Compute a step's tokens by `rule`, as `xla.recur`; padding tokens' outputs are zeros."""

    def terms_of(*own: jax.Array) -> Any:
        return rule.terms(DeltaInputs(*(x.astype(jnp.float32) for x in own)))

    terms = row_wise(terms_of, *tokens)
    num_tokens = len(tokens.v)
    slots_after = batch.slots_after()

    def block(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows = number * _ROWS + jnp.arange(_ROWS)
        starts = batch.q_offsets.at[rows].get(mode="clip")
        lengths = batch.q_offsets.at[rows + 1].get(mode="clip") - starts
        slots_in = batch.slots_in.at[rows].get(mode="clip")

        def position(
            i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            out, states, state = carry
            exists, token = i < lengths, starts + i
            own = jax.tree.map(lambda x: x.at[token].get(mode="clip"), terms)
            found, after = rule.next_token(own, state)
            # Stored states are rounded, so that a state is the same whether it was stored or not.
            state = jnp.where(exists[:, None, None, None], after, state)
            state = state.astype(states.dtype).astype(jnp.float32)
            written = jnp.where(exists, token, num_tokens)
            out = out.at[written].set(found.astype(out.dtype), mode="drop")
            for after in slots_after:
                slots = jnp.where(exists, after.at[token].get(mode="clip"), NO_SLOT)
                states = lax.cond(
                    jnp.any(slots >= 0),
                    lambda states, slots: write_states(states, layer, slots, state),
                    lambda states, _: states,
                    *(states, slots),
                )
            return out, states, state

        out, states = carry
        state = states[layer, slots_in].astype(jnp.float32)
        return lax.fori_loop(0, jnp.max(lengths), position, (out, states, state))[:2]

    out = jnp.zeros(tokens.v.shape, tokens.v.dtype)
    return lax.fori_loop(0, -(-batch.num_rows // _ROWS), block, (out, states))

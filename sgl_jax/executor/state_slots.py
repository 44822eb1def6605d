"""The state slots that a step reads and writes, chosen on the device.

Only the device has the number of accepted drafts in time, which determines a row's current state.
So it stores the slot of each row's state (`current`), and the host provides a slot only where a row
starts, or starts again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.executor.layout import RankControls
from sgl_jax.kernels.gated_delta.batch import StateBatch
from sgl_jax.mem_cache.device_pool import LayerStates


class RowStates(NamedTuple):
    """The states of a rank's rows and its snapshots."""

    current: jax.Array  # int32[num_rows] slot of each row's state, valid once it has run
    layers: LayerStates


def build_state_batch(
    states: RowStates, controls: RankControls, num_tokens: int, sizes: EngineSizes
) -> StateBatch:
    """Return the slots and chunks of a step of `num_tokens` tokens, including padding."""
    plan = controls.states
    assert plan is not None, "the model has recurrent layers"
    width = 1 + sizes.max_draft_tokens
    return StateBatch.build(
        jnp.where(plan.sources >= 0, plan.sources, states.current[controls.rows]),
        sizes.num_snapshots + (2 * controls.rows + plan.halves) * width,
        plan.snapshots,
        controls.kv_starts,
        controls.q_lens,
        controls.num_decode,
        num_tokens,
        sizes.max_draft_tokens,
    )


def keep_states(
    states: RowStates, controls: RankControls, batch: StateBatch, num_kept: jax.Array
) -> RowStates:
    """Record the slot of each row's state, and copy decode rows' states that become snapshots.

    Args:
        states: the states after the step's layers.
        controls, batch: the step's control words, and its slots and chunks.
        num_kept: int32[B] accepted queries of each row, without rejected drafts.
    """
    assert controls.states is not None, "the model has recurrent layers"
    is_decode = jnp.arange(len(controls.rows)) < controls.num_decode
    is_there = controls.q_lens > 0
    last = batch.slots_out + jnp.where(is_decode, num_kept - 1, 0)
    current = states.current.at[jnp.where(is_there, controls.rows, 0)].set(
        jnp.where(is_there, last, batch.slots_out[0])
    )
    kept_rows, lengths, slots = controls.states.snapshots.T
    ahead = lengths - controls.kv_starts[kept_rows]  # number of the row's queries before the state
    is_due = (slots > 0) & is_decode[kept_rows] & (ahead > 0) & (ahead <= num_kept[kept_rows])
    (due,) = jnp.nonzero(is_due, size=len(slots), fill_value=0)

    def copy(i: jax.Array, layers: LayerStates) -> LayerStates:
        index = due[i]
        source = batch.slots_out[kept_rows[index]] + ahead[index] - 1
        return layers.copied(source, slots[index])

    layers: LayerStates = lax.fori_loop(0, is_due.sum(), copy, states.layers)
    return RowStates(current, layers)

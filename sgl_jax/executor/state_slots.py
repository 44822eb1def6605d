"""The slots of states that a step reads and writes, chosen on the device.

The device is first to see how many drafts a row accepted, and so which of its states is current.
So the device keeps, for each row, the slot of its state (`current`), and the host names a slot only
where a row starts, or starts again.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.executor.layout import StateControls
from sgl_jax.executor.row_tables import TABLE_SPEC
from sgl_jax.kernels.gated_delta.batch import StateBatch
from sgl_jax.mem_cache.device_pool import (
    LayerStates,
    StatePoolLayout,
    make_state_pools,
    state_pool_shapes,
)


class RowStates(NamedTuple):
    """The states of a rank's rows, and its snapshots."""

    current: jax.Array  # int32[num_rows] slot of each row's state, valid once it has run
    layers: LayerStates


def row_states_shapes(layout: StatePoolLayout, sizes: EngineSizes, mesh: Mesh) -> RowStates:
    """The states of all ranks before they are there: `RowStates` of `jax.ShapeDtypeStruct`."""
    sharding = NamedSharding(mesh, TABLE_SPEC)
    current: Any = jax.ShapeDtypeStruct(
        (sizes.dp_size * sizes.num_rows,), jnp.int32, sharding=sharding
    )
    return RowStates(current, state_pool_shapes(layout, sizes.num_state_slots, mesh))


def make_row_states(layout: StatePoolLayout, sizes: EngineSizes, mesh: Mesh) -> RowStates:
    """Zeros, made on the devices."""
    current = jnp.zeros(
        sizes.dp_size * sizes.num_rows, jnp.int32, device=NamedSharding(mesh, TABLE_SPEC)
    )
    return RowStates(current, make_state_pools(layout, sizes.num_state_slots, mesh))


class StepRows(NamedTuple):
    """The rows of a step, B with padding, as far as they matter here."""

    rows: jax.Array  # int32[B], 0 for padding
    kv_starts: jax.Array  # int32[B]
    q_lens: jax.Array  # int32[B]
    num_decode: jax.Array  # int32[]


def build_state_batch(
    states: RowStates,
    controls: StateControls,
    step: StepRows,
    num_tokens: int,
    sizes: EngineSizes,
) -> StateBatch:
    """The slots and chunks of a step of `num_tokens` tokens, padding included."""
    sources = controls.sources
    width = 1 + sizes.max_draft_tokens
    return StateBatch.build(
        jnp.where(sources >= 0, sources, states.current[step.rows]),
        sizes.num_snapshots + (2 * step.rows + controls.halves) * width,
        controls.snapshots,
        step.kv_starts,
        step.q_lens,
        step.num_decode,
        num_tokens,
        sizes.max_draft_tokens,
    )


def keep_states(
    states: RowStates,
    controls: StateControls,
    step: StepRows,
    batch: StateBatch,
    num_kept: jax.Array,
) -> RowStates:
    """Record the slot of each row's state, and copy decode rows' states that become snapshots.

    Args:
        states: after the step's layers.
        controls, step, batch: of the step.
        num_kept: int32[B] queries of each row that count: not the drafts that were refused.
    """
    is_decode = jnp.arange(len(step.rows)) < step.num_decode
    is_there = step.q_lens > 0
    last = batch.slots_out + jnp.where(is_decode, num_kept - 1, 0)
    current = states.current.at[jnp.where(is_there, step.rows, 0)].set(
        jnp.where(is_there, last, batch.slots_out[0])
    )
    kept_rows, lengths, slots = controls.snapshots.T
    ahead = lengths - step.kv_starts[kept_rows]  # the state after so many of the row's queries
    is_due = (slots > 0) & is_decode[kept_rows] & (ahead > 0) & (ahead <= num_kept[kept_rows])
    (due,) = jnp.nonzero(is_due, size=len(slots), fill_value=0)

    def copy(i: jax.Array, layers: LayerStates) -> LayerStates:
        index = due[i]
        source = batch.slots_out[kept_rows[index]] + ahead[index] - 1
        return layers.copied(source, slots[index])

    layers: LayerStates = lax.fori_loop(0, is_due.sum(), copy, states.layers)
    return RowStates(current, layers)

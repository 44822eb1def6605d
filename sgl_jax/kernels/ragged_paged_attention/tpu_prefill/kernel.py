"""The prefill kernel: row after row in blocks of queries, each past its keys block by block."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sgl_jax.kernels.ragged_paged_attention.rows import Rows
from sgl_jax.kernels.ragged_paged_attention.scores import ScoreOptions
from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.copies import (
    out_copies,
    q_copies,
    start_keys,
    table_copy,
    wait_keys,
)
from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.memory import (
    Buffers,
    Kernel,
    Shape,
    Softmax,
    div,
)
from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.query_block import QueryBlock
from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.softmax import (
    Work,
    attend,
    attend_masked,
    begin_queries,
    clear_unseen_values,
    end_queries,
)


def _find_next_rows(kernel: Kernel) -> jax.Array:
    """Fill `next_rows`, and return the first prefill row that has queries, or B."""
    rows, next_rows = kernel.rows, kernel.buffers.next_rows

    def step(i: jax.Array, following: jax.Array) -> jax.Array:
        row = rows.num_rows - 1 - i
        next_rows[row] = following
        return jnp.where(rows.q_len(row) > 0, row, following)

    nobody = jnp.int32(kernel.num_slots)
    return lax.fori_loop(0, rows.num_rows - rows.num_decode, step, nobody)


def _attend_queries(
    kernel: Kernel, block: QueryBlock, following: QueryBlock, slots: tuple[Any, Any, Any]
) -> jax.Array:
    """Attention of a block of queries over all its keys, which `state` holds afterwards.

    `following` is the next block, whose first keys are started; its row is B if there is none.
    `slots`: of the first keys, of this row's page ids, of the following block's page ids.

    Returns:
        the slot of the following block's first keys.
    """
    first_slot, table_slot, following_table_slot = slots
    num_slots = kernel.num_slots

    def meet(turn: jax.Array, slot: jax.Array) -> jax.Array:
        """Have a block of keys here, and the next one in flight; return which this is."""
        is_last = turn + 1 == block.num_key_blocks
        row = jnp.where(is_last, following.row, block.row)

        @pl.when(row < num_slots)
        def _() -> None:
            keys = jnp.where(is_last, following.key_block(0), block.key_block(turn + 1))
            table = jnp.where(is_last, following_table_slot, table_slot)
            start_keys(kernel, row, keys, table, 1 - slot)

        keys = block.key_block(turn)
        wait_keys(kernel, block.row, keys, slot)
        return keys

    def work(turn: jax.Array, slot: jax.Array) -> Work:
        blocks = kernel.shape.blocks
        return Work(block, slot, turn == 0, 0, blocks.queries, 0, blocks.keys, None)

    def clear(turn: jax.Array, slot: jax.Array) -> jax.Array:
        meet(turn, slot)
        attend(kernel, work(turn, slot))
        return 1 - slot

    def masked(turn: jax.Array, slot: jax.Array) -> jax.Array:
        keys = meet(turn, slot)
        clear_unseen_values(kernel, block, keys, slot)
        attend_masked(kernel, work(turn, slot), keys)
        return 1 - slot

    slot = lax.fori_loop(0, block.num_clear, clear, first_slot)
    return lax.fori_loop(block.num_clear, block.num_key_blocks, masked, slot)


class _Carry(NamedTuple):
    """What a block of queries leaves to the next."""

    slot: jax.Array  # where its first keys are
    table_slot: jax.Array  # where its row's page ids are
    leaving: QueryBlock  # the block whose result is leaving; no tokens if there is none


def _do_query_block(kernel: Kernel, row: Any, index: Any, num_blocks: Any, carry: _Carry) -> Any:
    """A block of queries from start to end; returns the carry of the next one."""
    buffers, num_slots = kernel.buffers, kernel.num_slots
    is_last = index + 1 == num_blocks
    next_row = buffers.next_rows[row]
    has_next_row = next_row < num_slots

    @pl.when((index == 0) & has_next_row)
    def _() -> None:
        table_copy(buffers, next_row, 1 - carry.table_slot).start()

    @pl.when(is_last & has_next_row)
    def _() -> None:
        table_copy(buffers, next_row, 1 - carry.table_slot).wait()

    block = QueryBlock.of(kernel, row, index)
    q_copies(kernel, block, lambda copy: copy.wait())
    begin_queries(kernel, block)
    following_row = jnp.where(is_last, next_row, row)
    # Of a row that is not there only the row's number is used.
    following = QueryBlock.of(
        kernel, jnp.minimum(following_row, num_slots - 1), jnp.where(is_last, 0, index + 1)
    )._replace(row=following_row)
    pl.when(following_row < num_slots)(
        lambda: q_copies(kernel, following, lambda copy: copy.start())
    )
    table_slot = jnp.where(is_last, 1 - carry.table_slot, carry.table_slot)
    slots = (carry.slot, carry.table_slot, table_slot)
    slot = _attend_queries(kernel, block, following, slots)
    out_copies(kernel, carry.leaving, lambda copy: copy.wait())
    end_queries(kernel, block)
    out_copies(kernel, block, lambda copy: copy.start())
    return _Carry(slot, table_slot, block)


def prefill_kernel(*refs: Any, shape: Shape, options: ScoreOptions, has_sinks: bool) -> None:
    """The body of the Pallas call; `refs` are its scalars, inputs, output and scratch memory."""
    rows, refs = Rows(*refs[:3]), refs[3:]
    sinks, refs = (refs[0], refs[1:]) if has_sinks else (None, refs)
    num_buffers = len(Buffers._fields)
    buffers, state = Buffers(*refs[:num_buffers]), Softmax(*refs[num_buffers:])
    kernel = Kernel(rows, buffers, state, sinks, shape, options)
    first_row = _find_next_rows(kernel)

    @pl.when(first_row < kernel.num_slots)
    def _() -> None:
        zero = jnp.int32(0)
        table = table_copy(buffers, first_row, 0)
        table.start()
        block = QueryBlock.of(kernel, first_row, 0)
        q_copies(kernel, block, lambda copy: copy.start())
        table.wait()
        start_keys(kernel, first_row, block.key_block(0), 0, 0)

        def do_row(row: jax.Array, carry: _Carry) -> _Carry:
            num_blocks = div(rows.q_len(row) + shape.blocks.queries - 1, shape.blocks.queries)
            return lax.fori_loop(
                0, num_blocks, lambda i, c: _do_query_block(kernel, row, i, num_blocks, c), carry
            )

        nothing = QueryBlock(*[zero] * len(QueryBlock._fields))
        carry = lax.fori_loop(rows.num_decode, rows.num_rows, do_row, _Carry(zero, zero, nothing))
        out_copies(kernel, carry.leaving, lambda copy: copy.wait())

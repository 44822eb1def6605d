"""The decode kernel: rows one after the other, each block by block, the next one in flight."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sgl_jax.kernels.ragged_paged_attention.rows import Rows
from sgl_jax.kernels.ragged_paged_attention.scores import ScoreOptions
from sgl_jax.kernels.ragged_paged_attention.tpu_decode.copies import (
    for_each_query,
    out_copy,
    q_copy,
    start_block,
    table_copy,
    wait_block,
    wait_out,
)
from sgl_jax.kernels.ragged_paged_attention.tpu_decode.memory import (
    Buffers,
    Kernel,
    KeyPages,
    Shape,
    Softmax,
    key_block,
)
from sgl_jax.kernels.ragged_paged_attention.tpu_decode.softmax import (
    attend_block,
    begin_row,
    end_row,
)


def _do_block(kernel: Kernel, row: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """Attend to a block of a row, with the next block's DMAs under way; the next buffer."""
    rows, block_pages = kernel.rows, kernel.shape.block_pages
    is_last = page + block_pages >= kernel.key_pages.stop[row]
    next_row = jnp.where(is_last, row + 1, row)

    @pl.when(next_row < rows.num_decode)
    def _() -> None:
        next_page = jnp.where(is_last, kernel.key_pages.first[next_row], page + block_pages)
        start_block(kernel, key_block(kernel, next_row, next_page, 1 - slot))

    block = key_block(kernel, row, page, slot)
    wait_block(kernel, block)
    attend_block(kernel, block)
    return 1 - slot


def _start_row(kernel: Kernel, row: jax.Array) -> None:
    """Start what a row needs but its KV, of which its page ids must be there first."""
    slot = lax.rem(row, 2)
    for_each_query(kernel, row, lambda token, i: q_copy(kernel.buffers, token, slot, i).start())
    pl.when(row + 1 < kernel.rows.num_decode)(lambda: table_copy(kernel.buffers, row + 1).start())


def _do_row(kernel: Kernel, row: jax.Array, slot: jax.Array) -> jax.Array:
    """Attention of one row; its first block is under way in buffer `slot`; the next buffer."""
    rows, buffers, block_pages = kernel.rows, kernel.buffers, kernel.shape.block_pages
    row_slot = lax.rem(row, 2)

    @pl.when(row + 1 < rows.num_decode)
    def _() -> None:
        table_copy(buffers, row + 1).wait()
        _start_row(kernel, row + 1)

    for_each_query(kernel, row, lambda token, i: q_copy(buffers, token, row_slot, i).wait())
    begin_row(kernel, row_slot)
    first = kernel.key_pages.first[row]
    blocks = lax.div(kernel.key_pages.stop[row] - first + block_pages - 1, jnp.int32(block_pages))
    # At least one, even of an empty row: whoever comes before has counted on it.
    slot = lax.fori_loop(
        0,
        jnp.maximum(blocks, 1),
        lambda n, slot: _do_block(kernel, row, first + n * block_pages, slot),
        slot,
    )
    pl.when(row >= 2)(lambda: wait_out(kernel, row - 2))
    end_row(kernel, row_slot)
    for_each_query(kernel, row, lambda token, i: out_copy(buffers, token, row_slot, i).start())
    return slot


def decode_kernel(*refs: Any, shape: Shape, options: ScoreOptions, has_sinks: bool) -> None:
    """The body of the Pallas call; `refs` are its scalars, inputs, output and scratch memory."""
    rows, key_pages, refs = Rows(*refs[:3]), KeyPages(*refs[3:5]), refs[5:]
    sinks, refs = (refs[0], refs[1:]) if has_sinks else (None, refs)
    num_buffers = len(Buffers._fields)
    buffers, state = Buffers(*refs[:num_buffers]), Softmax(*refs[num_buffers:])
    kernel = Kernel(shape, options, rows, key_pages, buffers, state, sinks)

    @pl.when(rows.num_decode > 0)
    def _() -> None:
        # Zeros beside other heads' columns, and in the places of queries that no row has, stay.
        state.q[...] = jnp.zeros_like(state.q)
        buffers.q[...] = jnp.zeros_like(buffers.q)
        row, slot = jnp.int32(0), jnp.int32(0)
        table_copy(buffers, row).start()
        table_copy(buffers, row).wait()
        _start_row(kernel, row)
        start_block(kernel, key_block(kernel, row, key_pages.first[0], slot))
        lax.fori_loop(0, rows.num_decode, partial(_do_row, kernel), slot)
        pl.when(rows.num_decode > 1)(lambda: wait_out(kernel, rows.num_decode - 2))
        wait_out(kernel, rows.num_decode - 1)

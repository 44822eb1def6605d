"""The decode kernel's DMAs: a row's page ids, pages of keys and values, queries and results."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.ragged_paged_attention.tpu_decode.memory import (
    TABLES,
    Buffers,
    Kernel,
    KeyBlock,
)


def table_copy(buffers: Buffers, row: Any) -> Any:
    slot = lax.rem(row, jnp.int32(TABLES))
    return pltpu.make_async_copy(
        buffers.table_hbm.at[row], buffers.table.at[slot], buffers.table_sem
    )


def page_copy(kernel: Kernel, block: KeyBlock, i: Any) -> Any:
    """The DMA of the i-th page of a block."""
    buffers = kernel.buffers
    page_id = buffers.table[lax.rem(block.row, jnp.int32(TABLES)), 0, block.page + i]
    return pltpu.make_async_copy(
        buffers.kv_hbm.at[kernel.rows.layer, page_id],
        buffers.kv.at[block.slot, i],
        buffers.kv_sem.at[block.slot],
    )


def start_block(kernel: Kernel, block: KeyBlock) -> None:
    """Start the DMAs of a block's pages."""
    block_pages = kernel.shape.block_pages

    @pl.when(block.pages == block_pages)
    def _() -> None:
        for i in range(block_pages):
            page_copy(kernel, block, i).start()

    @pl.when(block.pages < block_pages)
    def _() -> None:
        @pl.loop(0, block.pages)
        def _(i: jax.Array) -> None:
            page_copy(kernel, block, i).start()


def wait_block(kernel: Kernel, block: KeyBlock) -> None:
    """Wait until all pages of a block are there: a wait counts bytes, whoever brought them."""
    here, sem = kernel.buffers.kv.at[block.slot], kernel.buffers.kv_sem.at[block.slot]
    block_pages = kernel.shape.block_pages

    @pl.when(block.pages == block_pages)
    def _() -> None:
        pltpu.make_async_copy(here, here, sem).wait()

    @pl.when(block.pages < block_pages)
    def _() -> None:
        @pl.loop(0, block.pages)
        def _(i: jax.Array) -> None:
            page = here.at[i]
            pltpu.make_async_copy(page, page, sem).wait()


def for_each_query(kernel: Kernel, row: jax.Array, do: Callable[[Any, Any], None]) -> None:
    """do(token, i) for the i-th query of a row, at `token` of the step."""
    token, q_len = kernel.rows.q_offsets[row], kernel.rows.q_len(row)
    if kernel.shape.max_queries == 1:
        pl.when(q_len == 1)(lambda: do(token, 0))
    else:
        pl.loop(0, q_len)(lambda i: do(token + i, i))


def q_copy(buffers: Buffers, token: Any, slot: Any, i: Any) -> Any:
    return pltpu.make_async_copy(
        buffers.q_hbm.at[token], buffers.q.at[slot, i], buffers.q_sem.at[slot]
    )


def out_copy(buffers: Buffers, token: Any, slot: Any, i: Any) -> Any:
    return pltpu.make_async_copy(
        buffers.out.at[slot, i], buffers.out_hbm.at[token], buffers.out_sem.at[slot]
    )


def wait_out(kernel: Kernel, row: jax.Array) -> None:
    """Wait until a row's results are in memory."""
    slot = lax.rem(row, 2)
    for_each_query(kernel, row, lambda token, i: out_copy(kernel.buffers, token, slot, i).wait())

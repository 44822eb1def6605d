"""The prefill kernel's DMAs: a row's page ids, pages of keys and values, queries and results."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.memory import Buffers, Kernel, div
from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.query_block import QueryBlock

# Tokens that travel at once where a row has less than a block of them.
RUN_TOKENS = 16


def table_copy(buffers: Buffers, row: Any, slot: Any) -> Any:
    return pltpu.make_async_copy(
        buffers.table_hbm.at[row], buffers.table.at[slot], buffers.table_sem
    )


def _pages_of(kernel: Kernel, row: Any, block: Any) -> jax.Array:
    """How many pages a row has in a block of keys, 1 .. block_pages."""
    pages = div(kernel.rows.kv_len(row) + kernel.shape.page_size - 1, kernel.shape.page_size)
    return jnp.minimum(pages - block * kernel.shape.block_pages, kernel.shape.block_pages)


def start_keys(kernel: Kernel, row: Any, block: Any, table_slot: Any, slot: Any) -> None:
    """Start the DMAs of a block of keys and values: one for each page."""
    buffers, block_pages = kernel.buffers, kernel.shape.block_pages

    @pl.loop(0, _pages_of(kernel, row, block))
    def _(i: jax.Array) -> None:
        page = buffers.table[table_slot, 0, block * block_pages + i]
        pltpu.make_async_copy(
            buffers.kv_hbm.at[kernel.rows.layer, page],
            buffers.kv.at[slot, i],
            buffers.kv_sem.at[slot],
        ).start()


def wait_keys(kernel: Kernel, row: Any, block: Any, slot: Any) -> None:
    """Wait for all pages of a block: a wait counts bytes, whoever brought them."""
    here, sem = kernel.buffers.kv.at[slot], kernel.buffers.kv_sem.at[slot]
    num_pages = _pages_of(kernel, row, block)
    is_whole = num_pages == kernel.shape.block_pages
    pl.when(is_whole)(lambda: pltpu.make_async_copy(here, here, sem).wait())

    @pl.loop(0, jnp.where(is_whole, 0, num_pages))
    def _(i: jax.Array) -> None:
        page = here.at[i]
        pltpu.make_async_copy(page, page, sem).wait()


def for_each_run(kernel: Kernel, block: QueryBlock, do: Any) -> None:
    """do(first, size) for runs of the block's tokens, of few static sizes.

    A DMA has a static size, and one that is longer than the row would reach into the next.
    """
    done = jnp.int32(0)
    for size in (kernel.shape.blocks.queries, RUN_TOKENS, 1):
        if size > kernel.buffers.tokens_hbm.shape[0]:
            continue
        count = div(block.num_tokens - done, size)
        begin = done

        @pl.loop(0, count)
        def _(i: jax.Array, begin: jax.Array = begin, size: int = size) -> None:
            do(begin + i * size, size)

        done += count * size


def q_copies(kernel: Kernel, block: QueryBlock, do: Any) -> None:
    """do(copy) for the DMAs that bring a block's queries."""
    buffers = kernel.buffers
    for_each_run(
        kernel,
        block,
        lambda first, size: do(
            pltpu.make_async_copy(
                buffers.tokens_hbm.at[pl.ds(block.token + first, size)],
                buffers.q_arriving.at[pl.ds(first, size)],
                buffers.q_sem,
            )
        ),
    )


def out_copies(kernel: Kernel, block: QueryBlock, do: Any) -> None:
    """do(copy) for the DMAs that take a block's result away."""
    buffers = kernel.buffers
    for_each_run(
        kernel,
        block,
        lambda first, size: do(
            pltpu.make_async_copy(
                buffers.out_leaving.at[pl.ds(first, size)],
                buffers.tokens_hbm.at[pl.ds(block.token + first, size)],
                buffers.out_sem,
            )
        ),
    )

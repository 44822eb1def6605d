"""Attention of decode rows on TPU: one query a row, plus its drafts, over all of the row's KV.

Decode is bound by memory, so the kernel is built around its DMAs: a page of one layer is
contiguous, K heads then V heads, and is copied by one DMA. While the kernel computes on one block
of pages, the next block is in flight; it may be the first block of the next row.

A block that all of the row's queries see is computed at once, without masks. At a row's end or its
window's edge, which need masks, a block is computed in parts, and parts outside the row are
skipped. KV heads are stacked (`stacks`): the scores of several heads share registers that a few
queries would not fill, and the matrix unit is loaded in fewer steps.

Grid: none. One program processes the rows 0 .. num_decode in order.

Buffers, with S stacks of R rows and C columns (`Stacks`), D the head_dim of a slot:
    table    int32 [4, 1, W]                            page ids of row r in r % 4; scalar memory
    kv       [2, block_pages, *one page]                in the cache's layout
    q, out   [2, max_queries, kv_heads, group, D]       of row r in r % 2; out as wide as values
    softmax  q [S, R, C], m, l [S, R, 128], acc [S, R, width of values]   float32

DMAs of row r (its first block was started during row r - 1):
    wait for the page ids of row r + 1; start its queries, and the page ids of row r + 2
    wait for the queries of row r
    for each block: start the next block, the first of row r + 1 after the last; wait for this block
    wait until the results of row r - 2 are in memory; start the results of row r
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.tpu.shared import (
    KEYS_THEN_VALUES,
    CacheSlots,
    PageBlock,
    PageBuffers,
    PagedArrays,
    Pages,
    Rows,
    Shape,
    Softmax,
    TokenBuffers,
    should_move_bits,
)
from sgl_jax.kernels.attention.tpu.stacks import (
    Decode,
    KeyPages,
    Stacks,
    attend_block,
    begin_row,
    end_row,
    stacked_sinks,
)
from sgl_jax.kernels.attention.tpu.tuned import DecodeBlocks, decode_blocks
from sgl_jax.kernels.pallas_tpu import call
from sgl_jax.kernels.tpu_chip import LANES, SUBLANES

TABLES = 4  # buffers of page ids: for this row, the next row, and the copies in flight


def decode_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    options: ScoreOptions,
    *,
    slots: CacheSlots = KEYS_THEN_VALUES,
    blocks: DecodeBlocks | None = None,
) -> jax.Array:
    """Attend with the tokens of rows 0 .. num_decode, after their K and V are in the cache.

    Shapes are the same as in `api.RaggedPagedAttention`, except that head_dim is the width of a
    slot: if the cache is packed, `q` is zero in the lanes of V, and the result is there. If values
    are narrower than a slot, the other lanes of the result keep the queries. `blocks` are the block
    sizes, tuned for the chip by default.

    Returns [T, q_heads, head_dim] in q's dtype, in q's memory if the caller does not use q again.
    Tokens of other rows keep their entries of q.
    """
    shape = Shape.of(q, kv_cache, slots)
    max_queries = 1 + batch.max_draft_tokens
    stacks = Stacks(shape.kv_heads, shape.group * max_queries, shape.head_dim)
    if blocks is None:
        _, _, heads, _, head_dim = kv_cache.shape
        blocks = decode_blocks(shape.kv_heads, heads * head_dim * kv_cache.dtype.itemsize)
    part_pages = max(1, blocks.part_keys // shape.page_size)
    parts = max(1, blocks.block_keys // (shape.page_size * part_pages))
    grouped = q.reshape(q.shape[0], shape.kv_heads, shape.group, shape.head_dim)
    by_query = (2, max_queries, *grouped.shape[1:3])
    queries, results = (
        pltpu.VMEM((*by_query, width), q.dtype) for width in (shape.head_dim, shape.value_dim)
    )
    sems = pltpu.SemaphoreType.DMA((2,))
    softmax_rows = stacks.num_stacks, stacks.rows
    scratch = [
        PageBuffers.scratch(kv_cache, batch.page_table.shape[1], TABLES, parts * part_pages),
        TokenBuffers(queries, results, sems, sems),
        Softmax.scratch(softmax_rows, jnp.dtype(jnp.float32), stacks.columns, shape.value_dim),
        pltpu.VMEM((SUBLANES, LANES), jnp.int32),
    ]
    sinks = options.sinks
    if sinks is not None:
        sinks = stacked_sinks(sinks, shape.group, stacks)
    moves_bits = should_move_bits(kv_cache.dtype, shape.product_dtype)
    static = (shape, stacks, options._replace(sinks=None), part_pages, moves_bits)
    rows = Rows.of(batch, layer), row_pages(batch, shape.page_size, options)
    hbm = PagedArrays(batch.page_table[:, None], kv_cache, grouped)
    (out,) = call(partial(_kernel, static), "paged_decode", rows, (sinks,), hbm, 1, scratch)
    return out.reshape(q.shape)


def row_pages(batch: AttentionBatch, page_size: int, options: ScoreOptions) -> KeyPages:
    """Return the pages that each row reads: from the first key in its window to its last key."""
    kv_lens = batch.kv_starts + batch.q_offsets[1:] - batch.q_offsets[:-1]
    first_keys = jnp.zeros_like(kv_lens)
    if options.sliding_window is not None:
        first_keys = jnp.maximum(options.first_seen(batch.kv_starts), 0)
    return KeyPages(first_keys // page_size, -(-kv_lens // page_size))


def _kernel(
    static: tuple[Shape, Stacks, ScoreOptions, int, bool],
    rows: Rows,
    key_pages: KeyPages,
    sinks: Any,
    hbm: PagedArrays,
    tokens: Any,
    page_buffers: PageBuffers,
    buffers: TokenBuffers,
    softmax: Softmax,
    flags: Any,
) -> None:
    pages = Pages(rows, hbm, page_buffers)
    kernel = Decode(*static, rows, key_pages, sinks, tokens, pages, buffers, softmax, flags)

    @pl.when(rows.num_decode > 0)
    def _() -> None:
        # The zeros in other heads' columns, and in the places of queries that no row has, remain.
        softmax.q[...] = jnp.zeros_like(softmax.q)
        buffers.q[...] = jnp.zeros_like(buffers.q)
        row, buffer = jnp.int32(0), jnp.int32(0)
        table_copy(kernel, row).start()
        table_copy(kernel, row).wait()
        start_row(kernel, row)
        pages.start(page_block(kernel, row, key_pages.first[0], buffer), unrolled=True)
        lax.fori_loop(0, rows.num_decode, partial(attend_row, kernel), buffer)
        pl.when(rows.num_decode > 1)(lambda: wait_out(kernel, rows.num_decode - 2))
        wait_out(kernel, rows.num_decode - 1)


def attend_row(kernel: Decode, row: jax.Array, buffer: jax.Array) -> jax.Array:
    """Attend with a row; `buffer` is for its first block. Return the next row's buffer."""
    rows, block_pages = kernel.rows, kernel.pages.block_pages
    at = lax.rem(row, 2)

    @pl.when(row + 1 < rows.num_decode)
    def _() -> None:
        table_copy(kernel, row + 1).wait()
        start_row(kernel, row + 1)

    for_each_query(kernel, row, lambda token, i: q_copy(kernel, token, at, i).wait())
    begin_row(kernel, at)
    first = kernel.key_pages.first[row]
    blocks = lax.div(kernel.key_pages.stop[row] - first + block_pages - 1, jnp.int32(block_pages))
    # At least one block, even for an empty row: the previous row has started its DMA.
    buffer = lax.fori_loop(
        0,
        jnp.maximum(blocks, 1),
        lambda n, buffer: next_block(kernel, row, first + n * block_pages, buffer),
        buffer,
    )
    pl.when(row >= 2)(lambda: wait_out(kernel, row - 2))
    end_row(kernel, at)
    for_each_query(kernel, row, lambda token, i: out_copy(kernel, token, at, i).start())
    return buffer


def start_row(kernel: Decode, row: jax.Array) -> None:
    """Start a row's DMAs, except for its KV, which needs the row's page ids first."""
    at = lax.rem(row, 2)
    for_each_query(kernel, row, lambda token, i: q_copy(kernel, token, at, i).start())
    pl.when(row + 1 < kernel.rows.num_decode)(lambda: table_copy(kernel, row + 1).start())


def next_block(kernel: Decode, row: jax.Array, page: jax.Array, buffer: jax.Array) -> jax.Array:
    """Attend to a row's block from `page` on, copy the next block, and return its buffer."""
    rows, block_pages = kernel.rows, kernel.pages.block_pages
    is_last = page + block_pages >= kernel.key_pages.stop[row]
    next_row = jnp.where(is_last, row + 1, row)

    @pl.when(next_row < rows.num_decode)
    def _() -> None:
        next_page = jnp.where(is_last, kernel.key_pages.first[next_row], page + block_pages)
        kernel.pages.start(page_block(kernel, next_row, next_page, 1 - buffer), unrolled=True)

    block = page_block(kernel, row, page, buffer)
    kernel.pages.wait(block)
    attend_block(kernel, row, block)
    return 1 - buffer


def page_block(kernel: Decode, row: jax.Array, page: jax.Array, buffer: jax.Array) -> PageBlock:
    """Return the block of a row's pages from `page` on, short or empty at the row's end."""
    num_pages = jnp.clip(kernel.key_pages.stop[row] - page, 0, kernel.pages.block_pages)
    return PageBlock(lax.rem(row, jnp.int32(TABLES)), page, num_pages, buffer)


def table_copy(kernel: Decode, row: Any) -> Any:
    return kernel.pages.table_copy(row, lax.rem(row, jnp.int32(TABLES)))


def for_each_query(kernel: Decode, row: jax.Array, do: Callable[[Any, Any], None]) -> None:
    """Call do(token, i) for the i-th query of a row, at `token` of the step."""
    token, q_len = kernel.rows.q_offsets[row], kernel.rows.q_len(row)
    if kernel.max_queries == 1:
        pl.when(q_len == 1)(lambda: do(token, 0))
    else:
        pl.loop(0, q_len)(lambda i: do(token + i, i))


def q_copy(kernel: Decode, token: Any, at: Any, i: Any) -> Any:
    q, sem = kernel.buffers.q.at[at, i], kernel.buffers.q_sem.at[at]
    return pltpu.make_async_copy(kernel.tokens.at[token], q, sem)


def out_copy(kernel: Decode, token: Any, at: Any, i: Any) -> Any:
    out, sem = kernel.buffers.out.at[at, i], kernel.buffers.out_sem.at[at]
    return pltpu.make_async_copy(out, kernel.tokens.at[token, :, :, : out.shape[2]], sem)


def wait_out(kernel: Decode, row: jax.Array) -> None:
    at = lax.rem(row, 2)
    for_each_query(kernel, row, lambda token, i: out_copy(kernel, token, at, i).wait())

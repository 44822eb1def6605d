"""Attention of prefill chunks on TPU: many queries a row, over all of the row's KV.

Prefill is bound by the matrix unit, so the kernel is built around its matmuls. A block of a row's
queries stays in vector memory while the kernel reads the row's keys block by block. The queries of
a KV head's whole group are one matrix. The softmax uses powers of two, with m in all lanes and l as
a sum for each lane, so that no layout changes between blocks.

Keys that all queries of the block see come first, without a mask; then keys on the diagonal, at
the row's end or at the window's edge. While the kernel computes on one block of keys, the next
block is in flight; it may be the first of the next block of queries, or of the next row.

Grid: none. One program processes the rows num_decode .. num_rows in order, and each row's blocks
of queries in order.

Buffers, with Q queries of a block, H KV heads of G queries each, D the head_dim of a slot:
    next_rows  int32 [B + 1]                 the next row that has queries, or B; scalar memory
    table      int32 [2, 1, W]               page ids of this row and the next; scalar memory
    kv         [2, block_pages, *one page]   in the cache's layout
    q, out     [Q, H * G, D]                 by token, in HBM's layout; out as wide as values
    softmax    q [H, G, Q, D], by head, in the dtype of the products
               m, l [H, G, Q, 128], acc [H, G, Q, D]   float32

DMAs of a block of queries (its queries and first keys were started during the previous block):
    in a row's first block: start the page ids of the next row; in its last block: wait for them
    wait for the block's queries, order them by head; start the next block's queries
    for each block of keys: start the next block, the first of the next block of queries after the
        last; wait for this block
    wait until the results of the previous block are in memory; start the results of this block
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.tpu.query_blocks import (
    Prefill,
    QueryBlock,
    Work,
    attend,
    attend_masked,
    begin_queries,
    end_queries,
    out_copies,
    q_copies,
)
from sgl_jax.kernels.attention.tpu.shared import (
    KEYS_THEN_VALUES,
    LOG2_E,
    CacheSlots,
    Expansion,
    PageBlock,
    PageBuffers,
    PagedArrays,
    Pages,
    Rows,
    Shape,
    Softmax,
    Spans,
    TokenBuffers,
    div,
)
from sgl_jax.kernels.attention.tpu.tuned import PrefillBlocks, prefill_blocks
from sgl_jax.kernels.pallas_tpu import call, start, wait
from sgl_jax.kernels.tpu_chip import LANES


class Carry(NamedTuple):
    """The state passed from a block of queries to the next."""

    buffer: jax.Array  # index of the KV buffer with the next block's first keys
    table: jax.Array  # index of the buffer with its row's page ids
    leaving: QueryBlock  # the block with results in flight to HBM; without tokens if there is none


def prefill_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    options: ScoreOptions,
    *,
    slots: CacheSlots = KEYS_THEN_VALUES,
    blocks: PrefillBlocks | None = None,
    expansion: Expansion | None = None,
) -> jax.Array:
    """Attend with the tokens of rows num_decode .. num_rows, after their K and V are in the cache.

    Shapes are the same as in `api.RaggedPagedAttention`, except that head_dim is the width of a
    slot: if the cache is packed, `q` is zero in the lanes of V, and the result is there. If values
    are narrower than a slot, the other lanes of the result keep the queries. `blocks` are the block
    sizes, tuned for the chip by default. `expansion` computes each head's keys and values if the
    cache holds latents; `blocks.parts` is then the number of heads. With `blocks.is_invariant`, the
    rows before num_decode are computed, too.

    Returns [T, q_heads, head_dim] in q's dtype, in q's memory if the caller does not use q again.
    Tokens of other rows keep their entries of q. Raises ValueError if the page size does not divide
    a block of keys.
    """
    shape = Shape.of(q, kv_cache, slots)
    kv_heads, group, page_size, head_dim, dtype = *shape[:4], shape.product_dtype
    if blocks is None:
        blocks = prefill_blocks(kv_heads, group, head_dim, page_size, dtype, q.shape[0])
    if blocks.is_invariant:
        batch = replace(batch, num_decode=jnp.zeros_like(batch.num_decode))
    shape = shape.split(blocks.parts)
    kv_heads, group = shape[:2]
    if blocks.part_keys % page_size:
        raise ValueError(f"page_size must divide {blocks.part_keys}, got {page_size}")
    sinks = options.sinks
    if sinks is not None:
        by_head = sinks.astype(jnp.float32).reshape(kv_heads, group, 1, 1) * LOG2_E
        sinks = jnp.broadcast_to(by_head, (kv_heads, group, 1, LANES))
    num_rows, table_width = batch.page_table.shape
    queries, results = (
        pltpu.VMEM((blocks.queries, q.shape[1], width), q.dtype)
        for width in (head_dim, shape.value_dim)
    )
    sem = pltpu.SemaphoreType.DMA
    scratch = [
        pltpu.SMEM((num_rows + 1,), jnp.int32),
        PageBuffers.scratch(kv_cache, table_width, 2, blocks.keys // page_size),
        TokenBuffers(queries, results, sem, sem),
        Softmax.scratch((kv_heads, group, blocks.queries), dtype, head_dim, shape.value_dim),
    ]
    kernel = partial(_kernel, (shape, blocks, options._replace(sinks=None)))
    hbm = PagedArrays(batch.page_table[:, None], kv_cache, q)
    scalars, in_vmem = (Rows.of(batch, layer), Spans.of(batch)), (sinks, expansion)
    (out,) = call(kernel, "paged_prefill", scalars, in_vmem, hbm, 1, scratch)
    return out


def _kernel(
    static: tuple[Shape, PrefillBlocks, ScoreOptions],
    rows: Rows,
    spans: Spans | None,
    sinks: Any,
    expansion: Expansion | None,
    hbm: PagedArrays,
    tokens: Any,
    next_rows: Any,
    page_buffers: PageBuffers,
    buffers: TokenBuffers,
    softmax: Softmax,
) -> None:
    pages = Pages(rows, hbm, page_buffers)
    inputs = rows, spans, sinks
    kernel = Prefill(*static, *inputs, expansion, tokens, next_rows, pages, buffers, softmax)
    first_row = find_next_rows(kernel)

    @pl.when(first_row < kernel.no_row)
    def _() -> None:
        zero = jnp.int32(0)
        table = pages.table_copy(first_row, 0)
        table.start()
        block = QueryBlock.of(kernel, first_row, 0, zero)
        q_copies(kernel, block, start)
        table.wait()
        pages.start(page_block(kernel, first_row, block.key_block(0), zero, zero))

        num_queries = kernel.blocks.queries

        def do_row(row: jax.Array, carry: Carry) -> Carry:
            num_blocks = div(rows.q_len(row) + num_queries - 1, num_queries)
            return lax.fori_loop(
                0, num_blocks, lambda i, c: do_query_block(kernel, row, i, num_blocks, c), carry
            )

        nothing = QueryBlock(*[zero] * len(QueryBlock._fields))
        carry = lax.fori_loop(rows.num_decode, rows.num_rows, do_row, Carry(zero, zero, nothing))
        out_copies(kernel, carry.leaving, wait)


def find_next_rows(kernel: Prefill) -> jax.Array:
    """Fill `next_rows`, and return the first prefill row with queries, or B."""
    rows, next_rows = kernel.rows, kernel.next_rows

    def step(i: jax.Array, following: jax.Array) -> jax.Array:
        row = rows.num_rows - 1 - i
        next_rows[row] = following
        return jnp.where(rows.q_len(row) > 0, row, following)

    return lax.fori_loop(0, rows.num_rows - rows.num_decode, step, jnp.int32(kernel.no_row))


def do_query_block(kernel: Prefill, row: Any, index: Any, num_blocks: Any, carry: Carry) -> Carry:
    """Process a block of queries from start to end; return the carry of the next block."""
    no_row, pages = kernel.no_row, kernel.pages
    is_last = index + 1 == num_blocks
    next_row = kernel.next_rows[row]
    has_next_row = next_row < no_row

    @pl.when((index == 0) & has_next_row)
    def _() -> None:
        pages.table_copy(next_row, 1 - carry.table).start()

    @pl.when(is_last & has_next_row)
    def _() -> None:
        pages.table_copy(next_row, 1 - carry.table).wait()

    block = QueryBlock.of(kernel, row, index, carry.table)
    q_copies(kernel, block, wait)
    begin_queries(kernel, block)
    following_row = jnp.where(is_last, next_row, row)
    table = jnp.where(is_last, 1 - carry.table, carry.table)
    # Without a next row, only the sentinel is read.
    following = QueryBlock.of(
        kernel, jnp.minimum(following_row, no_row - 1), jnp.where(is_last, 0, index + 1), table
    )._replace(row=following_row)
    pl.when(following_row < no_row)(lambda: q_copies(kernel, following, start))
    buffer = attend_queries(kernel, block, following, carry.buffer)
    out_copies(kernel, carry.leaving, wait)
    end_queries(kernel, block)
    out_copies(kernel, block, start)
    return Carry(buffer, table, block)


def attend_queries(
    kernel: Prefill, block: QueryBlock, following: QueryBlock, buffer: jax.Array
) -> jax.Array:
    """Attend with a block of queries to all its keys, the first of them in `buffer`.

    Also start the first keys of the next block, `following`, unless its row is B. Returns their
    buffer.
    """

    def arrive(n: jax.Array, buffer: jax.Array) -> jax.Array:
        """Start to copy the block of keys after the n-th, wait for the n-th; return its number."""
        is_last = n + 1 == block.num_key_blocks
        row = jnp.where(is_last, following.row, block.row)

        @pl.when(row < kernel.no_row)
        def _() -> None:
            keys = jnp.where(is_last, following.key_block(0), block.key_block(n + 1))
            table = jnp.where(is_last, following.table, block.table)
            kernel.pages.start(page_block(kernel, row, keys, table, 1 - buffer))

        keys = block.key_block(n)
        kernel.pages.wait(page_block(kernel, block.row, keys, block.table, buffer))
        return keys

    def work(n: jax.Array, buffer: jax.Array) -> Work:
        blocks = kernel.blocks
        return Work(block, buffer, n == 0, 0, blocks.queries, 0, blocks.keys, None)

    def clear(n: jax.Array, buffer: jax.Array) -> jax.Array:
        arrive(n, buffer)
        attend(kernel, work(n, buffer))
        return 1 - buffer

    def masked(n: jax.Array, buffer: jax.Array) -> jax.Array:
        keys = arrive(n, buffer)
        clear_unseen_values(kernel, block, keys, buffer)
        attend_masked(kernel, work(n, buffer), keys)
        return 1 - buffer

    if not kernel.blocks.is_invariant:  # else no block of keys counts as clear
        buffer = lax.fori_loop(0, block.num_clear, clear, buffer)
    return lax.fori_loop(block.num_clear, block.num_key_blocks, masked, buffer)


def page_block(kernel: Prefill, row: Any, keys: Any, table: Any, buffer: Any) -> PageBlock:
    """Return the pages of a block of keys: fewer at the row's end, but at least one."""
    page_size, block_pages = kernel.shape.page_size, kernel.pages.block_pages
    first = keys * block_pages
    row_pages = div(kernel.rows.kv_len(row) + page_size - 1, page_size)
    return PageBlock(table, first, jnp.minimum(row_pages - first, block_pages), buffer)


def clear_unseen_values(kernel: Prefill, block: QueryBlock, keys: Any, buffer: Any) -> None:
    """Call `Pages.clear_values` for slots of a block without a token or outside the window."""
    page_size, options = kernel.shape.page_size, kernel.options
    begin, end = keys * kernel.blocks.keys, kernel.rows.kv_len(block.row)
    first_seen = None
    if options.sliding_window is not None:
        first_seen = options.first_seen(block.position)

    def is_partly_seen(first: Any, num_keys: int) -> Any:
        unseen = first + num_keys > end
        return unseen if first_seen is None else unseen | (first < first_seen)

    @pl.when(is_partly_seen(begin, kernel.blocks.keys))
    def _() -> None:
        @pl.loop(0, kernel.pages.block_pages)
        def _(page: jax.Array) -> None:
            here = begin + page * page_size

            @pl.when(is_partly_seen(here, page_size))
            def _() -> None:
                first = None if first_seen is None else first_seen - here
                kernel.pages.clear_values(kernel.shape, buffer, page, first, end - here)

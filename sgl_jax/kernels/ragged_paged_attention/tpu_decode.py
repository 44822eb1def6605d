"""Attention of decode rows on TPU: one query a row, or one and its drafts, over all of its KV.

Decode is bound by memory, so the kernel is built around its DMAs: a page of one layer is
contiguous, K heads then V heads, and comes as one DMA; a block of pages is computed on while the
next one is in flight, and the next block may be the first one of the next row.

A block that all of the row's queries see is computed on at once, without masks. Where masks are
needed, at a row's end or its window's edge, parts of a block follow each other, and parts that
the row does not reach cost nothing.

KV heads are stacked: their keys lie side by side and make one matrix of 256 columns or more, as
wide as the matrix unit, and each head's queries are rows of their own, with zeros beside the
columns of other heads. So scores of several heads share registers that a few queries would not
fill, and the unit is loaded in fewer steps. Softmax is online (arXiv 2205.14135), in float32.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.ragged_paged_attention.batch import AttentionBatch
from sgl_jax.kernels.ragged_paged_attention.block_sizes import (
    DecodeBlocks,
    decode_blocks,
)
from sgl_jax.kernels.vmem import VMEM_LIMIT_BYTES

SUBLANES = 8
LANES = 128
MATRIX_UNIT = 256  # columns, of the largest
TABLES = 4  # rows' page ids at hand: this row's, the next one's, and those under way
# Finite, so that scores that are all masked leave no NaN: what they add is scaled by
# exp(MASKED - top) = 0 as soon as a visible key is met, and every query sees at least itself.
MASKED = -1e30


class _Shape(NamedTuple):
    """The static sizes of one call."""

    kv_heads: int
    group: int  # queries per KV head
    max_queries: int  # tokens of a row: one, and its drafts
    page_size: int
    head_dim: int  # of a slot of the cache
    packed: bool  # whether a slot holds a head's K and V side by side
    block_pages: int  # of one DMA buffer
    part_pages: int  # of a masked part of a block; divides block_pages

    @property
    def head_rows(self) -> int:
        """Rows that the queries of one KV head take."""
        return self.group * self.max_queries

    @property
    def stacked(self) -> int:
        """KV heads in a stack: a divisor of kv_heads."""
        stacked = 1
        while self.kv_heads % (2 * stacked) == 0 and (
            2 * stacked * self.head_rows <= SUBLANES or 2 * stacked * self.head_dim <= MATRIX_UNIT
        ):
            stacked *= 2
        return stacked

    @property
    def stack_rows(self) -> int:
        """Rows of a stack, padded to whole registers."""
        return -(-self.stacked * self.head_rows // SUBLANES) * SUBLANES

    @property
    def stack_dim(self) -> int:
        """Columns of a stack."""
        return self.stacked * self.head_dim

    @property
    def stacks(self) -> int:
        return self.kv_heads // self.stacked

    @property
    def block_keys(self) -> int:
        return self.block_pages * self.page_size

    def values_of(self, head: int) -> int:
        """Where in a page a head's values lie."""
        return head if self.packed else self.kv_heads + head

    def heads(self, stack: int) -> range:
        """The KV heads of a stack."""
        return range(stack * self.stacked, (stack + 1) * self.stacked)

    def place(self, head: int) -> tuple[int, int, slice]:
        """Where a head lies: its stack, its first row there, its columns."""
        stack, n = divmod(head, self.stacked)
        return stack, n * self.head_rows, slice(n * self.head_dim, (n + 1) * self.head_dim)


class _Options(NamedTuple):
    scale: float
    sliding_window: int | None
    soft_cap: float | None


class _Rows(NamedTuple):
    """The rows of the step, in scalar memory."""

    sizes: Any  # int32 [2]: layer, num_decode
    kv_starts: Any  # int32 [B]
    q_offsets: Any  # int32 [B + 1]
    first_pages: Any  # int32 [B] the page of the first key that any query of the row sees
    stop_pages: Any  # int32 [B] one past the page of the row's last key

    @property
    def layer(self) -> jax.Array:
        return self.sizes[0]

    @property
    def num_decode(self) -> jax.Array:
        return self.sizes[1]

    def q_len(self, row: Any) -> jax.Array:
        return self.q_offsets[row + 1] - self.q_offsets[row]

    def kv_len(self, row: Any) -> jax.Array:
        """Tokens in the cache, this step's included."""
        return self.kv_starts[row] + self.q_len(row)


class _Buffers(NamedTuple):
    """Memory that DMAs move to and from."""

    table_hbm: Any  # int32 [B, 1, pages of a row]
    q_hbm: Any  # [T, kv_heads, group, head_dim]
    kv_hbm: Any  # [layers, pages, 2 * kv_heads, page_size, head_dim], or kv_heads if packed
    out_hbm: Any  # as q_hbm; the same memory
    table: Any  # int32 [TABLES, 1, pages of a row], in scalar memory
    kv: Any  # [2, block_pages, *one page]
    q: Any  # [2, max_queries, kv_heads, group, head_dim]
    out: Any  # as q
    table_sem: Any
    kv_sem: Any  # [2]
    q_sem: Any  # [2]
    out_sem: Any  # [2]


class _Softmax(NamedTuple):
    """One row's queries, and what was found so far for each of them."""

    q: Any  # [stacks, stack_rows, stack_dim], zeros beside the columns of other heads
    top: Any  # float32 [stacks, stack_rows, LANES] greatest score, in all lanes
    total: Any  # float32 [stacks, stack_rows, LANES] denominator times exp(-top), in all lanes
    weighted: Any  # float32 [stacks, stack_rows, head_dim] numerator times exp(-top)


class _Kernel(NamedTuple):
    """What every function of the kernel needs."""

    shape: _Shape
    options: _Options
    rows: _Rows
    buffers: _Buffers
    state: _Softmax


class _Block(NamedTuple):
    """A block of a row's pages, and the buffer it goes to."""

    row: jax.Array
    page: jax.Array  # its first page, as the row counts
    pages: jax.Array  # how many the row has of it, 0 .. block_pages
    slot: jax.Array


def _block(kernel: _Kernel, row: jax.Array, page: jax.Array, slot: jax.Array) -> _Block:
    pages = jnp.clip(kernel.rows.stop_pages[row] - page, 0, kernel.shape.block_pages)
    return _Block(row, page, pages, slot)


def _table_copy(buffers: _Buffers, row: Any) -> Any:
    slot = lax.rem(row, jnp.int32(TABLES))
    return pltpu.make_async_copy(
        buffers.table_hbm.at[row], buffers.table.at[slot], buffers.table_sem
    )


def _page_copy(kernel: _Kernel, block: _Block, i: Any) -> Any:
    """The DMA of the i-th page of a block."""
    buffers = kernel.buffers
    page_id = buffers.table[lax.rem(block.row, jnp.int32(TABLES)), 0, block.page + i]
    return pltpu.make_async_copy(
        buffers.kv_hbm.at[kernel.rows.layer, page_id],
        buffers.kv.at[block.slot, i],
        buffers.kv_sem.at[block.slot],
    )


def _start_block(kernel: _Kernel, block: _Block) -> None:
    """Start the DMAs of a block's pages."""
    block_pages = kernel.shape.block_pages

    @pl.when(block.pages == block_pages)
    def _() -> None:
        for i in range(block_pages):
            _page_copy(kernel, block, i).start()

    @pl.when(block.pages < block_pages)
    def _() -> None:
        @pl.loop(0, block.pages)
        def _(i: jax.Array) -> None:
            _page_copy(kernel, block, i).start()


def _wait_block(kernel: _Kernel, block: _Block) -> None:
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


def _clear_unused_values(kernel: _Kernel, slot: Any, page: Any, used: Any) -> None:
    """Zero V in the slots of one page of a buffer from `used` on.

    Their weight is zero, but zero times what lies there, from another row or from nobody, may be
    NaN. K needs no such care: a masked score is replaced, whatever it was.
    """
    shape, kv = kernel.shape, kernel.buffers.kv
    token = lax.broadcasted_iota(jnp.int32, kv.shape[3:], 0)
    for head in map(shape.values_of, range(shape.kv_heads)):
        values = kv[slot, page, head]
        kv[slot, page, head] = jnp.where(token < used, values, jnp.zeros_like(values))


def _for_each_query(kernel: _Kernel, row: jax.Array, do: Callable[[Any, Any], None]) -> None:
    """do(token, i) for the i-th query of a row, at `token` of the step."""
    token, q_len = kernel.rows.q_offsets[row], kernel.rows.q_len(row)
    if kernel.shape.max_queries == 1:
        pl.when(q_len == 1)(lambda: do(token, 0))
    else:
        pl.loop(0, q_len)(lambda i: do(token + i, i))


def _q_copy(buffers: _Buffers, token: Any, slot: Any, i: Any) -> Any:
    return pltpu.make_async_copy(
        buffers.q_hbm.at[token], buffers.q.at[slot, i], buffers.q_sem.at[slot]
    )


def _out_copy(buffers: _Buffers, token: Any, slot: Any, i: Any) -> Any:
    return pltpu.make_async_copy(
        buffers.out.at[slot, i], buffers.out_hbm.at[token], buffers.out_sem.at[slot]
    )


def _begin_row(kernel: _Kernel, slot: jax.Array, sinks: Any | None) -> None:
    """Spread the row's queries over stacks; nothing found yet, or a sink, whose value is zero."""
    shape, state = kernel.shape, kernel.state
    for head in range(shape.kv_heads):
        stack, first, columns = shape.place(head)
        for i in range(shape.max_queries):
            at = slice(first + i * shape.group, first + (i + 1) * shape.group)
            state.q[stack, at, columns] = kernel.buffers.q[slot, i, head].astype(jnp.float32)
    if sinks is None:
        state.top[...] = jnp.full_like(state.top, MASKED)
        state.total[...] = jnp.zeros_like(state.total)
    else:
        state.top[...] = sinks[...]
        state.total[...] = jnp.ones_like(state.total)
    state.weighted[...] = jnp.zeros_like(state.weighted)


def _seen(kernel: _Kernel, row: Any, position: Any) -> jax.Array:
    """bool [stack_rows, part_keys]: which keys each query sees; `position` is the first key's."""
    shape, options = kernel.shape, kernel.options
    kv_start, kv_len = kernel.rows.kv_starts[row], kernel.rows.kv_len(row)
    tile = (shape.stack_rows, shape.part_pages * shape.page_size)
    keys = lax.broadcasted_iota(jnp.int32, tile, 1) + position
    if shape.max_queries == 1:
        last = kv_start
    else:
        query = lax.broadcasted_iota(jnp.int32, (shape.stack_rows, 1), 0)
        query = lax.div(lax.rem(query, jnp.int32(shape.head_rows)), jnp.int32(shape.group))
        # Queries that the row does not have see what its last one sees, never an unused slot.
        last = jnp.minimum(kv_start + query, kv_len - 1)
    seen = keys <= last
    if options.sliding_window is not None:
        seen &= keys > last - options.sliding_window
    return seen


def _attend(kernel: _Kernel, slot: Any, pages: Any, seen: jax.Array | None) -> None:
    """Merge the attention of a row's queries over some pages of a buffer into the row's state.

    `seen` None: every query sees every key.
    """
    shape, options, state, kv = kernel.shape, kernel.options, kernel.state, kernel.buffers.kv
    precision = lax.Precision.HIGHEST if kv.dtype == jnp.float32 else None
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def side_by_side(heads: Iterable[int]) -> jax.Array:
        """[keys, stack_dim] of some heads of the cache."""
        parts = [kv[slot, pages, head].reshape(-1, shape.head_dim) for head in heads]
        return jnp.concatenate(parts, axis=1)

    for stack in range(shape.stacks):
        keys = side_by_side(shape.heads(stack))
        scores = dot(state.q[stack].astype(kv.dtype), keys, (((1,), (1,)), ((), ())))
        scores = scores * options.scale
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        if seen is not None:
            scores = jnp.where(seen, scores, MASKED)
        old_top = state.top[stack]
        top = jnp.maximum(old_top, scores.max(axis=1, keepdims=True))
        weights = jnp.exp(scores - top[:, :1])
        kept = jnp.exp(old_top - top)
        state.top[stack] = top
        state.total[stack] = state.total[stack] * kept + weights.sum(axis=1, keepdims=True)
        values = side_by_side(map(shape.values_of, shape.heads(stack)))
        found = _own_columns(shape, dot(weights.astype(kv.dtype), values, (((1,), (0,)), ((), ()))))
        state.weighted[stack] = state.weighted[stack] * kept[:, :1] + found


def _own_columns(shape: _Shape, x: jax.Array) -> jax.Array:
    """Of x [stack_rows, stack_dim] each row's columns of its own head: [stack_rows, head_dim]."""
    row = lax.broadcasted_iota(jnp.int32, (shape.stack_rows, shape.head_dim), 0)
    result = x[:, : shape.head_dim]
    for head in range(1, shape.stacked):
        _, first, columns = shape.place(head)
        result = jnp.where(row >= first, x[:, columns], result)
    return result


def _attend_block(kernel: _Kernel, block: _Block) -> None:
    """Attend to a block that has arrived."""
    shape, rows = kernel.shape, kernel.rows
    position, kv_len = block.page * shape.page_size, rows.kv_len(block.row)
    all_seen = position + shape.block_keys <= rows.kv_starts[block.row] + 1
    if kernel.options.sliding_window is not None:
        all_seen &= position >= kv_len - kernel.options.sliding_window

    @pl.when(all_seen)
    def _() -> None:
        _attend(kernel, block.slot, slice(None), None)

    @pl.when(jnp.logical_not(all_seen))
    def _() -> None:
        part = jnp.int32(shape.part_pages)

        @pl.loop(0, lax.div(block.pages + part - 1, part))
        def _(index: jax.Array) -> None:
            first = index * part

            @pl.loop(0, part)
            def _(i: jax.Array) -> None:
                used = kv_len - position - (first + i) * shape.page_size
                pl.when(used < shape.page_size)(
                    lambda: _clear_unused_values(kernel, block.slot, first + i, used)
                )

            seen = _seen(kernel, block.row, position + first * shape.page_size)
            _attend(kernel, block.slot, pl.ds(first, shape.part_pages), seen)


def _end_row(kernel: _Kernel, slot: jax.Array) -> None:
    """Put the row's results into its slot of the output buffer."""
    shape, state, out = kernel.shape, kernel.state, kernel.buffers.out
    for head in range(shape.kv_heads):
        stack, first, _ = shape.place(head)
        for i in range(shape.max_queries):
            at = slice(first + i * shape.group, first + (i + 1) * shape.group)
            result = state.weighted[stack, at] / state.total[stack, at][:, :1]
            out[slot, i, head] = result.astype(out.dtype)


def _do_block(kernel: _Kernel, row: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """Attend to a block of a row, with the next block's DMAs under way; the next buffer."""
    rows, block_pages = kernel.rows, kernel.shape.block_pages
    is_last = page + block_pages >= rows.stop_pages[row]
    next_row = jnp.where(is_last, row + 1, row)

    @pl.when(next_row < rows.num_decode)
    def _() -> None:
        next_page = jnp.where(is_last, rows.first_pages[next_row], page + block_pages)
        _start_block(kernel, _block(kernel, next_row, next_page, 1 - slot))

    block = _block(kernel, row, page, slot)
    _wait_block(kernel, block)
    _attend_block(kernel, block)
    return 1 - slot


def _start_row(kernel: _Kernel, row: jax.Array) -> None:
    """Start what a row needs but its KV, of which its page ids must be there first."""
    slot = lax.rem(row, 2)
    _for_each_query(kernel, row, lambda token, i: _q_copy(kernel.buffers, token, slot, i).start())
    pl.when(row + 1 < kernel.rows.num_decode)(lambda: _table_copy(kernel.buffers, row + 1).start())


def _do_row(kernel: _Kernel, row: jax.Array, slot: jax.Array, sinks: Any | None) -> jax.Array:
    """Attention of one row; its first block is under way in buffer `slot`; the next buffer."""
    rows, buffers, block_pages = kernel.rows, kernel.buffers, kernel.shape.block_pages
    row_slot = lax.rem(row, 2)

    @pl.when(row + 1 < rows.num_decode)
    def _() -> None:
        _table_copy(buffers, row + 1).wait()
        _start_row(kernel, row + 1)

    _for_each_query(kernel, row, lambda token, i: _q_copy(buffers, token, row_slot, i).wait())
    _begin_row(kernel, row_slot, sinks)
    first = rows.first_pages[row]
    blocks = lax.div(rows.stop_pages[row] - first + block_pages - 1, jnp.int32(block_pages))
    # At least one, even of an empty row: whoever comes before has counted on it.
    slot = lax.fori_loop(
        0,
        jnp.maximum(blocks, 1),
        lambda n, slot: _do_block(kernel, row, first + n * block_pages, slot),
        slot,
    )
    pl.when(row >= 2)(lambda: _wait_out(kernel, row - 2))
    _end_row(kernel, row_slot)
    _for_each_query(kernel, row, lambda token, i: _out_copy(buffers, token, row_slot, i).start())
    return slot


def _wait_out(kernel: _Kernel, row: jax.Array) -> None:
    """Wait until a row's results are in memory."""
    slot = lax.rem(row, 2)
    _for_each_query(kernel, row, lambda token, i: _out_copy(kernel.buffers, token, slot, i).wait())


def _kernel(*refs: Any, shape: _Shape, options: _Options, has_sinks: bool) -> None:
    rows, refs = _Rows(*refs[:5]), refs[5:]
    sinks, refs = (refs[0], refs[1:]) if has_sinks else (None, refs)
    state = _Softmax(*refs[12:])
    kernel = _Kernel(shape, options, rows, _Buffers(*refs[:12]), state)

    @pl.when(rows.num_decode > 0)
    def _() -> None:
        # Zeros beside other heads' columns, and in the places of queries that no row has, stay.
        state.q[...] = jnp.zeros_like(state.q)
        kernel.buffers.q[...] = jnp.zeros_like(kernel.buffers.q)
        row, slot = jnp.int32(0), jnp.int32(0)
        _table_copy(kernel.buffers, row).start()
        _table_copy(kernel.buffers, row).wait()
        _start_row(kernel, row)
        _start_block(kernel, _block(kernel, row, rows.first_pages[0], slot))
        lax.fori_loop(0, rows.num_decode, lambda i, slot: _do_row(kernel, i, slot, sinks), slot)
        pl.when(rows.num_decode > 1)(lambda: _wait_out(kernel, rows.num_decode - 2))
        _wait_out(kernel, rows.num_decode - 1)


def decode_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    packed: bool = False,
    blocks: DecodeBlocks | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of the tokens of rows 0 .. num_decode, whose K and V are in the cache already.

    Arguments as in `interface.RaggedPagedAttention`; `blocks` is how much is computed on at once,
    by default as tuned for the chip. `packed`: K and V of a head lie side by side in the cache,
    and `q` has zeros where V is; in the result, that is where the attention is.

    Returns:
        [T, q_heads, head_dim] in q's dtype, in q's memory if the caller has no further use for it;
        other tokens' entries are those of q.
    """
    num_tokens, q_heads, head_dim = q.shape
    kv_heads, page_size = kv_cache.shape[2] // (1 if packed else 2), kv_cache.shape[3]
    token_bytes = kv_cache.shape[2] * kv_cache.shape[4] * kv_cache.dtype.itemsize
    blocks = blocks or decode_blocks(kv_heads, token_bytes)
    part_pages = max(1, blocks.part_keys // page_size)
    shape = _Shape(
        kv_heads=kv_heads,
        group=q_heads // kv_heads,
        max_queries=1 + batch.max_draft_tokens,
        page_size=page_size,
        head_dim=head_dim,
        packed=packed,
        block_pages=max(1, blocks.block_keys // (page_size * part_pages)) * part_pages,
        part_pages=part_pages,
    )
    grouped = q.reshape(num_tokens, kv_heads, shape.group, head_dim)
    num_rows, table_width = batch.page_table.shape
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    inputs = [] if sinks is None else [_stacked_sinks(sinks, shape)]
    num_scalars = len(_Rows._fields)
    stack = (shape.stacks, shape.stack_rows)
    kernel = pl.pallas_call(
        partial(
            _kernel,
            shape=shape,
            options=_Options(scale, sliding_window, soft_cap),
            has_sinks=sinks is not None,
        ),
        name="paged_decode",
        out_shape=jax.ShapeDtypeStruct(grouped.shape, grouped.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            in_specs=[*(pl.BlockSpec(memory_space=pltpu.VMEM) for _ in inputs), *[in_memory] * 3],
            out_specs=in_memory,
            scratch_shapes=[
                pltpu.SMEM((TABLES, 1, table_width), jnp.int32),
                pltpu.VMEM((2, shape.block_pages, *kv_cache.shape[2:]), kv_cache.dtype),
                pltpu.VMEM((2, shape.max_queries, *grouped.shape[1:]), q.dtype),
                pltpu.VMEM((2, shape.max_queries, *grouped.shape[1:]), q.dtype),
                pltpu.SemaphoreType.DMA,
                *[pltpu.SemaphoreType.DMA((2,))] * 3,
                pltpu.VMEM((*stack, shape.stack_dim), jnp.float32),
                pltpu.VMEM((*stack, LANES), jnp.float32),
                pltpu.VMEM((*stack, LANES), jnp.float32),
                pltpu.VMEM((*stack, head_dim), jnp.float32),
            ],
        ),
        input_output_aliases={num_scalars + len(inputs) + 1: 0},
        # Page ids are the memory manager's: a check of each DMA's bounds would cost more than it.
        compiler_params=pltpu.CompilerParams(
            disable_bounds_checks=True, vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
        interpret=interpret,
    )
    out = kernel(
        *_rows(batch, layer, page_size, sliding_window),
        *inputs,
        batch.page_table.reshape(num_rows, 1, table_width),
        grouped,
        kv_cache,
    )
    return out.reshape(q.shape)


def _rows(
    batch: AttentionBatch, layer: jax.Array, page_size: int, sliding_window: int | None
) -> _Rows:
    """The scalars that the kernel needs of each row."""
    kv_lens = batch.kv_starts + batch.q_offsets[1:] - batch.q_offsets[:-1]
    first_keys = jnp.zeros_like(kv_lens)
    if sliding_window is not None:
        first_keys = jnp.maximum(batch.kv_starts - sliding_window + 1, 0)
    return _Rows(
        sizes=jnp.stack([layer, batch.num_decode]).astype(jnp.int32),
        kv_starts=batch.kv_starts,
        q_offsets=batch.q_offsets,
        first_pages=first_keys // page_size,
        stop_pages=-(-kv_lens // page_size),
    )


def _stacked_sinks(sinks: jax.Array, shape: _Shape) -> jax.Array:
    """sinks [q_heads] -> float32 [stacks, stack_rows, LANES], each beside its query."""
    by_head = sinks.astype(jnp.float32).reshape(shape.stacks, shape.stacked, 1, shape.group)
    rows = jnp.broadcast_to(
        by_head, (shape.stacks, shape.stacked, shape.max_queries, shape.group)
    ).reshape(shape.stacks, -1)
    rows = jnp.pad(rows, ((0, 0), (0, shape.stack_rows - rows.shape[1])))
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))

"""Attention of decode rows on TPU: one query a row, or one and its drafts, over all of its KV.

Decode is bound by memory, so the kernel is built around its DMAs: a page of one layer is
contiguous, K heads then V heads, and comes as one DMA; a block of pages is computed on while the
next one is in flight, and the next block may be the first one of the next row.

In a row's computation KV heads are stacked until their queries fill the 8 sublanes of a register:
with 4 queries a head, scores of two heads share registers, at the price of one addition, since
each head's queries are padded with zeros where the other's lie. Softmax is online
(arXiv 2205.14135), in float32.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.ragged_paged_attention.batch import AttentionBatch
from sgl_jax.kernels.ragged_paged_attention.block_sizes import decode_block_pages

SUBLANES = 8
# Finite, so that a row of masked scores leaves no NaN; see `_Softmax`.
MASKED = -1e30


class _Shape(NamedTuple):
    """The static sizes of one call."""

    kv_heads: int
    group: int  # queries per KV head
    max_queries: int  # tokens of a row: one, and its drafts
    page_size: int
    head_dim: int
    block_pages: int
    table_width: int  # page ids of a row

    @property
    def head_rows(self) -> int:
        """Rows that the queries of one KV head take."""
        return self.group * self.max_queries

    @property
    def stacked(self) -> int:
        """KV heads whose queries share registers: a divisor of kv_heads."""
        stacked = 1
        while self.kv_heads % (2 * stacked) == 0 and 2 * stacked * self.head_rows <= SUBLANES:
            stacked *= 2
        return stacked

    @property
    def stack_rows(self) -> int:
        """Rows of a stack, padded to whole registers."""
        return -(-self.stacked * self.head_rows // SUBLANES) * SUBLANES

    @property
    def stacks(self) -> int:
        return self.kv_heads // self.stacked

    @property
    def block_keys(self) -> int:
        return self.block_pages * self.page_size

    def rows_of(self, head: int) -> slice:
        """Where in its stack a head's queries lie."""
        first = head % self.stacked * self.head_rows
        return slice(first, first + self.head_rows)


class _Options(NamedTuple):
    scale: float
    sliding_window: int | None
    soft_cap: float | None


class _Rows(NamedTuple):
    """The rows of the step, in scalar memory."""

    sizes: Any  # int32 [2]: layer, num_decode
    kv_starts: Any  # int32 [B]
    q_offsets: Any  # int32 [B + 1]
    page_ids: Any  # int32 [B * table_width]

    @property
    def layer(self) -> jax.Array:
        return self.sizes[0]

    @property
    def count(self) -> jax.Array:
        return self.sizes[1]

    def q_len(self, row: jax.Array) -> jax.Array:
        return self.q_offsets[row + 1] - self.q_offsets[row]

    def kv_len(self, row: jax.Array) -> jax.Array:
        """Tokens in the cache, this step's included."""
        return self.kv_starts[row] + self.q_len(row)

    def first_page(self, row: jax.Array, shape: _Shape, options: _Options) -> jax.Array:
        """The page of the first key that any of the row's queries sees."""
        if options.sliding_window is None:
            return jnp.int32(0)
        first = self.kv_starts[row] - options.sliding_window + 1
        return lax.div(jnp.maximum(first, 0), jnp.int32(shape.page_size))

    def stop_page(self, row: jax.Array, shape: _Shape) -> jax.Array:
        """One past the page of the row's last key."""
        return lax.div(self.kv_len(row) + shape.page_size - 1, jnp.int32(shape.page_size))


class _Buffers(NamedTuple):
    """Memory of the kernel."""

    q_hbm: Any  # [T, kv_heads, group, head_dim]
    kv_hbm: Any  # [layers, pages, 2 * kv_heads, page_size, head_dim]
    out_hbm: Any  # as q_hbm; the same memory
    kv: Any  # [2, block_pages, 2 * kv_heads, page_size, head_dim]
    q: Any  # [2, max_queries, kv_heads, group, head_dim]
    out: Any  # as q
    kv_sem: Any  # [2]
    q_sem: Any  # [2]
    out_sem: Any  # [2]


class _Softmax(NamedTuple):
    """One row's queries, and what was found so far for each of them."""

    q: Any  # float32 [kv_heads, stack_rows, head_dim], zeros where other heads' queries lie
    top: Any  # float32 [stacks, stack_rows, 128] greatest score, in all lanes
    total: Any  # float32 [stacks, stack_rows, 128] denominator times exp(-top), in all lanes
    weighted: Any  # float32 [stacks, stack_rows, head_dim] numerator times exp(-top)


class _Block(NamedTuple):
    """A block of a row's pages."""

    row: jax.Array
    page: jax.Array  # its first page, as the row counts
    pages: jax.Array  # how many of them the row has, 0 .. block_pages


def _block(rows: _Rows, row: jax.Array, page: jax.Array, shape: _Shape) -> _Block:
    pages = jnp.clip(rows.stop_page(row, shape) - page, 0, shape.block_pages)
    return _Block(row, page, pages)


def _page_copy(rows: _Rows, buffers: _Buffers, shape: _Shape, block: _Block, slot: Any, i: Any):
    """The DMA of the i-th page of a block."""
    page_id = rows.page_ids[block.row * shape.table_width + block.page + i]
    return pltpu.make_async_copy(
        buffers.kv_hbm.at[rows.layer, page_id], buffers.kv.at[slot, i], buffers.kv_sem.at[slot]
    )


def _start_block(
    rows: _Rows, buffers: _Buffers, shape: _Shape, block: _Block, slot: jax.Array
) -> None:
    """Start the DMAs of a block's pages."""

    @pl.when(block.pages == shape.block_pages)
    def _() -> None:
        for i in range(shape.block_pages):
            _page_copy(rows, buffers, shape, block, slot, i).start()

    @pl.when(block.pages < shape.block_pages)
    def _() -> None:
        @pl.loop(0, block.pages)
        def _(i: jax.Array) -> None:
            _page_copy(rows, buffers, shape, block, slot, i).start()


def _wait_block(buffers: _Buffers, shape: _Shape, block: _Block, slot: jax.Array) -> None:
    """Wait until all pages of a block are there: a wait counts bytes, whoever brought them."""

    @pl.when(block.pages == shape.block_pages)
    def _() -> None:
        whole = buffers.kv.at[slot]
        pltpu.make_async_copy(whole, whole, buffers.kv_sem.at[slot]).wait()

    @pl.when(block.pages < shape.block_pages)
    def _() -> None:
        @pl.loop(0, block.pages)
        def _(i: jax.Array) -> None:
            page = buffers.kv.at[slot, i]
            pltpu.make_async_copy(page, page, buffers.kv_sem.at[slot]).wait()


def _clear_unused_values(
    buffers: _Buffers, shape: _Shape, slot: jax.Array, used: jax.Array
) -> None:
    """Zero V in all slots of a block from `used` on.

    Their weight is zero, but zero times what lies there, from another row or from nobody, may be
    NaN. K needs no such care: a masked score is replaced, whatever it was.
    """

    @pl.loop(lax.div(used, jnp.int32(shape.page_size)), shape.block_pages)
    def _(i: jax.Array) -> None:
        token = lax.broadcasted_iota(jnp.int32, (shape.page_size, shape.head_dim), 0)
        is_used = token + i * shape.page_size < used
        for head in range(shape.kv_heads, 2 * shape.kv_heads):
            page = buffers.kv[slot, i, head]
            buffers.kv[slot, i, head] = jnp.where(is_used, page, jnp.zeros_like(page))


def _for_each_query(rows: _Rows, shape: _Shape, row: jax.Array, do: Any) -> None:
    """do(token, i) for the i-th query of a row, at `token` of the step."""
    if shape.max_queries == 1:
        # A decode row has a query; the loop would only cost.
        pl.when(rows.q_len(row) == 1)(lambda: do(rows.q_offsets[row], 0))
        return
    pl.loop(0, rows.q_len(row))(lambda i: do(rows.q_offsets[row] + i, i))


def _q_copy(buffers: _Buffers, token: Any, slot: Any, i: Any):
    return pltpu.make_async_copy(
        buffers.q_hbm.at[token], buffers.q.at[slot, i], buffers.q_sem.at[slot]
    )


def _out_copy(buffers: _Buffers, token: Any, slot: Any, i: Any):
    return pltpu.make_async_copy(
        buffers.out.at[slot, i], buffers.out_hbm.at[token], buffers.out_sem.at[slot]
    )


def _begin_row(
    buffers: _Buffers, state: _Softmax, shape: _Shape, slot: jax.Array, sinks: Any | None
) -> None:
    """Spread the row's queries over stacks; nothing found yet, or a sink, whose value is zero."""
    for head in range(shape.kv_heads):
        first = shape.rows_of(head).start
        for i in range(shape.max_queries):
            at = pl.ds(first + i * shape.group, shape.group)
            state.q[head, at] = buffers.q[slot, i, head].astype(jnp.float32)
    if sinks is None:
        state.top[...] = jnp.full_like(state.top, MASKED)
        state.total[...] = jnp.zeros_like(state.total)
    else:
        state.top[...] = sinks[...]
        state.total[...] = jnp.ones_like(state.total)
    state.weighted[...] = jnp.zeros_like(state.weighted)


def _seen(shape: _Shape, options: _Options, kv_start: Any, kv_len: Any, position: Any) -> Any:
    """bool [stack_rows, block_keys]: which keys each query sees; `position` is the first key's."""
    keys = lax.broadcasted_iota(jnp.int32, (shape.stack_rows, shape.block_keys), 1) + position
    if shape.max_queries == 1:
        last = kv_start
    else:
        row = lax.broadcasted_iota(jnp.int32, (shape.stack_rows, 1), 0)
        query = lax.div(lax.rem(row, shape.head_rows), shape.group)
        # Queries that the row does not have see what its last one sees, never an unused slot.
        last = jnp.minimum(kv_start + query, kv_len - 1)
    seen = keys <= last
    if options.sliding_window is not None:
        seen &= keys > last - options.sliding_window
    return seen


def _attend_block(
    buffers: _Buffers,
    state: _Softmax,
    shape: _Shape,
    options: _Options,
    seen: jax.Array,
    slot: jax.Array,
) -> None:
    """Merge the attention of a row's queries over one block into the row's state."""
    precision = lax.Precision.HIGHEST if buffers.kv.dtype == jnp.float32 else None
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def tokens(head: int) -> jax.Array:
        return buffers.kv[slot, :, head].reshape(shape.block_keys, shape.head_dim)

    for stack in range(shape.stacks):
        heads = range(stack * shape.stacked, (stack + 1) * shape.stacked)
        scores = sum(
            dot(state.q[head].astype(buffers.kv.dtype), tokens(head), (((1,), (1,)), ((), ())))
            for head in heads
        )
        scores = scores * options.scale
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        scores = jnp.where(seen, scores, MASKED)
        old_top = state.top[stack]
        top = jnp.maximum(old_top, scores.max(axis=1, keepdims=True))
        weights = jnp.exp(scores - top[:, :1])
        kept = jnp.exp(old_top - top)
        state.top[stack] = top
        state.total[stack] = state.total[stack] * kept + weights.sum(axis=1, keepdims=True)
        weights = weights.astype(buffers.kv.dtype)
        found = None
        for head in heads:
            values = dot(weights, tokens(shape.kv_heads + head), (((1,), (0,)), ((), ())))
            row = lax.broadcasted_iota(jnp.int32, values.shape, 0)
            is_later = row >= shape.rows_of(head).start
            found = values if found is None else jnp.where(is_later, values, found)
        state.weighted[stack] = state.weighted[stack] * kept[:, :1] + found


def _end_row(buffers: _Buffers, state: _Softmax, shape: _Shape, slot: jax.Array) -> None:
    """Put the row's results into its slot of the output buffer."""
    for head in range(shape.kv_heads):
        stack, first = head // shape.stacked, shape.rows_of(head).start
        for i in range(shape.max_queries):
            at = pl.ds(first + i * shape.group, shape.group)
            out = state.weighted[stack, at] / state.total[stack, at][:, :1]
            buffers.out[slot, i, head] = out.astype(buffers.out.dtype)


def _kernel(
    sizes, kv_starts, q_offsets, page_ids, *refs: Any, shape: _Shape, options: _Options, sinks: bool
) -> None:
    rows = _Rows(sizes, kv_starts, q_offsets, page_ids)
    sinks_ref, refs = (refs[0], refs[1:]) if sinks else (None, refs)
    buffers, state = _Buffers(*refs[:9]), _Softmax(*refs[9:])

    def first_block(row: jax.Array) -> _Block:
        return _block(rows, row, rows.first_page(row, shape, options), shape)

    def start_row(row: jax.Array, slot: jax.Array) -> None:
        _for_each_query(rows, shape, row, lambda token, i: _q_copy(buffers, token, slot, i).start())

    def wait_out(row: jax.Array) -> None:
        slot = lax.rem(row, 2)
        _for_each_query(
            rows, shape, row, lambda token, i: _out_copy(buffers, token, slot, i).wait()
        )

    def do_block(row: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
        block = _block(rows, row, page, shape)
        last = page + shape.block_pages >= rows.stop_page(row, shape)
        next_row = jnp.where(last, row + 1, row)

        @pl.when(next_row < rows.count)
        def _() -> None:
            next_page = jnp.where(
                last, rows.first_page(next_row, shape, options), page + shape.block_pages
            )
            _start_block(rows, buffers, shape, _block(rows, next_row, next_page, shape), 1 - slot)

        _wait_block(buffers, shape, block, slot)
        position, kv_len = page * shape.page_size, rows.kv_len(row)

        @pl.when(position + shape.block_keys > kv_len)
        def _() -> None:
            _clear_unused_values(buffers, shape, slot, kv_len - position)

        seen = _seen(shape, options, rows.kv_starts[row], kv_len, position)
        _attend_block(buffers, state, shape, options, seen, slot)
        return 1 - slot

    def do_row(row: jax.Array, slot: jax.Array) -> jax.Array:
        row_slot = lax.rem(row, 2)
        _for_each_query(
            rows, shape, row, lambda token, i: _q_copy(buffers, token, row_slot, i).wait()
        )
        pl.when(row + 1 < rows.count)(lambda: start_row(row + 1, 1 - row_slot))
        _begin_row(buffers, state, shape, row_slot, sinks_ref)
        first, stop = rows.first_page(row, shape, options), rows.stop_page(row, shape)
        # At least one, even of an empty row: who comes before has started it.
        blocks = jnp.maximum(lax.div(stop - first + shape.block_pages - 1, shape.block_pages), 1)
        slot = lax.fori_loop(
            0, blocks, lambda n, s: do_block(row, first + n * shape.block_pages, s), slot
        )
        pl.when(row >= 2)(lambda: wait_out(row - 2))
        _end_row(buffers, state, shape, row_slot)
        _for_each_query(
            rows, shape, row, lambda token, i: _out_copy(buffers, token, row_slot, i).start()
        )
        return slot

    @pl.when(rows.count > 0)
    def _() -> None:
        # Zeros where no query of a head lies stay as they are.
        state.q[...] = jnp.zeros_like(state.q)
        buffers.q[...] = jnp.zeros_like(buffers.q)
        start_row(jnp.int32(0), jnp.int32(0))
        _start_block(rows, buffers, shape, first_block(jnp.int32(0)), jnp.int32(0))
        lax.fori_loop(0, rows.count, do_row, jnp.int32(0))
        pl.when(rows.count > 1)(lambda: wait_out(rows.count - 2))
        wait_out(rows.count - 1)


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
    block_pages: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of the tokens of rows 0 .. num_decode, whose K and V are in the cache already.

    Arguments as in `interface.RaggedPagedAttention`; `block_pages` is how many pages are computed
    on at once, by default as tuned for the chip.

    Returns:
        [T, q_heads, head_dim] in q's dtype, in q's memory if the caller has no further use for it;
        other tokens' entries are those of q.
    """
    num_tokens, q_heads, head_dim = q.shape
    _, _, twice_kv_heads, page_size, _ = kv_cache.shape
    kv_heads = twice_kv_heads // 2
    block_pages = block_pages or decode_block_pages(kv_cache.shape, kv_cache.dtype)
    table_width = batch.page_table.shape[1]
    shape = _Shape(
        kv_heads=kv_heads,
        group=q_heads // kv_heads,
        max_queries=1 + batch.max_draft_tokens,
        page_size=page_size,
        head_dim=head_dim,
        block_pages=min(block_pages, table_width),
        table_width=table_width,
    )
    grouped = q.reshape(num_tokens, kv_heads, shape.group, head_dim)
    stack = (shape.stacks, shape.stack_rows)
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    inputs: list[jax.Array] = []
    if sinks is not None:
        inputs.append(_stacked_sinks(sinks, shape))
    num_scalars = 4
    kernel = pl.pallas_call(
        partial(
            _kernel,
            shape=shape,
            options=_Options(scale, sliding_window, soft_cap),
            sinks=sinks is not None,
        ),
        name="paged_decode",
        out_shape=jax.ShapeDtypeStruct(grouped.shape, grouped.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            in_specs=[*(pl.BlockSpec(memory_space=pltpu.VMEM) for _ in inputs), *[in_memory] * 2],
            out_specs=in_memory,
            scratch_shapes=[
                pltpu.VMEM((2, shape.block_pages, *kv_cache.shape[2:]), kv_cache.dtype),
                pltpu.VMEM((2, shape.max_queries, *grouped.shape[1:]), q.dtype),
                pltpu.VMEM((2, shape.max_queries, *grouped.shape[1:]), q.dtype),
                *[pltpu.SemaphoreType.DMA((2,))] * 3,
                pltpu.VMEM((kv_heads, shape.stack_rows, head_dim), jnp.float32),
                pltpu.VMEM((*stack, 128), jnp.float32),
                pltpu.VMEM((*stack, 128), jnp.float32),
                pltpu.VMEM((*stack, head_dim), jnp.float32),
            ],
        ),
        input_output_aliases={num_scalars + len(inputs): 0},
        interpret=interpret,
    )
    out = kernel(
        jnp.stack([layer, batch.num_decode]).astype(jnp.int32),
        batch.kv_starts,
        batch.q_offsets,
        batch.page_table.reshape(-1),
        *inputs,
        grouped,
        kv_cache,
    )
    return out.reshape(q.shape)


def _stacked_sinks(sinks: jax.Array, shape: _Shape) -> jax.Array:
    """sinks [q_heads] -> float32 [stacks, stack_rows, 128], each beside its query."""
    by_head = sinks.astype(jnp.float32).reshape(shape.stacks, shape.stacked, 1, shape.group)
    rows = jnp.broadcast_to(
        by_head, (shape.stacks, shape.stacked, shape.max_queries, shape.group)
    ).reshape(shape.stacks, -1)
    rows = jnp.pad(rows, ((0, 0), (0, shape.stack_rows - rows.shape[1])))
    return jnp.broadcast_to(rows[..., None], (*rows.shape, 128))

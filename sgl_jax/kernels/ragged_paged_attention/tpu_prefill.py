"""Attention of prefill chunks on TPU: many queries a row, over all of the row's KV.

Prefill is bound by the matrix unit, so the kernel is built around its matmuls. A block of a row's
queries stays in vector memory while the row's keys pass by in blocks; of each KV head, the queries
of all heads of its group are one matrix. Softmax is online (arXiv 2205.14135), in float32 and in
powers of two; a query's greatest score is kept in all lanes, its denominator as a sum for each
lane, so that nothing changes its layout between blocks.

Keys that all queries of the block see come first, without any mask; then those on the diagonal, at
the row's end or at the window's edge. While a block of keys is computed on, the next one is in
flight, and the next one may be the first of the next block of queries, or of the next row.
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.ragged_paged_attention.batch import AttentionBatch
from sgl_jax.kernels.ragged_paged_attention.prefill_blocks import (
    PrefillBlocks,
    prefill_blocks,
)
from sgl_jax.kernels.vmem import VMEM_LIMIT_BYTES

LANES = 128
# Tokens that change between the order of memory, by token, and that of compute, by head, at once.
TURNED_TOKENS = 32
# Tokens that travel at once where a row has less than a block of them.
RUN_TOKENS = 16
LOG2_E = 1.4426950408889634
# Finite, so that a block whose keys are all masked leaves no NaN behind: what it adds is scaled
# by exp(MASKED - top) = 0 as soon as a visible key is met, and every query sees at least itself.
MASKED = -1e30


class _Shape(NamedTuple):
    """The static sizes of one call."""

    kv_heads: int
    group: int  # queries per KV head
    page_size: int
    head_dim: int  # of a slot of the cache
    packed: bool  # whether a slot holds a head's K and V side by side
    blocks: PrefillBlocks

    def values_of(self, head: Any) -> Any:
        """Where in a page a head's values lie."""
        return head if self.packed else self.kv_heads + head

    @property
    def block_pages(self) -> int:
        return self.blocks.keys // self.page_size

    @property
    def part_heads(self) -> int:
        """As `blocks.heads`, where masks are needed: about as many instructions."""
        wanted = self.blocks.heads * (self.blocks.keys // self.blocks.part_keys)
        return max(n for n in range(1, wanted + 1) if self.kv_heads % n == 0)

    @property
    def turned(self) -> int:
        return min(TURNED_TOKENS, self.blocks.few_queries)


class _Options(NamedTuple):
    scale: float
    sliding_window: int | None
    soft_cap: float | None


class _Scalars(NamedTuple):
    """The rows of the step, in scalar memory."""

    sizes: Any  # int32 [3]: layer, num_decode, num_rows
    kv_starts: Any  # int32 [B]
    q_offsets: Any  # int32 [B + 1]

    @property
    def layer(self) -> jax.Array:
        return self.sizes[0]

    def q_len(self, row: Any) -> jax.Array:
        return self.q_offsets[row + 1] - self.q_offsets[row]

    def kv_len(self, row: Any) -> jax.Array:
        """Tokens in the cache, this step's included."""
        return self.kv_starts[row] + self.q_len(row)


class _Buffers(NamedTuple):
    """Memory of the kernel; B rows, of which only prefill rows are looked at."""

    kv_hbm: Any  # [layers, pages, 2 * kv_heads, page_size, head_dim]
    table_hbm: Any  # int32 [B, 1, table_width]
    tokens_hbm: Any  # [T, q_heads, head_dim] queries, and in their place the result
    next_rows: Any  # int32 [B + 1] scalar memory: the next row that has queries, or B
    table: Any  # int32 [2, 1, table_width] scalar memory: page ids of this row and the next
    kv: Any  # [2, block_pages, 2 * kv_heads, page_size, head_dim]
    q_arriving: Any  # [queries, q_heads, head_dim]
    out_leaving: Any  # as q_arriving
    table_sem: Any
    kv_sem: Any  # [2]
    q_sem: Any
    out_sem: Any


class _Softmax(NamedTuple):
    """A block's queries by head, and what was found so far for each of them."""

    q: Any  # [kv_heads, group, queries, head_dim]
    top: Any  # float32 [kv_heads, group, queries, 128] greatest score, in all lanes
    total: (
        Any  # float32 [kv_heads, group, queries, 128] denominator times 2^-top, a part in each lane
    )
    weighted: Any  # float32 [kv_heads, group, queries, head_dim] numerator times 2^-top


class _QueryBlock(NamedTuple):
    """Some of a row's queries, and the blocks of keys that they see.

    Of the key blocks [first, stop), all queries see all keys of [clear, clear + num_clear).
    """

    row: jax.Array
    token: jax.Array  # of the step, the first
    position: jax.Array  # of the first query in its request
    num_tokens: jax.Array
    first: jax.Array
    stop: jax.Array
    clear: jax.Array
    num_clear: jax.Array

    @classmethod
    def of(
        cls, scalars: _Scalars, row: jax.Array, index: Any, shape: _Shape, options: _Options
    ) -> "_QueryBlock":
        """The block number `index` of a row."""
        num_queries, num_keys = shape.blocks.queries, shape.blocks.keys
        done = index * num_queries
        num_tokens = jnp.minimum(scalars.q_len(row) - done, num_queries)
        position = scalars.kv_starts[row] + done
        last = position + num_tokens - 1
        stop = _div(last, num_keys) + 1
        first = clear = jnp.int32(0)
        if options.sliding_window is not None:
            first = _div(jnp.maximum(position - options.sliding_window + 1, 0), num_keys)
            edge = jnp.maximum(last - options.sliding_window + 1, 0)
            clear = jnp.minimum(_div(edge + num_keys - 1, num_keys), stop)
        num_clear = jnp.maximum(_div(position + 1, num_keys) - clear, 0)
        token = scalars.q_offsets[row] + done
        return cls(row, token, position, num_tokens, first, stop, clear, num_clear)

    @property
    def num_key_blocks(self) -> jax.Array:
        return self.stop - self.first

    def key_block(self, turn: Any) -> jax.Array:
        """Which block of keys is met at a turn: first the clear ones, then those to be masked."""
        masked = self.first + turn - self.num_clear
        skipped = jnp.where(masked >= self.clear, self.num_clear, 0)
        return jnp.where(turn < self.num_clear, self.clear + turn, masked + skipped)


class _Kernel(NamedTuple):
    """Everything that a part of the kernel may need."""

    scalars: _Scalars
    buffers: _Buffers
    state: _Softmax
    sinks: Any | None  # float32 [kv_heads, group, 1, 128]
    shape: _Shape
    options: _Options

    def query_block(self, row: Any, index: Any) -> _QueryBlock:
        return _QueryBlock.of(self.scalars, row, index, self.shape, self.options)


def _div(a: Any, b: int) -> jax.Array:
    """a // b of a >= 0, which costs less than the division that knows signs."""
    return lax.div(jnp.int32(a), jnp.int32(b))


def _across(x: jax.Array, width: int) -> jax.Array:
    """x [rows, 128], the same in all lanes, as [rows, width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * (width // LANES), axis=1)


def _find_next_rows(scalars: _Scalars, buffers: _Buffers, num_slots: int) -> jax.Array:
    """Fill `next_rows`, and return the first prefill row that has queries, or `num_slots`."""
    num_decode, num_rows = scalars.sizes[1], scalars.sizes[2]

    def step(i: jax.Array, following: jax.Array) -> jax.Array:
        row = num_rows - 1 - i
        buffers.next_rows[row] = following
        return jnp.where(scalars.q_len(row) > 0, row, following)

    return lax.fori_loop(0, num_rows - num_decode, step, jnp.int32(num_slots))


def _table_copy(buffers: _Buffers, row: Any, slot: Any) -> Any:
    return pltpu.make_async_copy(
        buffers.table_hbm.at[row], buffers.table.at[slot], buffers.table_sem
    )


def _num_pages(kernel: _Kernel, row: Any, block: Any) -> jax.Array:
    """How many pages a row has in a block of keys, 1 .. block_pages."""
    pages = _div(kernel.scalars.kv_len(row) + kernel.shape.page_size - 1, kernel.shape.page_size)
    return jnp.minimum(pages - block * kernel.shape.block_pages, kernel.shape.block_pages)


def _start_keys(kernel: _Kernel, row: Any, block: Any, table_slot: Any, slot: Any) -> None:
    """Start the DMAs of a block of keys and values: one for each page."""
    buffers, block_pages = kernel.buffers, kernel.shape.block_pages

    @pl.loop(0, _num_pages(kernel, row, block))
    def _(i: jax.Array) -> None:
        page = buffers.table[table_slot, 0, block * block_pages + i]
        pltpu.make_async_copy(
            buffers.kv_hbm.at[kernel.scalars.layer, page],
            buffers.kv.at[slot, i],
            buffers.kv_sem.at[slot],
        ).start()


def _wait_keys(kernel: _Kernel, row: Any, block: Any, slot: Any) -> None:
    """Wait for all pages of a block: a wait counts bytes, whoever brought them."""
    here, sem = kernel.buffers.kv.at[slot], kernel.buffers.kv_sem.at[slot]
    num_pages = _num_pages(kernel, row, block)
    is_whole = num_pages == kernel.shape.block_pages
    pl.when(is_whole)(lambda: pltpu.make_async_copy(here, here, sem).wait())

    @pl.loop(0, jnp.where(is_whole, 0, num_pages))
    def _(i: jax.Array) -> None:
        page = here.at[i]
        pltpu.make_async_copy(page, page, sem).wait()


def _clear_unseen_values(kernel: _Kernel, block: _QueryBlock, keys: Any, slot: Any) -> None:
    """Zero V in the slots of a block of keys that hold no token, or none that the window reaches.

    Their weight is zero, but zero times what lies there, from another row or from nobody, may be
    NaN. K needs no such care: a masked score is replaced, whatever it was.
    """
    shape, buffers = kernel.shape, kernel.buffers
    begin, end = keys * shape.blocks.keys, kernel.scalars.kv_len(block.row)
    window = kernel.options.sliding_window
    first_seen = jnp.int32(0) if window is None else block.position - window + 1

    @pl.when((begin + shape.blocks.keys > end) | (begin < first_seen))
    def _() -> None:
        @pl.loop(0, shape.block_pages)
        def _(page: jax.Array) -> None:
            here = begin + page * shape.page_size

            @pl.when((here + shape.page_size > end) | (here < first_seen))
            def _() -> None:
                tile = (shape.page_size, shape.head_dim)
                position = here + lax.broadcasted_iota(jnp.int32, tile, 0)
                kept = (position < end) & (position >= first_seen)
                for head in map(shape.values_of, range(shape.kv_heads)):
                    values = buffers.kv[slot, page, head]
                    buffers.kv[slot, page, head] = jnp.where(kept, values, jnp.zeros_like(values))


def _for_each_run(kernel: _Kernel, block: _QueryBlock, do: Any) -> None:
    """do(first, size) for runs of the block's tokens, of few static sizes.

    A DMA has a static size, and one that is longer than the row would reach into the next.
    """
    done = jnp.int32(0)
    for size in (kernel.shape.blocks.queries, RUN_TOKENS, 1):
        if size > kernel.buffers.tokens_hbm.shape[0]:
            continue
        count = _div(block.num_tokens - done, size)
        begin = done

        @pl.loop(0, count)
        def _(i: jax.Array, begin: jax.Array = begin, size: int = size) -> None:
            do(begin + i * size, size)

        done += count * size


def _q_copies(kernel: _Kernel, block: _QueryBlock, do: Any) -> None:
    """do(copy) for the DMAs that bring a block's queries."""
    buffers = kernel.buffers
    _for_each_run(
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


def _out_copies(kernel: _Kernel, block: _QueryBlock, do: Any) -> None:
    """do(copy) for the DMAs that take a block's result away."""
    buffers = kernel.buffers
    _for_each_run(
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


def _for_each_turn(kernel: _Kernel, block: _QueryBlock, do: Any) -> None:
    """do(tokens) for slices of the buffers' tokens that hold all of the block's."""
    turned = kernel.shape.turned

    @pl.loop(0, _div(block.num_tokens + turned - 1, turned))
    def _(i: jax.Array) -> None:
        do(pl.ds(pl.multiple_of(i * turned, turned), turned))


def _begin_queries(kernel: _Kernel, block: _QueryBlock) -> None:
    """Order the queries by head."""
    shape, buffers, state = kernel.shape, kernel.buffers, kernel.state
    tile = (shape.kv_heads, shape.group, shape.turned, shape.head_dim)

    def turn(at: Any) -> None:
        by_head = jnp.swapaxes(buffers.q_arriving[at].astype(state.q.dtype), 0, 1)
        state.q[:, :, at] = by_head.reshape(tile)

    _for_each_turn(kernel, block, turn)


def _end_queries(kernel: _Kernel, block: _QueryBlock) -> None:
    """Put the results, ordered by token, into `out_leaving`."""
    shape, buffers, state = kernel.shape, kernel.buffers, kernel.state

    def turn(at: Any) -> None:
        share = 1 / jnp.sum(state.total[:, :, at], axis=3, keepdims=True)
        by_head = (state.weighted[:, :, at] * share).reshape(-1, shape.turned, shape.head_dim)
        buffers.out_leaving[at] = jnp.swapaxes(by_head, 0, 1).astype(buffers.out_leaving.dtype)

    _for_each_turn(kernel, block, turn)


class _Work(NamedTuple):
    """Some queries of a block, and some keys of a block, to attend to."""

    block: _QueryBlock
    slot: Any  # of the keys
    is_first: Any  # whether these are the first keys that the queries meet
    first: Any  # token of the block
    num_tokens: int
    first_page: Any  # of the slot
    num_keys: int
    position: Any  # of the first key, or None if all queries see all keys


def _seen(kernel: _Kernel, work: _Work) -> jax.Array:
    """bool [1, tokens, keys]: which keys each query sees."""
    tile = (1, work.num_tokens, work.num_keys)
    query = lax.broadcasted_iota(jnp.int32, tile, 1) + (work.block.position + work.first)
    key = lax.broadcasted_iota(jnp.int32, tile, 2) + work.position
    seen = key <= query
    if kernel.options.sliding_window is not None:
        seen &= key > query - kernel.options.sliding_window
    return seen


def _found_before(
    kernel: _Kernel, work: _Work, head: Any, at: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Top, total and weighted [group * tokens, ...] of a KV head's queries before these keys.

    Before the first keys the state holds another block's results. What counts then is nothing,
    or a sink, which is one more key, always visible, whose value is zero. To choose here costs
    less than to write it to the state beforehand: arithmetic waits for the matrix unit anyway.
    """
    state, rows = kernel.state, kernel.shape.group * work.num_tokens
    if kernel.sinks is None:
        top, total = jnp.float32(MASKED), jnp.float32(0)
    else:
        top, total = kernel.sinks[head], jnp.float32(1 / LANES)
    return (
        jnp.where(work.is_first, top, state.top[head, :, at]).reshape(rows, LANES),
        jnp.where(work.is_first, total, state.total[head, :, at]).reshape(rows, LANES),
        jnp.where(work.is_first, 0.0, state.weighted[head, :, at]).reshape(rows, -1),
    )


def _attend_head(kernel: _Kernel, work: _Work, head: Any, seen: jax.Array | None) -> None:
    """Merge the attention of one KV head's queries over a block of keys into the state."""
    shape, options, state = kernel.shape, kernel.options, kernel.state
    num_keys, head_dim, kv = work.num_keys, shape.head_dim, kernel.buffers.kv
    by_token, rows = (shape.group, work.num_tokens), shape.group * work.num_tokens
    at = pl.ds(work.first, work.num_tokens)
    precision = lax.Precision.HIGHEST if kv.dtype == jnp.float32 else None
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    pages = pl.ds(work.first_page, num_keys // shape.page_size)
    k = kv[work.slot, pages, head].reshape(num_keys, head_dim)
    v = kv[work.slot, pages, shape.values_of(head)].reshape(num_keys, head_dim)
    scores = dot(state.q[head, :, at].reshape(rows, head_dim), k, (((1,), (1,)), ((), ())))
    if options.soft_cap is None:
        scores = scores * (options.scale * LOG2_E)
    else:
        scores = jnp.tanh(scores * (options.scale / options.soft_cap))
        scores = scores * (options.soft_cap * LOG2_E)
    if seen is not None:
        scores = scores.reshape(*by_token, num_keys)
        scores = jnp.where(seen, scores, MASKED).reshape(rows, num_keys)
    old_top, old_total, old_weighted = _found_before(kernel, work, head, at)
    top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - _across(top, num_keys))
    kept = jnp.exp2(old_top - top)
    parts = [weights[:, i : i + LANES] for i in range(0, num_keys, LANES)]
    total = old_total * kept + reduce(jnp.add, parts)
    found = dot(weights.astype(v.dtype), v, (((1,), (0,)), ((), ())))
    weighted = old_weighted * _across(kept, head_dim) + found
    state.top[head, :, at] = top.reshape(*by_token, LANES)
    state.total[head, :, at] = total.reshape(*by_token, LANES)
    state.weighted[head, :, at] = weighted.reshape(*by_token, head_dim)


def _attend_heads(kernel: _Kernel, work: _Work) -> None:
    """`_attend_head` of all heads."""
    is_masked = work.position is not None
    seen = _seen(kernel, work) if is_masked else None
    heads = kernel.shape.part_heads if is_masked else kernel.shape.blocks.heads

    @pl.loop(0, kernel.shape.kv_heads // heads)
    def _(turn: jax.Array) -> None:
        for i in range(heads):
            _attend_head(kernel, work, turn * heads + i, seen)


def _attend(kernel: _Kernel, work: _Work) -> None:
    """Merge the attention of all queries of the work's block into the state."""
    queries, few = kernel.shape.blocks.queries, kernel.shape.blocks.few_queries
    if few == queries:
        _attend_heads(kernel, work)
        return
    num_tokens = work.block.num_tokens
    is_short = num_tokens <= queries // 2
    pl.when(jnp.logical_not(is_short))(lambda: _attend_heads(kernel, work))

    @pl.loop(0, jnp.where(is_short, _div(num_tokens + few - 1, few), 0))
    def _(i: jax.Array) -> None:
        first = pl.multiple_of(i * few, few)
        _attend_heads(kernel, work._replace(first=first, num_tokens=few))


def _attend_masked(kernel: _Kernel, work: _Work, keys: Any) -> None:
    """`_attend` to those parts of a block of keys that any of the queries sees."""
    shape, block, window = kernel.shape, work.block, kernel.options.sliding_window
    part = shape.blocks.part_keys
    begin = keys * shape.blocks.keys
    seen = jnp.minimum(block.position + block.num_tokens - begin, shape.blocks.keys)
    first_part = jnp.int32(0)
    if window is not None:
        first_part = _div(jnp.maximum(block.position - window + 1 - begin, 0), part)

    @pl.loop(first_part, _div(seen + part - 1, part))
    def _(i: jax.Array) -> None:
        position = begin + i * part
        _attend(
            kernel,
            work._replace(
                is_first=work.is_first & (i == first_part),
                first_page=i * (part // shape.page_size),
                num_keys=part,
                position=position,
            ),
        )


def _attend_queries(
    kernel: _Kernel, block: _QueryBlock, following: _QueryBlock, slots: tuple[Any, Any, Any]
) -> jax.Array:
    """Attention of a block of queries over all its keys, which `state` holds afterwards.

    `following` is the next block, whose first keys are started; its row is B if there is none.
    `slots`: of the first keys, of this row's page ids, of the following block's page ids.

    Returns:
        the slot of the following block's first keys.
    """
    first_slot, table_slot, following_table_slot = slots
    num_slots = kernel.buffers.next_rows.shape[0] - 1

    def meet(turn: jax.Array, slot: jax.Array) -> jax.Array:
        """Have a block of keys here, and the next one in flight; return which this is."""
        is_last = turn + 1 == block.num_key_blocks
        row = jnp.where(is_last, following.row, block.row)

        @pl.when(row < num_slots)
        def _() -> None:
            keys = jnp.where(is_last, following.key_block(0), block.key_block(turn + 1))
            table = jnp.where(is_last, following_table_slot, table_slot)
            _start_keys(kernel, row, keys, table, 1 - slot)

        keys = block.key_block(turn)
        _wait_keys(kernel, block.row, keys, slot)
        return keys

    def work(turn: jax.Array, slot: jax.Array) -> _Work:
        blocks = kernel.shape.blocks
        return _Work(block, slot, turn == 0, 0, blocks.queries, 0, blocks.keys, None)

    def clear(turn: jax.Array, slot: jax.Array) -> jax.Array:
        meet(turn, slot)
        _attend(kernel, work(turn, slot))
        return 1 - slot

    def masked(turn: jax.Array, slot: jax.Array) -> jax.Array:
        keys = meet(turn, slot)
        _clear_unseen_values(kernel, block, keys, slot)
        _attend_masked(kernel, work(turn, slot), keys)
        return 1 - slot

    slot = lax.fori_loop(0, block.num_clear, clear, first_slot)
    return lax.fori_loop(block.num_clear, block.num_key_blocks, masked, slot)


class _Carry(NamedTuple):
    """What a block of queries leaves to the next."""

    slot: jax.Array  # where its first keys are
    table_slot: jax.Array  # where its row's page ids are
    leaving: _QueryBlock  # the block whose result is leaving; no tokens if there is none


def _do_query_block(kernel: _Kernel, row: Any, index: Any, num_blocks: Any, carry: _Carry) -> Any:
    """A block of queries from start to end; returns the carry of the next one."""
    buffers, num_slots = kernel.buffers, kernel.buffers.next_rows.shape[0] - 1
    is_last = index + 1 == num_blocks
    next_row = buffers.next_rows[row]
    has_next_row = next_row < num_slots

    @pl.when((index == 0) & has_next_row)
    def _() -> None:
        _table_copy(buffers, next_row, 1 - carry.table_slot).start()

    @pl.when(is_last & has_next_row)
    def _() -> None:
        _table_copy(buffers, next_row, 1 - carry.table_slot).wait()

    block = kernel.query_block(row, index)
    _q_copies(kernel, block, lambda copy: copy.wait())
    _begin_queries(kernel, block)
    following_row = jnp.where(is_last, next_row, row)
    # Of a row that is not there only the row's number is used.
    following = kernel.query_block(
        jnp.minimum(following_row, num_slots - 1), jnp.where(is_last, 0, index + 1)
    )._replace(row=following_row)
    pl.when(following_row < num_slots)(
        lambda: _q_copies(kernel, following, lambda copy: copy.start())
    )
    table_slot = jnp.where(is_last, 1 - carry.table_slot, carry.table_slot)
    slots = (carry.slot, carry.table_slot, table_slot)
    slot = _attend_queries(kernel, block, following, slots)
    _out_copies(kernel, carry.leaving, lambda copy: copy.wait())
    _end_queries(kernel, block)
    _out_copies(kernel, block, lambda copy: copy.start())
    return _Carry(slot, table_slot, block)


def _kernel(
    sizes: Any,
    kv_starts: Any,
    q_offsets: Any,
    *refs: Any,
    shape: _Shape,
    options: _Options,
    has_sinks: bool,
) -> None:
    sinks, refs = (refs[0], refs[1:]) if has_sinks else (None, refs)
    # The queries and the result are one array.
    kv_hbm, table_hbm, _q_hbm, tokens_hbm = refs[:4]
    buffers = _Buffers(kv_hbm, table_hbm, tokens_hbm, *refs[4:13])
    kernel = _Kernel(
        _Scalars(sizes, kv_starts, q_offsets), buffers, _Softmax(*refs[13:]), sinks, shape, options
    )
    scalars, num_slots = kernel.scalars, kv_starts.shape[0]
    first_row = _find_next_rows(scalars, buffers, num_slots)

    @pl.when(first_row < num_slots)
    def _() -> None:
        zero = jnp.int32(0)
        table = _table_copy(buffers, first_row, 0)
        table.start()
        block = kernel.query_block(first_row, 0)
        _q_copies(kernel, block, lambda copy: copy.start())
        table.wait()
        _start_keys(kernel, first_row, block.key_block(0), 0, 0)

        def do_row(row: jax.Array, carry: _Carry) -> _Carry:
            num_blocks = _div(scalars.q_len(row) + shape.blocks.queries - 1, shape.blocks.queries)
            return lax.fori_loop(
                0, num_blocks, lambda i, c: _do_query_block(kernel, row, i, num_blocks, c), carry
            )

        nothing = _QueryBlock(*[zero] * len(_QueryBlock._fields))
        carry = lax.fori_loop(
            scalars.sizes[1], scalars.sizes[2], do_row, _Carry(zero, zero, nothing)
        )
        _out_copies(kernel, carry.leaving, lambda copy: copy.wait())


def prefill_attention(
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
    blocks: PrefillBlocks | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of the tokens of rows num_decode .. num_rows, whose K and V are in the cache.

    Arguments as in `interface.RaggedPagedAttention`; `blocks` is how much is computed on at once,
    by default as tuned for the chip. `packed`: K and V of a head lie side by side in the cache,
    and `q` has zeros where V is; in the result, that is where the attention is.

    Returns:
        [T, q_heads, head_dim] in q's dtype, in q's memory if the caller has no further use for it;
        other tokens' entries are those of q.

    Raises:
        ValueError: a block of keys is no whole number of pages.
    """
    num_tokens, q_heads, head_dim = q.shape
    kv_heads, page_size = kv_cache.shape[2] // (1 if packed else 2), kv_cache.shape[3]
    group = q_heads // kv_heads
    blocks = blocks or prefill_blocks(
        kv_heads, group, head_dim, page_size, kv_cache.dtype, num_tokens
    )
    if blocks.part_keys % page_size:
        raise ValueError(f"page_size must divide {blocks.part_keys}, got {page_size}")
    shape = _Shape(kv_heads, group, page_size, head_dim, packed, blocks)
    num_rows, table_width = batch.page_table.shape
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    inputs: list[jax.Array] = []
    if sinks is not None:
        inputs.append(_spread_sinks(sinks, shape))
    num_scalars = 3
    by_head = (kv_heads, group, blocks.queries, head_dim)
    stats = (kv_heads, group, blocks.queries, LANES)
    by_token = (blocks.queries, q_heads, head_dim)
    kernel = pl.pallas_call(
        partial(
            _kernel,
            shape=shape,
            options=_Options(scale, sliding_window, soft_cap),
            has_sinks=sinks is not None,
        ),
        name="paged_prefill",
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            in_specs=[*(pl.BlockSpec(memory_space=pltpu.VMEM) for _ in inputs), *[in_memory] * 3],
            out_specs=in_memory,
            scratch_shapes=[
                pltpu.SMEM((num_rows + 1,), jnp.int32),
                pltpu.SMEM((2, 1, table_width), jnp.int32),
                pltpu.VMEM((2, shape.block_pages, *kv_cache.shape[2:]), kv_cache.dtype),
                pltpu.VMEM(by_token, q.dtype),
                pltpu.VMEM(by_token, q.dtype),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA,
                pltpu.VMEM(by_head, kv_cache.dtype),
                pltpu.VMEM(stats, jnp.float32),
                pltpu.VMEM(stats, jnp.float32),
                pltpu.VMEM(by_head, jnp.float32),
            ],
        ),
        input_output_aliases={num_scalars + len(inputs) + 2: 0},
        # Page ids are the memory manager's: a check of each DMA's bounds would cost more than it.
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_LIMIT_BYTES, disable_bounds_checks=True
        ),
        interpret=interpret,
    )
    return kernel(
        jnp.stack([layer, batch.num_decode, batch.num_rows]).astype(jnp.int32),
        batch.kv_starts,
        batch.q_offsets,
        *inputs,
        kv_cache,
        batch.page_table[:, None],
        q,
    )


def _spread_sinks(sinks: jax.Array, shape: _Shape) -> jax.Array:
    """sinks [q_heads] -> float32 [kv_heads, group, 1, 128] in powers of two."""
    by_head = sinks.astype(jnp.float32).reshape(shape.kv_heads, shape.group, 1, 1) * LOG2_E
    return jnp.broadcast_to(by_head, (shape.kv_heads, shape.group, 1, LANES))

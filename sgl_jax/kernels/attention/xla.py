"""Ragged paged attention in plain XLA: for CPUs, and for any platform without a kernel.

The cost depends on the tokens in use, not on the context limit or the padding: every loop has a
dynamic trip count. Softmax is online (arXiv 2205.14135): keys are read a block at a time, and the
partial results of blocks are merged.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.attention.batch import MASKED, NULL_PAGE, AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.cache_dtype import as_float32, is_packed, new_slots

# Decode reads DECODE_BLOCKS blocks of keys at once, of any rows: one block for each operation would
# be too small for its launch cost, and twice as many keys would mostly be padding of short rows.
DECODE_BLOCKS = 4
DECODE_KEYS = 64
PREFILL_KEYS = 128
# A chunk's queries are processed in blocks of 128. The last few of a chunk, or all of a short chunk
# such as a turn of a conversation, are processed in blocks of 4: a large block would be mostly
# padding and read the whole history. A block of 128 takes about as long as ten of 4.
PREFILL_QUERIES = 128
SHORT_QUERIES = 4
LEFT_TO_SHORT = 32  # a rest of up to this many queries of a row gets no large block
# Queries of all rows, if results must not depend on the batch (`kernels.row_blocks`).
INVARIANT_QUERIES = 8


class CachedLayer(Protocol):
    """One layer of a cache, read by blocks of pages."""

    @property
    def kv_heads(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def value_dim(self) -> int:
        """Return the size of one head's value."""
        ...

    def keys_and_values(self, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Read pages int32 [..., n]: K and V float32 [..., kv_heads, n * page_size, numbers]."""
        ...


class _Heads(NamedTuple):
    """A layer with one key and one value of equal size for each KV head."""

    kv_cache: jax.Array  # see `api.RaggedPagedAttention`
    layer: jax.Array  # int32 []
    head_dim: int

    @property
    def is_packed(self) -> bool:
        return is_packed(self.kv_cache, self.head_dim)

    @property
    def kv_heads(self) -> int:
        return self.kv_cache.shape[2] // (1 if self.is_packed else 2)

    @property
    def page_size(self) -> int:
        return self.kv_cache.shape[3]

    @property
    def value_dim(self) -> int:
        return self.head_dim

    def keys_and_values(self, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._read(pages, 0), self._read(pages, 1)

    def _read(self, pages: jax.Array, part: int) -> jax.Array:
        """Return K for part 0, or V for part 1."""
        size = self.head_dim if self.is_packed else self.kv_heads
        where = slice(part * size, (part + 1) * size)
        if self.is_packed:
            slots = self.kv_cache.at[self.layer, pages, :, :, where]
        else:
            slots = self.kv_cache.at[self.layer, pages, where]
        blocks = slots.get(mode="promise_in_bounds")
        tokens = as_float32(jnp.moveaxis(blocks, -4, -3))
        return tokens.reshape(*pages.shape[:-1], self.kv_heads, -1, blocks.shape[-1])


class _Partial(NamedTuple):
    """Undivided attention over some of the keys: the state of an online softmax."""

    m: jax.Array  # [..., kv_heads, queries] greatest score
    l: jax.Array  # [..., kv_heads, queries] sum of exp(score - m)
    acc: jax.Array  # [..., kv_heads, queries, value_dim] values, weighted by exp(score - m)


# `attend_cached`, or a function with the same arguments and results.
AttendCached = Callable[[jax.Array, CachedLayer, AttentionBatch, ScoreOptions], jax.Array]


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    options: ScoreOptions,
    *,
    attend: AttendCached | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Implement `api.RaggedPagedAttention`; `attend` is `attend_cached` by default."""
    if k is not None and v is not None:
        kv_cache = write_slots(new_slots(k, v, kv_cache), kv_cache, layer, batch)
    attend = attend or attend_cached
    return attend(q, _Heads(kv_cache, layer, q.shape[2]), batch, options), kv_cache


def attend_invariantly(
    q: jax.Array, cached: CachedLayer, batch: AttentionBatch, options: ScoreOptions
) -> jax.Array:
    """Implement `attend_cached` so that the bits of a query's result depend only on the tokens
    before it: blocks have one size for decode and prefill rows, and begin at multiples of it, so
    that a position always has the same place in its block."""
    size = INVARIANT_QUERIES
    padded = jnp.pad(q, ((size, size), (0, 0), (0, 0)))
    table = _BlockTable.of(batch.page_table, cached.page_size, PREFILL_KEYS)
    blocks = _QueryBlocks(size, table, cached, batch, options)

    def row_blocks(row: jax.Array, out: jax.Array) -> jax.Array:
        in_block, q_len = batch.kv_starts[row] % size, batch.q_lens[row]

        def block(i: jax.Array, out: jax.Array) -> jax.Array:
            first = i * size - in_block
            start = size + batch.q_offsets[row] + first
            found = blocks.results(lax.dynamic_slice_in_dim(padded, start, size), row, first)
            ahead = first + jnp.arange(size, dtype=jnp.int32)
            is_own = ((ahead >= 0) & (ahead < q_len))[:, None, None]
            other = lax.dynamic_slice_in_dim(out, start, size)
            found = jnp.where(is_own, found.astype(out.dtype), other)
            return lax.dynamic_update_slice_in_dim(out, found, start, axis=0)

        return lax.fori_loop(0, -(-(in_block + q_len) // size), block, out)

    out = jnp.zeros((*padded.shape[:2], cached.value_dim), q.dtype)
    return lax.fori_loop(0, batch.num_rows, row_blocks, out)[size : size + q.shape[0]]


def attend_cached(
    q: jax.Array, cached: CachedLayer, batch: AttentionBatch, options: ScoreOptions
) -> jax.Array:
    """Attend with q [T, q_heads, D] to a layer of a cache that has this step's tokens.

    Returns [T, q_heads, value_dim] in the dtype of q.
    """
    # Blocks of queries overrun the end of their row. This is harmless: rows are processed in
    # ascending order, and later rows overwrite the results past a row's end.
    padded = jnp.pad(q, ((0, PREFILL_QUERIES), (0, 0), (0, 0)))
    out = lax.dynamic_update_slice_in_dim(
        jnp.zeros((*padded.shape[:2], cached.value_dim), q.dtype),
        _decode(padded, cached, batch, options),
        0,
        axis=0,
    )
    out = _prefill(padded, out, cached, batch, options)
    return out[: q.shape[0]]


def write_slots(
    slots: jax.Array, kv_cache: jax.Array, layer: jax.Array, batch: AttentionBatch
) -> jax.Array:
    """Scatter slots [T, heads, numbers] in the cache's layout; padding goes to the null page."""
    page_size = kv_cache.shape[3]
    pages = batch.page_table[batch.token_rows, batch.positions // page_size]
    pages = jnp.where(batch.valid, pages, NULL_PAGE)
    places = kv_cache.at[layer, pages, :, batch.positions % page_size]
    return places.set(slots, mode="promise_in_bounds")


def _decode(
    q: jax.Array, cached: CachedLayer, batch: AttentionBatch, options: ScoreOptions
) -> jax.Array:
    """Attend with the decode rows' tokens, the first: [max_decode_tokens, q_heads, value_dim].

    A row's token and its drafts read each block of keys together. The blocks of all rows form one
    list, row after row. Each iteration takes the next DECODE_BLOCKS blocks and merges their results
    into their rows, which are adjacent. Results after the decode rows are finite and arbitrary.
    """
    num_tokens, width = batch.max_decode_tokens, 1 + batch.max_draft_tokens
    num_rows = min(batch.q_lens.shape[0], num_tokens)
    table = _BlockTable.of(batch.page_table, cached.page_size, DECODE_KEYS)
    block_keys = table.pages_per_block * cached.page_size
    is_decode = jnp.arange(num_rows, dtype=jnp.int32) < batch.num_decode
    kv_starts = batch.kv_starts[:num_rows]
    kv_lens = jnp.where(is_decode, kv_starts + batch.q_lens[:num_rows], 0)
    first_blocks = jnp.where(is_decode, _first_visible(kv_starts, options) // block_keys, 0)
    ends = jnp.cumsum(-(-kv_lens // block_keys) - first_blocks, dtype=jnp.int32)
    # Block number n of the list, of row r, is the row's block n - base[r].
    base = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]]) - first_blocks
    # A row with fewer drafts repeats its last query, and reads no query of another row.
    ahead = jnp.arange(width, dtype=jnp.int32)
    last = jnp.maximum(batch.q_lens[:num_rows, None] - 1, 0)
    places = batch.q_offsets[:num_rows, None] + jnp.minimum(ahead, last)
    queries = _scaled_queries(q[places], cached.kv_heads, options)
    window = jnp.arange(DECODE_BLOCKS, dtype=jnp.int32)

    def turn(index: jax.Array, state: _Partial) -> _Partial:
        numbers = index * DECODE_BLOCKS + window
        row = jnp.sum(numbers[:, None] >= ends, axis=1, dtype=jnp.int32)
        row = jnp.minimum(row, num_rows - 1)
        block = numbers - base[row]
        keys = _Keys.of(block, block_keys, kv_starts[row], kv_lens[row], width, options)
        pages = table.pages(row, block)
        found = _attend(queries[row], cached, pages, keys, options)
        # owner[i, j]: block i belongs to the j-th row that this iteration may change.
        owner = (row[:, None] == row[0] + window) & (numbers < ends[-1])[:, None]
        touched = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row[0], DECODE_BLOCKS), state)
        merged = _merge_into_rows(touched, found, owner)
        return jax.tree.map(
            lambda x, new: lax.dynamic_update_slice_in_dim(x, new, row[0], axis=0), state, merged
        )

    nothing = _nothing((num_rows + DECODE_BLOCKS, *queries.shape[1:-1]), cached, width, options)
    state = lax.fori_loop(0, -(-ends[-1] // DECODE_BLOCKS), turn, nothing)
    by_row = _results(state, width)
    row = jnp.minimum(batch.token_rows[:num_tokens], num_rows - 1)
    in_row = jnp.arange(num_tokens, dtype=jnp.int32) - batch.q_offsets[row]
    return by_row[row, jnp.minimum(in_row, width - 1)].astype(q.dtype)


def _prefill(
    q: jax.Array, out: jax.Array, cached: CachedLayer, batch: AttentionBatch, options: ScoreOptions
) -> jax.Array:
    """Write the attention of the rows from `num_decode` on to out; q, out [T + padding, ...]."""
    table = _BlockTable.of(batch.page_table, cached.page_size, PREFILL_KEYS)
    long = _QueryBlocks(PREFILL_QUERIES, table, cached, batch, options)
    short = _QueryBlocks(SHORT_QUERIES, table, cached, batch, options)

    def row_blocks(row: jax.Array, out: jax.Array) -> jax.Array:
        q_len = batch.q_lens[row]
        num_long = -(-jnp.maximum(q_len - LEFT_TO_SHORT, 0) // PREFILL_QUERIES)
        rest = num_long * PREFILL_QUERIES
        num_short = -(-jnp.maximum(q_len - rest, 0) // SHORT_QUERIES)

        def long_block(i: jax.Array, out: jax.Array) -> jax.Array:
            return long.attend(q, out, row, i * PREFILL_QUERIES)

        def short_block(i: jax.Array, out: jax.Array) -> jax.Array:
            return short.attend(q, out, row, rest + i * SHORT_QUERIES)

        out = lax.fori_loop(0, num_long, long_block, out)
        return lax.fori_loop(0, num_short, short_block, out)

    return lax.fori_loop(batch.num_decode, batch.num_rows, row_blocks, out)


class _QueryBlocks(NamedTuple):
    """Attention of `num_queries` adjacent queries of a row at once."""

    num_queries: int
    table: "_BlockTable"
    cached: CachedLayer
    batch: AttentionBatch
    options: ScoreOptions

    def attend(self, q: jax.Array, out: jax.Array, row: jax.Array, first: jax.Array) -> jax.Array:
        """Write the attention of the row's queries `first`, `first` + 1, ... into out."""
        start = self.batch.q_offsets[row] + first
        block = lax.dynamic_slice_in_dim(q, start, self.num_queries)
        result = self.results(block, row, first).astype(q.dtype)
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    def results(self, block: jax.Array, row: jax.Array, first: jax.Array) -> jax.Array:
        """Return the attention of `block`, the row's queries from `first` on, in float32."""
        batch = self.batch
        block_keys = self.table.pages_per_block * self.cached.page_size
        queries = _scaled_queries(block, self.cached.kv_heads, self.options)
        q_start, kv_len = batch.kv_starts[row] + first, batch.kv_starts[row] + batch.q_lens[row]

        def key_block(index: jax.Array, state: _Partial) -> _Partial:
            keys = _Keys.of(index, block_keys, q_start, kv_len, self.num_queries, self.options)
            pages = self.table.pages(row, index)
            return _merge(state, _attend(queries, self.cached, pages, keys, self.options))

        first_block = _first_visible(q_start, self.options) // block_keys
        stop_block = -(-jnp.minimum(q_start + self.num_queries, kv_len) // block_keys)
        nothing = _nothing(queries.shape[:-1], self.cached, self.num_queries, self.options)
        state = lax.fori_loop(first_block, stop_block, key_block, nothing)
        return _results(state, self.num_queries)


class _Keys(NamedTuple):
    """The keys of one or several blocks that adjacent queries of one row see."""

    seen: jax.Array  # bool [..., queries, keys] keys that each query sees
    # bool [..., keys] slots with a token that some query sees. Other slots may hold anything,
    # including NaN, and the table has no page for keys that have left the window.
    used: jax.Array

    @classmethod
    def of(
        cls,
        block: jax.Array,
        block_keys: int,
        q_start: jax.Array,
        kv_len: jax.Array,
        num_queries: int,
        options: ScoreOptions,
    ) -> "_Keys":
        """Return the keys of block `block` that a row's queries from position `q_start` on see.

        The row has `kv_len` keys. All three are int32 [...].
        """
        keys = block[..., None] * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
        ahead = jnp.arange(num_queries, dtype=jnp.int32)
        # Queries past the row's end see the keys of its last query, never an unused slot.
        queries = jnp.minimum(q_start[..., None] + ahead, kv_len[..., None] - 1)
        firsts = _first_visible(queries, options)
        seen = (keys[..., None, :] <= queries[..., None]) & (
            keys[..., None, :] >= firsts[..., None]
        )
        return cls(seen, (keys < kv_len[..., None]) & (keys >= firsts[..., :1]))


class _BlockTable(NamedTuple):
    """Page ids of each row, cut into blocks: int32 [rows, blocks, pages_per_block]."""

    ids: jax.Array

    @classmethod
    def of(cls, page_table: jax.Array, page_size: int, num_keys: int) -> "_BlockTable":
        """Split the page table into blocks of `num_keys` keys, or of one larger page."""
        block_pages = max(1, num_keys // page_size)
        padding = -page_table.shape[1] % block_pages
        ids = jnp.pad(page_table, ((0, 0), (0, padding)), constant_values=NULL_PAGE)
        return cls(ids.reshape(page_table.shape[0], -1, block_pages))

    @property
    def pages_per_block(self) -> int:
        return self.ids.shape[2]

    def pages(self, row: jax.Array, block: jax.Array) -> jax.Array:
        """Return page ids int32 [..., pages_per_block] for row and block, both int32 [...]."""
        return self.ids.at[row, block].get(mode="clip")


def _scaled_queries(q: jax.Array, kv_heads: int, options: ScoreOptions) -> jax.Array:
    """Return q [..., n, q_heads, D] as float32 [..., kv_heads, group * n, D], times the scale."""
    *outer, num_queries, _, head_dim = q.shape
    grouped = q.reshape(*outer, num_queries, kv_heads, -1, head_dim)
    by_head = jnp.moveaxis(grouped, -4, -2).reshape(*outer, kv_heads, -1, head_dim)
    return by_head.astype(jnp.float32) * options.scale


def _results(state: _Partial, num_queries: int) -> jax.Array:
    """Return attention over all keys, [..., n, q_heads, value_dim]; zeros without a key."""
    out = state.acc / jnp.maximum(state.l, jnp.finfo(jnp.float32).tiny)[..., None]
    *outer, _, _, value_dim = out.shape
    return jnp.moveaxis(out.reshape(*outer, -1, num_queries, value_dim), -3, -2)


def _first_visible(position: jax.Array, options: ScoreOptions) -> jax.Array:
    if options.sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(options.first_seen(position), 0)


def _nothing(
    shape: tuple[int, ...], cached: CachedLayer, num_queries: int, options: ScoreOptions
) -> _Partial:
    """Return the attention before any key, for queries [..., kv_heads, group * num_queries].

    A sink is one more key, always visible, of value zero.
    """
    acc = jnp.zeros((*shape, cached.value_dim), jnp.float32)
    if options.sinks is None:
        return _Partial(jnp.full(shape, MASKED), jnp.zeros(shape), acc)
    sinks = jnp.repeat(options.sinks.astype(jnp.float32), num_queries)
    m = jnp.broadcast_to(sinks.reshape(cached.kv_heads, -1), shape)
    return _Partial(m, jnp.ones_like(m), acc)


def _attend(
    queries: jax.Array,
    cached: CachedLayer,
    pages: jax.Array,
    which: _Keys,
    options: ScoreOptions,
) -> _Partial:
    """Attend with queries [..., kv_heads, group * n, D] to the keys in pages [..., p]."""
    keys, values = cached.keys_and_values(pages)
    scores = jnp.einsum("...hqd,...hkd->...hqk", queries, keys)
    group = scores.shape[-2] // which.seen.shape[-2]
    seen = jnp.concatenate([which.seen] * group, axis=-2)[..., None, :, :]
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores = jnp.where(seen, scores, MASKED)
    m = scores.max(axis=-1)
    weights = jnp.exp(scores - m[..., None])
    values = jnp.where(which.used[..., None, :, None], values, 0)
    acc = jnp.einsum("...hqk,...hkd->...hqd", weights, values)
    return _Partial(m, weights.sum(axis=-1), acc)


def _merge(a: _Partial, b: _Partial) -> _Partial:
    m = jnp.maximum(a.m, b.m)
    scale_a, scale_b = jnp.exp(a.m - m), jnp.exp(b.m - m)
    return _Partial(
        m,
        a.l * scale_a + b.l * scale_b,
        a.acc * scale_a[..., None] + b.acc * scale_b[..., None],
    )


def _merge_into_rows(rows: _Partial, blocks: _Partial, owner: jax.Array) -> _Partial:
    """Merge blocks [blocks, ...] into rows [rows, ...]; owner[i, j]: block i is of row j.

    Blocks of other rows are masked with a select: zero times their NaN would be NaN.
    """
    owner = owner[:, :, None, None]
    m = jnp.maximum(rows.m, jnp.where(owner, blocks.m[:, None], MASKED).max(axis=0))
    kept = jnp.exp(rows.m - m)
    l, acc = rows.l * kept, rows.acc * kept[..., None]
    for block, is_own in zip(range(len(owner)), owner, strict=True):
        scale = jnp.exp(blocks.m[block] - m)
        l += jnp.where(is_own, scale * blocks.l[block], 0)
        acc += jnp.where(is_own[..., None], scale[..., None] * blocks.acc[block], 0)
    return _Partial(m, l, acc)

"""Ragged paged attention in plain XLA: for CPUs, and for any platform without a kernel.

The cost depends on the tokens in use, not on the context limit or the padding: every loop has a
dynamic trip count.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.attention.batch import NULL_PAGE, AttentionBatch, ScoreOptions, last_seen
from sgl_jax.kernels.attention.cache_dtype import as_float32, is_packed, new_slots
from sgl_jax.kernels.attention.key_blocks import (
    BlockTable,
    CachedLayer,
    Partial,
    VisibleKeys,
    attend_block,
    divided,
    first_visible,
    merge,
    merge_into_rows,
    no_keys,
    scaled_queries,
)

# Decode reads DECODE_BLOCKS blocks of keys at once, of any rows: one block for each operation would
# be too small for its launch cost, and twice as many keys would mostly be padding of short rows.
DECODE_BLOCKS = 4
DECODE_KEYS = 64
PREFILL_KEYS = 128
# A chunk's queries are processed in blocks of 64. The last few of a chunk, or all of a short chunk
# such as a turn of a conversation, are processed in blocks of 8: a large block would be mostly
# padding and read the whole history. A block of 64 takes about as long as four of 8. Blocks of 128
# take as long for a whole chunk, and longer for a chunk of fewer queries than that.
PREFILL_QUERIES = 64
SHORT_QUERIES = 8
LEFT_TO_SHORT = 24  # a rest of up to this many queries of a row gets no large block
# Queries of all rows, if results must not depend on the batch (`kernels.row_blocks`).
INVARIANT_QUERIES = 8


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
    table = BlockTable.of(batch.page_table, cached.page_size, PREFILL_KEYS)
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
    table = BlockTable.of(batch.page_table, cached.page_size, DECODE_KEYS)
    block_keys = table.pages_per_block * cached.page_size
    is_decode = jnp.arange(num_rows, dtype=jnp.int32) < batch.num_decode
    kv_starts = batch.kv_starts[:num_rows]
    kv_lens = jnp.where(is_decode, kv_starts + batch.q_lens[:num_rows], 0)
    first_blocks = jnp.where(is_decode, first_visible(kv_starts, options) // block_keys, 0)
    ends = jnp.cumsum(-(-kv_lens // block_keys) - first_blocks, dtype=jnp.int32)
    # Block number n of the list, of row r, is the row's block n - base[r].
    base = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]]) - first_blocks
    # A row with fewer drafts repeats its last query, and reads no query of another row.
    ahead = jnp.arange(width, dtype=jnp.int32)
    last = jnp.maximum(batch.q_lens[:num_rows, None] - 1, 0)
    places = batch.q_offsets[:num_rows, None] + jnp.minimum(ahead, last)
    queries = scaled_queries(q[places], cached.kv_heads, options)
    window = jnp.arange(DECODE_BLOCKS, dtype=jnp.int32)

    def turn(index: jax.Array, state: Partial) -> Partial:
        numbers = index * DECODE_BLOCKS + window
        row = jnp.sum(numbers[:, None] >= ends, axis=1, dtype=jnp.int32)
        row = jnp.minimum(row, num_rows - 1)
        block = numbers - base[row]
        keys = VisibleKeys.of(block, block_keys, kv_starts[row], kv_lens[row], width, options)
        pages = table.pages(row, block)
        found = attend_block(queries[row], cached, pages, keys, options)
        # owner[i, j]: block i belongs to the j-th row that this iteration may change.
        owner = (row[:, None] == row[0] + window) & (numbers < ends[-1])[:, None]
        touched = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row[0], DECODE_BLOCKS), state)
        merged = merge_into_rows(touched, found, owner)
        return jax.tree.map(
            lambda x, new: lax.dynamic_update_slice_in_dim(x, new, row[0], axis=0), state, merged
        )

    nothing = no_keys((num_rows + DECODE_BLOCKS, *queries.shape[1:-1]), cached, width, options)
    state = lax.fori_loop(0, -(-ends[-1] // DECODE_BLOCKS), turn, nothing)
    by_row = divided(state, width)
    row = jnp.minimum(batch.token_rows[:num_tokens], num_rows - 1)
    in_row = jnp.arange(num_tokens, dtype=jnp.int32) - batch.q_offsets[row]
    return by_row[row, jnp.minimum(in_row, width - 1)].astype(q.dtype)


def _prefill(
    q: jax.Array, out: jax.Array, cached: CachedLayer, batch: AttentionBatch, options: ScoreOptions
) -> jax.Array:
    """Write the attention of the rows from `num_decode` on to out; q, out [T + padding, ...]."""
    table = BlockTable.of(batch.page_table, cached.page_size, PREFILL_KEYS)
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
    table: BlockTable
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
        queries = scaled_queries(block, self.cached.kv_heads, self.options)
        q_start, kv_len = batch.kv_starts[row] + first, batch.kv_starts[row] + batch.q_lens[row]
        spans = None if batch.spans is None else batch.spans[row]

        def key_block(index: jax.Array, state: Partial) -> Partial:
            keys = VisibleKeys.of(
                *(index, block_keys, q_start, kv_len, self.num_queries, self.options), spans
            )
            pages = self.table.pages(row, index)
            return merge(state, attend_block(queries, self.cached, pages, keys, self.options))

        first_block = first_visible(q_start, self.options) // block_keys
        stop = jnp.minimum(q_start + self.num_queries, kv_len)
        if spans is not None:
            stop = jnp.minimum(last_seen(stop - 1, spans) + 1, kv_len)
        stop_block = -(-stop // block_keys)
        nothing = no_keys(queries.shape[:-1], self.cached, self.num_queries, self.options)
        state = lax.fori_loop(first_block, stop_block, key_block, nothing)
        return divided(state, self.num_queries)

"""Ragged paged attention in plain XLA: for CPUs, and for any platform without a kernel.

Cost follows the tokens in use, not the context limit and not the padding: every loop has a
dynamic trip count. Softmax is online (arXiv 2205.14135): keys are met a block at a time, and the
partial results of blocks are merged.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.attention.batch import MASKED, NULL_PAGE, AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.cache_dtype import as_float32, is_packed, new_slots

# Decode meets DECODE_BLOCKS blocks of keys at once, of any rows: one operation each would
# be too small to be worth its launch.
DECODE_BLOCKS = 8
DECODE_KEYS = 64
PREFILL_KEYS = 128
# A chunk's queries are met in blocks of 128; the last few of a chunk, or all of a short one such as
# a turn of a conversation, in blocks of 4, since a large block would be mostly padding and meet the
# whole history. A block of 128 takes about as long as ten of 4.
PREFILL_QUERIES = 128
SHORT_QUERIES = 4
LEFT_TO_SHORT = 32  # queries of a row that are not worth a large block


class CachedLayer(Protocol):
    """One layer of a cache, read by blocks of pages."""

    @property
    def kv_heads(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def value_dim(self) -> int:
        """Numbers of one head's value."""
        ...

    def keys_and_values(self, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """K and V, float32 [..., kv_heads, n * page_size, numbers], of pages int32 [..., n]."""
        ...


class _Heads(NamedTuple):
    """A layer whose KV heads have a key and a value each, of equal size."""

    kv_cache: jax.Array  # as in `api`
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
        """K, part 0, or V, part 1."""
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
    """Attention over some of the keys, not yet divided: the state of an online softmax."""

    m: jax.Array  # [..., kv_heads, queries] greatest score
    l: jax.Array  # [..., kv_heads, queries] sum of exp(score - m)
    acc: jax.Array  # [..., kv_heads, queries, value_dim] values, weighted by exp(score - m)


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    options: ScoreOptions,
) -> tuple[jax.Array, jax.Array]:
    """See `api.RaggedPagedAttention`."""
    kv_cache = write_kv(k, v, kv_cache, layer, batch)
    return attend_cached(q, _Heads(kv_cache, layer, q.shape[2]), batch, options), kv_cache


def attend_cached(
    q: jax.Array, cached: CachedLayer, batch: AttentionBatch, options: ScoreOptions
) -> jax.Array:
    """Attention of q [T, q_heads, D] to a layer that has this step's tokens:
    [T, q_heads, value_dim] in the dtype of q."""
    # Blocks of queries overrun the end of their row. That is harmless: rows are processed in
    # ascending order, and later rows overwrite the results past a row's end.
    padded = jnp.pad(q, ((0, PREFILL_QUERIES), (0, 0), (0, 0)))
    out = lax.dynamic_update_slice_in_dim(
        jnp.zeros((*padded.shape[:2], cached.value_dim), q.dtype),
        _decode(q, cached, batch, options),
        0,
        axis=0,
    )
    out = _prefill(padded, out, cached, batch, options)
    return out[: q.shape[0]]


def write_kv(
    k: jax.Array, v: jax.Array, kv_cache: jax.Array, layer: jax.Array, batch: AttentionBatch
) -> jax.Array:
    """Scatter k, v [T, kv_heads, head_dim] to their slots; padding goes to the null page."""
    page_size = kv_cache.shape[3]
    pages = batch.page_table[batch.token_rows, batch.positions // page_size]
    pages = jnp.where(batch.valid, pages, NULL_PAGE)
    slots = kv_cache.at[layer, pages, :, batch.positions % page_size]
    return slots.set(new_slots(k, v, kv_cache), mode="promise_in_bounds")


def _decode(
    q: jax.Array, cached: CachedLayer, batch: AttentionBatch, options: ScoreOptions
) -> jax.Array:
    """Attention of the decode rows' tokens, which come first:
    [max_decode_tokens, q_heads, value_dim].

    Drafted tokens are looked at one by one, as if each were a row of its own. The blocks of keys of
    all tokens form one list, token after token. Each turn of the loop takes the next DECODE_BLOCKS
    of it and merges their results into their tokens, which are neighbours. Results after the decode
    rows' are finite and arbitrary.
    """
    num_tokens = batch.max_decode_tokens
    table = _BlockTable.of(batch.page_table, cached.page_size, DECODE_KEYS)
    block_keys = table.pages_per_block * cached.page_size
    is_decode = jnp.arange(num_tokens, dtype=jnp.int32) < batch.q_offsets[batch.num_decode]
    kv_lens = jnp.where(is_decode, batch.positions[:num_tokens] + 1, 0)
    first_blocks = _first_visible(kv_lens - 1, options) // block_keys
    ends = jnp.cumsum(-(-kv_lens // block_keys) - first_blocks, dtype=jnp.int32)
    # Block number n of the list, of token t, is the token's block n - base[t].
    base = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]]) - first_blocks
    queries = _scaled_queries(q[:num_tokens], cached.kv_heads, options)
    window = jnp.arange(DECODE_BLOCKS, dtype=jnp.int32)

    def turn(index: jax.Array, state: _Partial) -> _Partial:
        numbers = index * DECODE_BLOCKS + window
        token = jnp.sum(numbers[:, None] >= ends, axis=1, dtype=jnp.int32)
        token = jnp.minimum(token, num_tokens - 1)
        block, kv_len = numbers - base[token], kv_lens[token][:, None]
        positions = block[:, None] * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
        seen = (positions < kv_len) & (positions >= _first_visible(kv_len - 1, options))
        pages = table.pages(batch.token_rows[token], block)
        found = _attend(queries[token], cached, pages, seen[:, None, None], seen, options)
        # owner[i, j]: block i belongs to the j-th of the tokens that this turn may touch.
        owner = (token[:, None] == token[0] + window) & (numbers < ends[-1])[:, None]
        touched = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, token[0], DECODE_BLOCKS), state
        )
        merged = _merge_into_tokens(touched, found, owner)
        return jax.tree.map(
            lambda x, new: lax.dynamic_update_slice_in_dim(x, new, token[0], axis=0), state, merged
        )

    sinks = None if options.sinks is None else options.sinks.reshape(queries.shape[1:3])
    shape = num_tokens + DECODE_BLOCKS, *queries.shape[1:-1], cached.value_dim
    nothing = _nothing(shape, sinks)
    state = lax.fori_loop(0, -(-ends[-1] // DECODE_BLOCKS), turn, nothing)
    out = state.acc / jnp.maximum(state.l, jnp.finfo(jnp.float32).tiny)[..., None]
    return out[:num_tokens].reshape(num_tokens, q.shape[1], -1).astype(q.dtype)


def _prefill(
    q: jax.Array, out: jax.Array, cached: CachedLayer, batch: AttentionBatch, options: ScoreOptions
) -> jax.Array:
    """Put the attention of the rows from `num_decode` on into out; q and out [T + padding, ...]."""
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
    """Attention of `num_queries` neighbouring queries of a row at once."""

    num_queries: int
    table: "_BlockTable"
    cached: CachedLayer
    batch: AttentionBatch
    options: ScoreOptions

    def attend(self, q: jax.Array, out: jax.Array, row: jax.Array, first: jax.Array) -> jax.Array:
        """Put the attention of the row's queries `first`, `first` + 1, ... into out."""
        batch, kv_heads, head_dim = self.batch, self.cached.kv_heads, q.shape[-1]
        block_keys = self.table.pages_per_block * self.cached.page_size
        start = batch.q_offsets[row] + first
        block = lax.dynamic_slice_in_dim(q, start, self.num_queries)
        queries = _scaled_queries(block, kv_heads, self.options)
        group = queries.shape[2]
        queries = queries.transpose(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
        q_start, kv_len = batch.kv_starts[row] + first, batch.kv_starts[row] + batch.q_lens[row]
        # Queries past the row's end see its last one's keys, never an unused slot.
        ahead = jnp.arange(self.num_queries, dtype=jnp.int32)
        q_positions = jnp.minimum(q_start + ahead, kv_len - 1)[:, None]
        first_visible = _first_visible(q_positions, self.options)

        def key_block(index: jax.Array, state: _Partial) -> _Partial:
            positions = index * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
            seen = (positions <= q_positions) & (positions >= first_visible)
            seen = jnp.broadcast_to(seen, (group, *seen.shape)).reshape(-1, block_keys)
            # The table has no page of the row for keys that the window has passed.
            used = (positions < kv_len) & (positions >= first_visible[0])
            pages = self.table.pages(row, index)
            found = _attend(queries, self.cached, pages, seen, used, self.options)
            return _merge(state, found)

        first_block = _first_visible(q_start, self.options) // block_keys
        stop_block = -(-jnp.minimum(q_start + self.num_queries, kv_len) // block_keys)
        sinks = self.options.sinks
        if sinks is not None:
            sinks = jnp.repeat(sinks, self.num_queries).reshape(kv_heads, -1)
        value_dim = self.cached.value_dim
        nothing = _nothing((*queries.shape[:-1], value_dim), sinks)
        state = lax.fori_loop(first_block, stop_block, key_block, nothing)
        result = (state.acc / state.l[..., None]).reshape(-1, self.num_queries, value_dim)
        result = result.transpose(1, 0, 2).astype(q.dtype)
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)


class _BlockTable(NamedTuple):
    """Page ids of each row, cut into blocks: int32 [rows, blocks, pages_per_block]."""

    ids: jax.Array

    @classmethod
    def of(cls, page_table: jax.Array, page_size: int, num_keys: int) -> "_BlockTable":
        """Blocks of `num_keys` keys, or of one page if that holds more."""
        block_pages = max(1, num_keys // page_size)
        padding = -page_table.shape[1] % block_pages
        ids = jnp.pad(page_table, ((0, 0), (0, padding)), constant_values=NULL_PAGE)
        return cls(ids.reshape(page_table.shape[0], -1, block_pages))

    @property
    def pages_per_block(self) -> int:
        return self.ids.shape[2]

    def pages(self, row: jax.Array, block: jax.Array) -> jax.Array:
        """int32 [..., pages_per_block] of row and block, int32 [...]."""
        return self.ids.at[row, block].get(mode="clip")


def _scaled_queries(q: jax.Array, kv_heads: int, options: ScoreOptions) -> jax.Array:
    """q [n, q_heads, D] as float32 [n, kv_heads, group, D], times the scale."""
    grouped = q.reshape(q.shape[0], kv_heads, -1, q.shape[-1])
    return grouped.astype(jnp.float32) * options.scale


def _first_visible(position: jax.Array, options: ScoreOptions) -> jax.Array:
    """The first key position that a query at `position` sees."""
    if options.sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - options.sliding_window + 1, 0)


def _nothing(shape: tuple[int, ...], sinks: jax.Array | None) -> _Partial:
    """Attention over no keys yet, a result of `shape`; sinks broadcast over all but the last.

    A sink is one more key, always visible, whose value is zero.
    """
    acc = jnp.zeros(shape, jnp.float32)
    if sinks is None:
        return _Partial(jnp.full(shape[:-1], MASKED), jnp.zeros(shape[:-1]), acc)
    m = jnp.broadcast_to(sinks.astype(jnp.float32), shape[:-1])
    return _Partial(m, jnp.ones_like(m), acc)


def _attend(
    queries: jax.Array,
    cached: CachedLayer,
    pages: jax.Array,
    seen: jax.Array,
    used: jax.Array,
    options: ScoreOptions,
) -> _Partial:
    """Attention of queries [..., kv_heads, n, D] over the keys in pages [..., p].

    `seen` bool [..., kv_heads or 1, n or 1, keys]: which keys each query sees. `used` bool
    [..., keys]: which slots hold a token that some query sees; others may hold anything, NaN
    included.
    """
    keys, values = cached.keys_and_values(pages)
    scores = jnp.einsum("...hqd,...hkd->...hqk", queries, keys)
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores = jnp.where(seen, scores, MASKED)
    m = scores.max(axis=-1)
    weights = jnp.exp(scores - m[..., None])
    values = jnp.where(used[..., None, :, None], values, 0)
    acc = jnp.einsum("...hqk,...hkd->...hqd", weights, values)
    return _Partial(m, weights.sum(axis=-1), acc)


def _merge(a: _Partial, b: _Partial) -> _Partial:
    """Attention over the keys of both."""
    m = jnp.maximum(a.m, b.m)
    scale_a, scale_b = jnp.exp(a.m - m), jnp.exp(b.m - m)
    return _Partial(
        m,
        a.l * scale_a + b.l * scale_b,
        a.acc * scale_a[..., None] + b.acc * scale_b[..., None],
    )


def _merge_into_tokens(tokens: _Partial, blocks: _Partial, owner: jax.Array) -> _Partial:
    """Merge blocks [blocks, ...] into tokens [tokens, ...]; owner[i, j]: block i is of token j."""
    owner = owner[:, :, None, None]
    m = jnp.maximum(tokens.m, jnp.where(owner, blocks.m[:, None], MASKED).max(axis=0))
    kept = jnp.exp(tokens.m - m)
    scale = jnp.where(owner, jnp.exp(blocks.m[:, None] - m), 0)
    return _Partial(
        m,
        tokens.l * kept + (scale * blocks.l[:, None]).sum(axis=0),
        tokens.acc * kept[..., None] + jnp.einsum("brhq,bhqd->rhqd", scale, blocks.acc),
    )

"""Attention to blocks of cached keys in plain XLA, and how the results of blocks are merged.

Softmax is online (arXiv 2205.14135): keys are read a block at a time, and the partial results of
blocks are merged.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from sgl_jax.kernels.attention.batch import MASKED, NULL_PAGE, ScoreOptions, last_seen


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


class BlockTable(NamedTuple):
    """Page ids of each row, cut into blocks: int32 [rows, blocks, pages_per_block]."""

    ids: jax.Array

    @classmethod
    def of(cls, page_table: jax.Array, page_size: int, num_keys: int) -> "BlockTable":
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


def first_visible(position: jax.Array, options: ScoreOptions) -> jax.Array:
    """Return the first key that a query at `position`, int32 [...], sees."""
    if options.sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(options.first_seen(position), 0)


class VisibleKeys(NamedTuple):
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
        spans: jax.Array | None = None,
    ) -> "VisibleKeys":
        """Return the keys of block `block` that a row's queries from position `q_start` on see.

        The row has `kv_len` keys. All three are int32 [...]; [] with `spans`, see `last_seen`.
        """
        keys = block[..., None] * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
        ahead = jnp.arange(num_queries, dtype=jnp.int32)
        # Queries past the row's end see the keys of its last query, never an unused slot.
        queries = jnp.minimum(q_start[..., None] + ahead, kv_len[..., None] - 1)
        firsts = first_visible(queries, options)
        lasts = queries if spans is None else jnp.minimum(last_seen(queries, spans), kv_len - 1)
        seen = (keys[..., None, :] <= lasts[..., None]) & (keys[..., None, :] >= firsts[..., None])
        return cls(seen, (keys < kv_len[..., None]) & (keys >= firsts[..., :1]))


class Partial(NamedTuple):
    """Undivided attention over some of the keys: the state of an online softmax."""

    m: jax.Array  # [..., kv_heads, queries] greatest score
    l: jax.Array  # [..., kv_heads, queries] sum of exp(score - m)
    acc: jax.Array  # [..., kv_heads, queries, value_dim] values, weighted by exp(score - m)


def scaled_queries(q: jax.Array, kv_heads: int, options: ScoreOptions) -> jax.Array:
    """Return q [..., n, q_heads, D] as float32 [..., kv_heads, group * n, D], times the scale."""
    *outer, num_queries, _, head_dim = q.shape
    grouped = q.reshape(*outer, num_queries, kv_heads, -1, head_dim)
    by_head = jnp.moveaxis(grouped, -4, -2).reshape(*outer, kv_heads, -1, head_dim)
    return by_head.astype(jnp.float32) * options.scale


def no_keys(
    shape: tuple[int, ...], cached: CachedLayer, num_queries: int, options: ScoreOptions
) -> Partial:
    """Return the attention before any key, for queries [..., kv_heads, group * num_queries].

    A sink is one more key, always visible, of value zero.
    """
    acc = jnp.zeros((*shape, cached.value_dim), jnp.float32)
    if options.sinks is None:
        return Partial(jnp.full(shape, MASKED), jnp.zeros(shape), acc)
    sinks = jnp.repeat(options.sinks.astype(jnp.float32), num_queries)
    m = jnp.broadcast_to(sinks.reshape(cached.kv_heads, -1), shape)
    return Partial(m, jnp.ones_like(m), acc)


def attend_block(
    queries: jax.Array,
    cached: CachedLayer,
    pages: jax.Array,
    which: VisibleKeys,
    options: ScoreOptions,
) -> Partial:
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
    return Partial(m, weights.sum(axis=-1), acc)


def merge(a: Partial, b: Partial) -> Partial:
    """Return the attention over the keys of both."""
    m = jnp.maximum(a.m, b.m)
    scale_a, scale_b = jnp.exp(a.m - m), jnp.exp(b.m - m)
    return Partial(
        m,
        a.l * scale_a + b.l * scale_b,
        a.acc * scale_a[..., None] + b.acc * scale_b[..., None],
    )


def merge_into_rows(rows: Partial, blocks: Partial, owner: jax.Array) -> Partial:
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
    return Partial(m, l, acc)


def divided(state: Partial, num_queries: int) -> jax.Array:
    """Return attention over all keys, [..., n, q_heads, value_dim]; zeros without a key."""
    out = state.acc / jnp.maximum(state.l, jnp.finfo(jnp.float32).tiny)[..., None]
    *outer, _, _, value_dim = out.shape
    return jnp.moveaxis(out.reshape(*outer, -1, num_queries, value_dim), -3, -2)

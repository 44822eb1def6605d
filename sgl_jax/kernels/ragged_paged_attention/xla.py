"""Ragged paged attention in plain XLA: for CPUs, and for any platform without a kernel.

Cost follows the tokens in use, not the context limit and not the padding: every loop has a
dynamic trip count. Softmax is online, one block of KV at a time (arXiv 2205.14135).

Blocks overrun the end of their row. That is harmless: rows are processed in ascending order, so
what a block wrote past its row's end is overwritten by the rows that follow.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.ragged_paged_attention.batch import NULL_PAGE, AttentionBatch

PREFILL_QUERIES = 64  # queries of one block
KV_TOKENS = 256  # keys of one block

# Finite, so that a block whose keys are all masked leaves no NaN behind: what it adds is scaled
# by exp(_MASKED - top) = 0 as soon as a visible key is met, and every query sees at least itself.
_MASKED = -1e30


class _Variant(NamedTuple):
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: jax.Array | None


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `interface.RaggedPagedAttention`."""
    variant = _Variant(scale, sliding_window, soft_cap, sinks)
    kv_cache = write_kv(k, v, kv_cache, layer, batch)
    page_size = kv_cache.shape[3]
    block_pages = max(1, KV_TOKENS // page_size)
    # Whole blocks of page ids, so that a slice of the last block is not shifted to fit.
    padding = -batch.page_table.shape[1] % block_pages
    page_table = jnp.pad(batch.page_table, ((0, 0), (0, padding)))

    def attend(row: jax.Array, first: jax.Array, num_queries: int, out: jax.Array) -> jax.Array:
        """Attention of `num_queries` queries from the row's query `first` on, put into out."""
        start = batch.q_offsets[row] + first
        block_out = _attend_block(
            lax.dynamic_slice_in_dim(q_padded, start, num_queries),
            batch.kv_starts[row] + first,
            batch.kv_starts[row] + batch.q_lens[row],
            kv_cache,
            layer,
            page_table[row],
            block_pages,
            variant,
        )
        return lax.dynamic_update_slice_in_dim(out, block_out, start, axis=0)

    def prefill_row(row: jax.Array, out: jax.Array) -> jax.Array:
        num_blocks = -(-batch.q_lens[row] // PREFILL_QUERIES)
        return lax.fori_loop(
            0,
            num_blocks,
            lambda i, out: attend(row, i * PREFILL_QUERIES, PREFILL_QUERIES, out),
            out,
        )

    num_tokens = q.shape[0]
    q_padded = jnp.pad(q, ((0, PREFILL_QUERIES), (0, 0), (0, 0)))
    out = jnp.zeros_like(q_padded)
    out = lax.fori_loop(
        0, batch.num_decode, lambda row, out: attend(row, jnp.int32(0), 1, out), out
    )
    out = lax.fori_loop(batch.num_decode, batch.num_rows, prefill_row, out)
    return out[:num_tokens], kv_cache


def write_kv(
    k: jax.Array, v: jax.Array, kv_cache: jax.Array, layer: jax.Array, batch: AttentionBatch
) -> jax.Array:
    """Scatter k, v [T, kv_heads, head_dim] to their slots; padding goes to the null page."""
    page_size = kv_cache.shape[3]
    pages = batch.page_table[batch.token_rows, batch.positions // page_size]
    pages = jnp.where(batch.valid, pages, NULL_PAGE)
    kv = jnp.concatenate([k, v], axis=1).astype(kv_cache.dtype)
    return kv_cache.at[layer, pages, :, batch.positions % page_size].set(
        kv, mode="promise_in_bounds"
    )


def _attend_block(
    q: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    pages: jax.Array,
    block_pages: int,
    variant: _Variant,
) -> jax.Array:
    """Attend with queries q [Q, q_heads, D] at positions q_start, q_start + 1, ... of one row.

    `kv_len` is the number of tokens the row has in the cache, `pages` its page ids.
    """
    num_queries, q_heads, head_dim = q.shape
    kv_heads, page_size = kv_cache.shape[2] // 2, kv_cache.shape[3]
    block_tokens = block_pages * page_size
    group = q_heads // kv_heads
    # Queries past the row's end see what its last one sees, never an unused slot.
    q_positions = jnp.minimum(q_start + jnp.arange(num_queries, dtype=jnp.int32), kv_len - 1)
    q_grouped = q.reshape(num_queries, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    q_grouped = q_grouped.astype(jnp.float32) * variant.scale

    def kv_block(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = carry
        ids = lax.dynamic_slice_in_dim(pages, index * block_pages, block_pages)
        block = kv_cache.at[layer, ids].get(mode="promise_in_bounds").astype(jnp.float32)
        block = block.transpose(1, 0, 2, 3).reshape(2 * kv_heads, block_tokens, head_dim)
        kv_positions = index * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
        scores = jnp.einsum("hgqd,hkd->hgqk", q_grouped, block[:kv_heads])
        if variant.soft_cap is not None:
            scores = variant.soft_cap * jnp.tanh(scores / variant.soft_cap)
        visible = kv_positions <= q_positions[:, None]
        if variant.sliding_window is not None:
            visible &= kv_positions > q_positions[:, None] - variant.sliding_window
        scores = jnp.where(visible, scores, _MASKED)
        top_new = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.exp(scores - top_new[..., None])
        # Unused slots may hold anything, NaN included, and 0 * NaN is NaN.
        values = jnp.where((kv_positions < kv_len)[:, None], block[kv_heads:], 0)
        keep = jnp.exp(top - top_new)
        total = total * keep + weights.sum(axis=-1)
        acc = acc * keep[..., None] + jnp.einsum("hgqk,hkd->hgqd", weights, values)
        return top_new, total, acc

    shape = (kv_heads, group, num_queries)
    if variant.sinks is None:
        top, total = jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:  # a sink is one more key, always visible, whose value is zero
        sinks = variant.sinks.astype(jnp.float32).reshape(kv_heads, group, 1)
        top, total = jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32)
    first = jnp.int32(0)
    if variant.sliding_window is not None:
        first = jnp.maximum(q_start - variant.sliding_window + 1, 0) // block_tokens
    stop = -(-jnp.minimum(q_start + num_queries, kv_len) // block_tokens)
    acc = jnp.zeros((*shape, head_dim), jnp.float32)
    top, total, acc = lax.fori_loop(first, stop, kv_block, (top, total, acc))
    out = (acc / total[..., None]).transpose(2, 0, 1, 3)
    return out.reshape(num_queries, q_heads, head_dim).astype(q.dtype)

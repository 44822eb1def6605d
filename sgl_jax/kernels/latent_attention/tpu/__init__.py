"""Latent attention for TPU: the kernels of `attention` over a cache with one KV head.

A row of the cache is the key of all heads, and its latent their value. So `attention.tpu` writes,
decodes and prefills with slots that are both key and value, where values take only the first lanes.
XLA absorbs the queries before, and expands the results after, by products.

Long steps prefill in the expanded form: the kernel computes each head's keys and values of a block
of latents, once for a thousand queries (`tuned.EXPANDED_TOKENS`).
"""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.tpu.decode import decode_attention
from sgl_jax.kernels.attention.tpu.prefill import prefill_attention
from sgl_jax.kernels.attention.tpu.shared import CacheSlots, Expansion
from sgl_jax.kernels.attention.tpu.write import write_slots
from sgl_jax.kernels.latent_attention.latents import (
    LatentQueries,
    UpProjections,
    absorbed_queries,
    cached_rows,
    latent_row_size,
    values_of_latents,
)
from sgl_jax.kernels.latent_attention.tpu.tuned import (
    DECODE_BLOCKS,
    EXPANDED_HEADS,
    expanded_prefill_blocks,
    is_expanded,
    latent_prefill_blocks,
)


def latent_slots(rank: int) -> CacheSlots:
    """Return the places of keys and values in a cache of latents; values in whole rows of lanes."""
    return CacheSlots(packed=True, value_dim=latent_row_size(rank, 0))


def latent_attention(
    queries: LatentQueries,
    latents: jax.Array,
    up: UpProjections,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Implement `interface.PagedLatentAttention`.

    Raises ValueError if the page size is not a multiple of the cache's tile.
    """
    page_size, row_size = kv_cache.shape[3:]
    rows = cached_rows(latents, row_size, kv_cache.dtype)
    kv_cache = write_slots([rows[:, None]], kv_cache, layer, batch)
    arguments = (kv_cache, layer, batch, ScoreOptions(scale))
    slots = latent_slots(up.rank)
    num_tokens, heads, _ = queries.nope.shape
    if not is_expanded(num_tokens, up):
        out = absorbed_queries(queries, up, row_size)
        out = decode_attention(out, *arguments, slots=slots, blocks=DECODE_BLOCKS)
        blocks = latent_prefill_blocks(heads, page_size, out.dtype, num_tokens)
        out = prefill_attention(out, *arguments, slots=slots, blocks=blocks)
        return values_of_latents(out, up), kv_cache
    most = batch.max_decode_tokens
    out = absorbed_queries(LatentQueries(*(part[:most] for part in queries)), up, row_size)
    out = decode_attention(out, *arguments, slots=slots, blocks=DECODE_BLOCKS)
    is_decode = jnp.arange(most) < batch.q_offsets[batch.num_decode]
    decoded = values_of_latents(out, up)
    prefilled = expanded_prefill(queries, up, *arguments)
    first = jnp.where(is_decode[:, None, None], decoded, prefilled[:most])
    return lax.dynamic_update_slice_in_dim(prefilled, first, 0, axis=0), kv_cache


def expanded_prefill(
    queries: LatentQueries,
    up: UpProjections,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    options: ScoreOptions,
) -> jax.Array:
    """Attend with the rows from num_decode on, to keys and values computed from latents.

    Some heads are processed at a time, as vector memory allows. Returns [T, heads, value_dim].
    """
    num_tokens, heads, _ = queries.nope.shape
    each = max(n for n in range(1, EXPANDED_HEADS + 1) if heads % n == 0)
    page_size, row_size = kv_cache.shape[3:]
    rope = queries.rope
    spare = row_size - up.rank - rope.shape[2]
    parts = *queries, jnp.zeros((num_tokens, heads, spare), rope.dtype)
    q = jnp.concatenate(parts, axis=2).reshape(num_tokens, heads // each, each, -1)
    slots = CacheSlots(packed=True, value_dim=up.values.shape[2])
    blocks = expanded_prefill_blocks(each, page_size, num_tokens)

    def attend(group: tuple[jax.Array, UpProjections]) -> jax.Array:
        own_q, own_up = group
        out = prefill_attention(
            own_q,
            *(kv_cache, layer, batch, options),
            slots=slots,
            blocks=blocks,
            expansion=Expansion(*own_up),
        )
        return out[:, :, : slots.value_dim]

    by_group = jax.tree.map(lambda x: x.reshape(heads // each, each, *x.shape[1:]), up)
    out = lax.map(attend, (q.swapaxes(0, 1), by_group))
    return out.swapaxes(0, 1).reshape(num_tokens, heads, -1)

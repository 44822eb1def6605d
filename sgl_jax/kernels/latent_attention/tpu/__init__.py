"""Latent attention for TPU: attention's kernels over a cache with one KV head.

A row of the cache is the key of all heads, and its latent their value. So `attention.tpu` writes,
decodes and prefills: with slots that are key and value alike, and values that take their first
lanes alone. Queries are absorbed before, and results expanded after, by products of XLA.
"""

import jax

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.tpu.decode import decode_attention
from sgl_jax.kernels.attention.tpu.prefill import prefill_attention
from sgl_jax.kernels.attention.tpu.shared import CacheSlots
from sgl_jax.kernels.attention.tpu.write import write_slots
from sgl_jax.kernels.latent_attention.latents import (
    LatentQueries,
    UpProjections,
    absorbed_queries,
    cached_rows,
    latent_row_size,
    values_of_latents,
)
from sgl_jax.kernels.latent_attention.tpu.tuned import DECODE_BLOCKS, latent_prefill_blocks


def latent_slots(rank: int) -> CacheSlots:
    """The places of keys and values in a cache of latents; values in whole rows of lanes."""
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
    """See `interface.PagedLatentAttention`.

    Raises:
        ValueError: the page size is not a multiple of the cache's tile.
    """
    page_size, row_size = kv_cache.shape[3:]
    rows = cached_rows(latents, row_size, kv_cache.dtype)
    kv_cache = write_slots([rows[:, None]], kv_cache, layer, batch)
    q = absorbed_queries(queries, up, row_size)
    arguments = (kv_cache, layer, batch, ScoreOptions(scale))
    slots = latent_slots(up.rank)
    out = decode_attention(q, *arguments, slots=slots, blocks=DECODE_BLOCKS)
    blocks = latent_prefill_blocks(q.shape[1], page_size, q.dtype, q.shape[0])
    out = prefill_attention(out, *arguments, slots=slots, blocks=blocks)
    return values_of_latents(out, up), kv_cache

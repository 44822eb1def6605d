"""Latent attention for TPU: the kernels of `attention` over a cache with one KV head.

A row of the cache is the key of all heads, and its latent their value. So `attention.tpu` writes,
decodes and prefills with slots that are both key and value, where values take only the first lanes.
XLA absorbs the queries before, and expands the results after, by products.

Long steps prefill in the expanded form: the kernel computes each head's keys and values of a block
of latents, once for a thousand queries (`EXPANDED_TOKENS`).
"""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.tpu.decode import decode_attention
from sgl_jax.kernels.attention.tpu.prefill import prefill_attention
from sgl_jax.kernels.attention.tpu.shared import CacheSlots, Expansion
from sgl_jax.kernels.attention.tpu.tuned import DecodeBlocks, PrefillBlocks, invariant_blocks
from sgl_jax.kernels.attention.tpu.write import write_slots
from sgl_jax.kernels.latent_attention.choice import positions_of_greatest
from sgl_jax.kernels.latent_attention.chosen import ChoiceKernels, attend_if_chosen
from sgl_jax.kernels.latent_attention.index_scores import index_scores
from sgl_jax.kernels.latent_attention.latents import (
    IndexQueries,
    LatentQueries,
    ReusedChoice,
    UpProjections,
    absorbed_queries,
    cached_rows,
    latent_row_size,
    values_of_latents,
)
from sgl_jax.kernels.tpu_chip import LANES

# Block sizes by the compiler's schedules (docs/inside/kernels.md).
DECODE_BLOCKS = DecodeBlocks(block_keys=2048, part_keys=512)
PREFILL_ROWS = 4096  # rows of absorbed queries in a block: tokens, times heads
PART_ROWS = 1024  # most of these rows to stream past each weight of the matrix unit together
# Steps of this many tokens prefill in the expanded form.
EXPANDED_TOKENS = 1024
EXPANDED_QUERIES = 1024  # queries of a row that share computed keys and values
EXPANDED_HEADS = 8  # most heads with queries and results in vector memory together
PART_HEADS = 8  # heads to compute together, if results must not depend on the batch


def is_expanded(num_tokens: int, up: UpProjections) -> bool:
    """Return True if a step is long enough for the expanded form, and parts fill rows of lanes."""
    sizes = up.keys.shape[1], up.rank, up.values.shape[2]
    return num_tokens >= EXPANDED_TOKENS and all(size % LANES == 0 for size in sizes)


def latent_prefill_blocks(
    heads: int, page_size: int, dtype: jnp.dtype, num_tokens: int
) -> PrefillBlocks:
    """Return blocks for a step of `num_tokens` with `heads` absorbed queries of `dtype` each."""
    # Float32 takes several passes through the matrix unit, and more memory.
    shrink = 2 if jnp.dtype(dtype).itemsize > 2 else 1
    few = max(16, LANES // heads // 16 * 16)
    queries = max(2, PREFILL_ROWS // shrink // heads // few) * few
    queries = min(queries, -(-num_tokens // few) * few)
    least = queries * heads * shrink / PART_ROWS
    parts = min(n for n in range(1, heads + 1) if heads % n == 0 and n >= min(least, heads))
    return PrefillBlocks(queries, few, max(512, page_size), max(256, page_size), 1, parts)


def expanded_prefill_blocks(heads: int, page_size: int, num_tokens: int) -> PrefillBlocks:
    few = EXPANDED_QUERIES // 2
    queries = min(EXPANDED_QUERIES, -(-num_tokens // few) * few)
    return PrefillBlocks(queries, few, max(512, page_size), max(256, page_size), 1, heads)


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
    index: IndexQueries | ReusedChoice | None = None,
    *,
    is_invariant: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Implement `interface.PagedLatentAttention`.

    With `is_invariant`, the bits of a token's result depend only on the tokens before it. Raises
    ValueError if the page size is not a multiple of the cache's tile.
    """
    rows = cached_rows(latents, index, kv_cache.shape[4], kv_cache.dtype)
    kv_cache = write_slots([rows[:, None]], kv_cache, layer, batch)

    attend = attend_invariantly if is_invariant else attend_to_all

    def dense() -> jax.Array:
        return attend(queries, up, kv_cache, layer, batch, ScoreOptions(scale))

    shared = kv_cache, layer, batch, scale, index
    out, chosen = attend_if_chosen(dense, queries, up, *shared, CHOICE)
    return out, kv_cache, chosen


def attend_to_all(
    queries: LatentQueries,
    up: UpProjections,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    options: ScoreOptions,
) -> jax.Array:
    """Attend to all tokens before each query. Returns [T, heads, value_dim]."""
    page_size, row_size = kv_cache.shape[3:]
    arguments = (kv_cache, layer, batch, options)
    slots = latent_slots(up.rank)
    num_tokens, heads, _ = queries.nope.shape
    if not is_expanded(num_tokens, up):
        out = absorbed_queries(queries, up, row_size)
        out = decode_attention(out, *arguments, slots=slots, blocks=DECODE_BLOCKS)
        blocks = latent_prefill_blocks(heads, page_size, out.dtype, num_tokens)
        out = prefill_attention(out, *arguments, slots=slots, blocks=blocks)
        return values_of_latents(out, up)
    most = batch.max_decode_tokens
    out = absorbed_queries(LatentQueries(*(part[:most] for part in queries)), up, row_size)
    out = decode_attention(out, *arguments, slots=slots, blocks=DECODE_BLOCKS)
    is_decode = jnp.arange(most) < batch.q_offsets[batch.num_decode]
    decoded = values_of_latents(out, up)
    prefilled = expanded_prefill(queries, up, *arguments)
    first = jnp.where(is_decode[:, None, None], decoded, prefilled[:most])
    result: jax.Array = lax.dynamic_update_slice_in_dim(prefilled, first, 0, axis=0)
    return result


def attend_invariantly(
    queries: LatentQueries,
    up: UpProjections,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    options: ScoreOptions,
) -> jax.Array:
    """Implement `attend_to_all` in the absorbed form and with blocks of one size for all rows."""
    page_size, row_size = kv_cache.shape[3:]
    out = absorbed_queries(queries, up, row_size)
    heads = out.shape[1]
    parts = heads // PART_HEADS if heads % PART_HEADS == 0 else 1
    blocks = invariant_blocks(1, heads, row_size, page_size, out.dtype)._replace(parts=parts)
    arguments = (kv_cache, layer, batch, options)
    out = prefill_attention(out, *arguments, slots=latent_slots(up.rank), blocks=blocks)
    return values_of_latents(out, up)


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


def attend_to_gathered(
    q: jax.Array, latents: jax.Array, num_chosen: jax.Array, rank: int, scale: float
) -> jax.Array:
    """Implement `chosen.AttendGathered`: the gathered rows are a cache, each query a row."""
    num_rows, k, row_size = latents.shape
    latents = jnp.pad(latents, ((0, 0), (0, -k % LANES), (0, 0)))
    pages = latents.shape[1] // LANES
    table = jnp.arange(num_rows * pages, dtype=jnp.int32).reshape(num_rows, pages)
    starts = jnp.maximum(num_chosen - 1, 0)
    batch = AttentionBatch.build(
        table, starts, jnp.ones_like(starts), jnp.int32(num_rows), num_rows
    )
    q = jnp.pad(q, ((0, 0), (0, 0), (0, row_size - q.shape[2])))
    cache = latents.reshape(1, num_rows * pages, 1, LANES, row_size)
    options, slots = ScoreOptions(scale), latent_slots(rank)
    blocks = DECODE_BLOCKS
    out = decode_attention(q, cache, jnp.int32(0), batch, options, slots=slots, blocks=blocks)
    return out[..., :rank]


CHOICE = ChoiceKernels(index_scores, positions_of_greatest, attend_to_gathered)

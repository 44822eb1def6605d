"""What an indexer needs in plain XLA: scores of cached keys, the greatest scores, attention."""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.attention.batch import MASKED
from sgl_jax.kernels.attention.cache_dtype import as_float32, product_dtype
from sgl_jax.kernels.attention.key_blocks import BlockTable
from sgl_jax.kernels.latent_attention.latents import latent_row_size
from sgl_jax.kernels.tpu_chip import LANES

SCORED_KEYS = 1024  # of a row, read at once


def xla_index_scores(
    queries: jax.Array,
    weights: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
) -> jax.Array:
    """Implement `chosen.IndexScores`. A TPU's compiler would copy the cache for it."""
    num_rows, num_queries, _, size = queries.shape
    table = BlockTable.of(page_table, kv_cache.shape[3], SCORED_KEYS)
    block_keys = table.pages_per_block * kv_cache.shape[3]
    first = kv_cache.shape[4] - latent_row_size(size, 0)
    rows = jnp.arange(num_rows, dtype=jnp.int32)

    def key_block(i: jax.Array, scores: jax.Array) -> jax.Array:
        pages = table.pages(rows, jnp.broadcast_to(i, rows.shape))
        keys = kv_cache.at[layer, pages, 0, :, first : first + size].get(mode="promise_in_bounds")
        keys = as_float32(keys).reshape(num_rows, -1, size)
        products = jnp.einsum("gnhd,gkd->gnhk", queries.astype(jnp.float32), keys)
        found = jnp.einsum("gnhk,gnh->gnk", jax.nn.relu(products), weights)
        return lax.dynamic_update_slice_in_dim(scores, found, i * block_keys, axis=2)

    num_blocks = -(-jnp.max(kv_lens) // block_keys)
    scores = jnp.zeros((num_rows, num_queries, table.ids.shape[1] * block_keys))
    return lax.fori_loop(0, num_blocks, key_block, scores)


def positions_of_greatest(scores: jax.Array, k: int) -> jax.Array:
    """Return the positions of the k greatest of scores [..., n], int32 [..., k], ascending.

    The first of equal scores count, and NaN is the greatest. -inf is never chosen: -1 fills the
    places after the last. This is a bisection of the bits of the k-th score, instead of a sort.
    """
    scores = jnp.where(jnp.isnan(scores), jnp.inf, jnp.where(scores == 0, 0.0, scores))
    bits = lax.bitcast_convert_type(scores, jnp.uint32)
    top = jnp.uint32(1 << 31)
    ordered = jnp.where(bits >= top, ~bits, bits | top)  # as the scores

    def next_bit(i: jax.Array, least: jax.Array) -> jax.Array:
        raised = least | (top >> i.astype(jnp.uint32))
        are_enough = jnp.sum(ordered >= raised[..., None], axis=-1, dtype=jnp.int32) >= k
        return jnp.where(are_enough, raised, least)

    least = lax.fori_loop(0, 32, next_bit, jnp.zeros(scores.shape[:-1], jnp.uint32))[..., None]
    above = ordered > least
    num_equal = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    equal = ordered == least
    _, before, _ = _ranks(equal)
    is_chosen = (above | (equal & (before < num_equal))) & (scores > -jnp.inf)
    return _positions(is_chosen, k)


def _ranks(mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return, of mask [..., n]: counts up to each place of its block of LANES, int32 [..., blocks,
    LANES]; counts before each place, int32 [..., n]; counts up to each block's end."""
    n = mask.shape[-1]
    blocks = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -n % LANES)])
    blocks = blocks.reshape(*mask.shape[:-1], -1, LANES)
    # A product: a TPU is slow at sums along lanes.
    is_up_to = jnp.triu(jnp.ones((LANES, LANES), jnp.bfloat16))
    counts = jnp.matmul(
        blocks.astype(jnp.bfloat16), is_up_to, preferred_element_type=jnp.float32
    ).astype(jnp.int32)
    ends = jnp.cumsum(counts[..., -1], axis=-1, dtype=jnp.int32)
    before = counts - blocks + (ends - counts[..., -1])[..., None]
    return counts, before.reshape(*mask.shape[:-1], -1)[..., :n], ends


def _positions(mask: jax.Array, k: int) -> jax.Array:
    """Return the places of up to k True in mask [..., n], int32 [..., k], ascending, then -1."""
    counts, _, ends = _ranks(mask)
    numbers = jnp.arange(k, dtype=jnp.int32)
    block = jnp.sum(ends[..., None, :] <= numbers[:, None], axis=-1, dtype=jnp.int32)
    block = jnp.minimum(block, ends.shape[-1] - 1)
    first = jnp.take_along_axis(ends - counts[..., -1], block, axis=-1)
    in_block = jnp.take_along_axis(counts, block[..., None], axis=-2)
    lane = jnp.sum(in_block <= (numbers - first)[..., None], axis=-1, dtype=jnp.int32)
    return jnp.where(numbers < ends[..., -1:], block * LANES + lane, -1)


def attend_to_gathered(
    q: jax.Array, latents: jax.Array, num_chosen: jax.Array, rank: int, scale: float
) -> jax.Array:
    """Implement `chosen.AttendGathered`."""
    dtype = product_dtype(q.dtype, latents.dtype)
    keys = as_float32(latents[..., : q.shape[2]]).astype(dtype)
    scores = jnp.einsum("thd,tkd->thk", q.astype(dtype), keys, preferred_element_type=jnp.float32)
    is_chosen = jnp.arange(keys.shape[1]) < num_chosen[:, None]
    scores = jnp.where(is_chosen[:, None], scores * scale, MASKED)
    shares = jax.nn.softmax(scores, axis=-1).astype(dtype)
    values = keys[..., :rank]
    return jnp.einsum("thk,tkd->thd", shares, values, preferred_element_type=jnp.float32)

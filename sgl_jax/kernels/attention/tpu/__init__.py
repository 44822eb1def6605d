"""Ragged paged attention for TPU: three Pallas kernels, one after the other.

`write` changes the cache in place. `decode` and `prefill` each read the queries of their rows from
one array, replace them by results, and leave the other kernel's queries unchanged, so that no
result is merged or copied. `shared` has their common parts, `tuned` their block sizes for each TPU
generation.

TPU memory consists of rows of 128 lanes, so heads of 64 are packed: see `api`.
"""

import jax
import jax.numpy as jnp

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.cache_dtype import is_packed
from sgl_jax.kernels.attention.tpu.decode import decode_attention
from sgl_jax.kernels.attention.tpu.prefill import prefill_attention
from sgl_jax.kernels.attention.tpu.shared import CacheSlots, Shape
from sgl_jax.kernels.attention.tpu.tuned import invariant_blocks
from sgl_jax.kernels.attention.tpu.write import write_kv


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    options: ScoreOptions,
    *,
    is_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Implement `api.RaggedPagedAttention`; padding tokens' outputs are their queries, or zeros.

    With `is_invariant`, the bits of a token's result depend only on the tokens before it: the
    prefill kernel computes the decode rows, too. Raises ValueError if the page size is not a
    multiple of the cache's tile.
    """
    if k is not None and v is not None:
        kv_cache = write_kv(k, v, kv_cache, layer, batch)
    head_dim = q.shape[2]
    packed = is_packed(kv_cache, head_dim)
    # With zeros in the lanes of V, a packed cache is the same as one of twice the head_dim.
    out = jnp.pad(q, ((0, 0), (0, 0), (0, head_dim))) if packed else q
    arguments, slots = (kv_cache, layer, batch, options), CacheSlots(packed)
    blocks = None
    if is_invariant:
        shape = Shape.of(out, kv_cache, slots)
        blocks = invariant_blocks(*shape[:2], shape.head_dim, shape.page_size, shape.product_dtype)
    else:
        out = decode_attention(out, *arguments, slots=slots)
    out = prefill_attention(out, *arguments, slots=slots, blocks=blocks)
    return out[:, :, head_dim:] if packed else out, kv_cache

"""Ragged paged attention for TPU: three Pallas kernels, one after the other.

They share nothing but arrays. The write changes the cache in place. Decode and prefill each find
their rows' queries in an array and put the results where the queries were, so what one leaves
alone is still the other's input, and no result is merged or copied.

Memory of a TPU comes in rows of 128 lanes, so heads of 64 are packed: see `interface`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from sgl_jax.kernels.ragged_paged_attention.batch import AttentionBatch
from sgl_jax.kernels.ragged_paged_attention.tpu_decode.call import decode_attention
from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.call import prefill_attention
from sgl_jax.kernels.ragged_paged_attention.tpu_write import write_kv


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
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `interface.RaggedPagedAttention`; padding tokens' outputs are their queries, or zeros.

    `interpret` simulates the kernels on a CPU: `pltpu.InterpretParams`.

    Raises:
        ValueError: the page size is not a multiple of the cache's tile.
    """
    kv_cache = write_kv(k, v, kv_cache, layer, batch, interpret=interpret)
    head_dim = q.shape[2]
    packed = kv_cache.shape[4] == 2 * head_dim
    # Queries of zeros where V lies make a packed cache one of twice the head_dim.
    out = jnp.pad(q, ((0, 0), (0, 0), (0, head_dim))) if packed else q
    for attend in (decode_attention, prefill_attention):
        out = attend(
            out,
            kv_cache,
            layer,
            batch,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            packed=packed,
            interpret=interpret,
        )
    return out[:, :, head_dim:] if packed else out, kv_cache

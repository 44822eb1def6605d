"""Ragged paged attention for TPU: three Pallas kernels, one after the other.

They share nothing but arrays. The write changes the cache in place. Decode and prefill each find
their rows' queries in an array and put the results where the queries were, so what one leaves
alone is still the other's input, and no result is merged or copied.
"""

from typing import Any

import jax

from sgl_jax.kernels.ragged_paged_attention.batch import AttentionBatch
from sgl_jax.kernels.ragged_paged_attention.tpu_decode import decode_attention
from sgl_jax.kernels.ragged_paged_attention.tpu_prefill import prefill_attention
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
    """See `interface.RaggedPagedAttention`; the outputs of padding tokens are their queries.

    `interpret` simulates the kernels on a CPU: `pltpu.InterpretParams`.

    Raises:
        ValueError: the page size is not a multiple of the cache's tile.
    """
    kv_cache = write_kv(k, v, kv_cache, layer, batch, interpret=interpret)
    out = q
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
            interpret=interpret,
        )
    return out, kv_cache

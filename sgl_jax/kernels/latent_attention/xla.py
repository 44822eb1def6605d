"""Latent attention in plain XLA: for CPUs, and for any platform without a kernel.

It is always absorbed: the loops of `attention.xla` read one KV head, with the cache's rows as keys
and the latents of the same rows as values. Chosen tokens are attended to by `chosen`.
"""

from typing import NamedTuple

import jax

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.cache_dtype import as_float32
from sgl_jax.kernels.attention.xla import (
    AttendCached,
    attend_cached,
    write_slots,
)
from sgl_jax.kernels.latent_attention.chosen import ChoiceKernels, attend_if_chosen
from sgl_jax.kernels.latent_attention.chosen_xla import (
    attend_to_gathered,
    positions_of_greatest,
    xla_index_scores,
)
from sgl_jax.kernels.latent_attention.latents import (
    IndexQueries,
    LatentQueries,
    ReusedChoice,
    UpProjections,
    absorbed_queries,
    cached_rows,
    values_of_latents,
)

CHOICE = ChoiceKernels(xla_index_scores, positions_of_greatest, attend_to_gathered)


class _Latents(NamedTuple):
    """One layer of latents, as one KV head."""

    kv_cache: jax.Array  # see `interface.PagedLatentAttention`
    layer: jax.Array  # int32 []
    value_dim: int  # the latent's rank

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def page_size(self) -> int:
        return self.kv_cache.shape[3]

    def keys_and_values(self, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        blocks = self.kv_cache.at[self.layer, pages, 0].get(mode="promise_in_bounds")
        rows = as_float32(blocks).reshape(*pages.shape[:-1], 1, -1, blocks.shape[-1])
        return rows, rows[..., : self.value_dim]


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
    attend: AttendCached = attend_cached,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Implement `interface.PagedLatentAttention`."""
    rows = cached_rows(latents, index, kv_cache.shape[4], kv_cache.dtype)
    kv_cache = write_slots(rows[:, None], kv_cache, layer, batch)

    def dense() -> jax.Array:
        q = absorbed_queries(queries, up, kv_cache.shape[4])
        found = attend(q, _Latents(kv_cache, layer, up.rank), batch, ScoreOptions(scale))
        return values_of_latents(found, up)

    shared = kv_cache, layer, batch, scale, index
    out, chosen = attend_if_chosen(dense, queries, up, *shared, CHOICE)
    return out, kv_cache, chosen

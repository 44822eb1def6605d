"""The latent attention call of the models.

The cache holds one row a token for all heads (multi-head latent attention, arXiv 2405.04434): a
compressed latent, and a part of the key that carries the position. Keys and values of a head are
products of the latent with the head's matrices. So there are two forms of the same sums:

    absorbed    queries times the key matrix are compared with latents; the sum of latents times
                the value matrix is the result. A token of context costs 2 * rank + rope_dim
                products per head and query.
    expanded    keys and values are computed from latents first. A token of context costs
                nope_dim + rope_dim + value_dim products per head and query, and once
                rank * (nope_dim + value_dim) per head.

With an indexer, a query attends to a few tokens that it chooses by their keys, which are stored in
the same rows (`chosen`).

The absorbed form is cheaper for decode, the expanded form for a long chunk; an implementation
chooses. Every implementation has the signature of `PagedLatentAttention` and is tested against
`tests/kernels/latent_attention/reference.py`.
"""

from typing import Protocol

import jax

from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.kernels.latent_attention.latents import (
    IndexQueries,
    LatentQueries,
    ReusedChoice,
    UpProjections,
)


class PagedLatentAttention(Protocol):
    """Write this step's latents into the cache, then attend causally over each row's latents."""

    def __call__(
        self,
        queries: LatentQueries,
        latents: jax.Array,
        up: UpProjections,
        kv_cache: jax.Array,
        layer: jax.Array,
        batch: AttentionBatch,
        scale: float,
        index: IndexQueries | ReusedChoice | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Attend with the shapes of one chip of one data-parallel rank.

        Args:
            queries: the queries of T tokens.
            latents: [T, rank + rope_dim] for the same tokens, rounded to the cache's dtype before
                use. Padding tokens are written to the null page, which is never read.
            up: the current layer's matrices.
            kv_cache: [layers, pages, 1, page_size, row_size], see `latent_row_size`; zeros after
                each latent. An int8 array is a cache of 8-bit floats. Updated in place when the
                caller donates it or carries it through a loop.
            layer: int32 [], the layer's index in the cache.
            batch: rows and pages.
            scale: factor for the products of queries and keys.
            index: if given, its keys are written, too, and a query attends only to the `top_k`
                tokens with the highest scores; the first of equal scores count. Or the choice of an
                earlier layer.

        Returns:
            out: [T, heads, value_dim] in the queries' dtype; finite but unspecified for padding.
            kv_cache: with the new latents.
            chosen: int32 [T, top_k], the tokens attended to, if later layers reuse the choice
                (`IndexQueries.is_reused`) and rows may have more than `top_k` tokens; else None.
        """
        ...

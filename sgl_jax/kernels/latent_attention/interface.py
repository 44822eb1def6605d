"""The latent attention call that models make, and the one place that chooses its implementation.

The cache holds one row a token for all heads (multi-head latent attention, arXiv 2405.04434): a
compressed latent, and a part of the key that carries the position. Keys and values of a head are
products of the latent with the head's matrices. So there are two forms of the same sums:

    absorbed    queries times the key matrix are compared with latents; the sum of latents times
                the value matrix is the result. A token of context costs 2 * rank + rope_dim
                products a head and query, and nothing else.
    expanded    keys and values are made from latents first. A token of context costs
                nope_dim + rope_dim + value_dim products a head and query, and once
                rank * (nope_dim + value_dim) a head.

Decode is shorter absorbed, a long chunk expanded; an implementation chooses. Every implementation
has the signature of `PagedLatentAttention` and is judged by
`tests/kernels/latent_attention/reference.py`.
"""

from typing import Protocol

import jax

from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.kernels.latent_attention import xla
from sgl_jax.kernels.latent_attention.latents import LatentQueries, UpProjections

LATENT_ATTENTION_BACKENDS = ("pallas", "xla")


class PagedLatentAttention(Protocol):
    """Write this step's latents into the cache, then attend causally over each row's."""

    def __call__(
        self,
        queries: LatentQueries,
        latents: jax.Array,
        up: UpProjections,
        kv_cache: jax.Array,
        layer: jax.Array,
        batch: AttentionBatch,
        scale: float,
    ) -> tuple[jax.Array, jax.Array]:
        """Attend with the shapes of one chip of one data-parallel rank.

        Args:
            queries: of T tokens.
            latents: [T, rank + rope_dim] of the same tokens, attended to as the cache holds them.
                Padding tokens are written to the null page, whose content is never read.
            up: of the layer that runs.
            kv_cache: [layers, pages, 1, page_size, row_size], see `latent_row_size`; zeros after
                each latent. An int8 array is a cache of 8-bit floats. Updated in place when the
                caller donates it or carries it through a loop.
            layer: int32 [] which layer of the cache.
            batch: rows and pages.
            scale: multiplies the products of queries and keys.

        Returns:
            out: [T, heads, value_dim] in the queries' dtype; finite but unspecified for padding.
            kv_cache: with the new latents.
        """
        ...


def latent_attention_implementation(
    backend: str, *, simulate: bool = False
) -> PagedLatentAttention:
    """The implementation called "xla" or "pallas", the TPU's kernels.

    With `simulate`, a CPU interprets the latter with its DMAs and semaphores, slowly. They read the
    pages that `attention.api.check_pages` allows.

    Raises:
        ValueError: the backend is unknown.
    """
    if backend not in LATENT_ATTENTION_BACKENDS:
        known = ", ".join(LATENT_ATTENTION_BACKENDS)
        raise ValueError(f"latent attention has the backends {known}, got {backend!r}")
    if backend == "xla":
        return xla.latent_attention
    # Here and not above: without the Pallas kernels, a process does not wait for their import.
    from sgl_jax.kernels.latent_attention import tpu
    from sgl_jax.kernels.pallas_tpu import simulated

    attend = tpu.latent_attention
    return simulated(attend) if simulate else attend

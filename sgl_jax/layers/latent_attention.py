"""Self-attention to latents: one row a token for all heads (arXiv 2405.04434).

Heads are split over the tensor axis. A latent is not: each chip of a rank computes and stores the
rows of all the rank's tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from sgl_jax.core.layer_configs import LatentConfig
from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.kernels.latent_attention.interface import PagedLatentAttention
from sgl_jax.kernels.latent_attention.latents import (
    IndexQueries,
    LatentQueries,
    ReusedChoice,
    UpProjections,
)
from sgl_jax.layers.indexer import Indexer
from sgl_jax.layers.layer_weights import use_weights
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.mesh_axes import TENSOR_AXIS
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.rotary import Rotation, rotate, scale_queries
from sgl_jax.layers.sources import Source


class LatentMemory(NamedTuple):
    """What the layers of a model remember if some of them reuse the choice of an indexer."""

    kv_pool: jax.Array
    chosen: jax.Array  # int32 [T, top_k], of the last indexer in this step


class LatentAttention(nnx.Module):
    """Rotary attention with keys and values computed from a compressed latent of each token.

    One product compresses a token's hidden state to the latent of its queries, if they have one,
    the latent to cache, and the rotated part of its key.
    """

    def __init__(
        self,
        sizes: LatentConfig,
        down: Linear,
        queries: Linear,
        up: tuple[Source, Source],
        output: Linear,
        *,
        dtype: DTypeLike,
        query_norm: RMSNorm | None,
        latent_norm: RMSNorm,
        scale: float,
        attend: PagedLatentAttention,
        indexer: Indexer | None = None,
    ) -> None:
        """Declare the layer.

        `down` compresses hidden states; unused outputs may follow. `queries` computes each head's
        query, first the part without a position, from the queries' latent after `query_norm`, or
        from the hidden state; it is split by its outputs. `up` are the sources of `UpProjections`.
        `output` is split by its inputs. Rotated parts are in the order of `rotate`. `indexer`
        chooses the tokens that a query attends to. Without it these are all before the query, or
        those of an earlier layer if `sizes` has an indexer.
        """
        self.sizes = sizes
        self.down = down
        self.queries = queries
        self.key_up, self.value_up = (parameter(own, dtype, TENSOR_AXIS) for own in up)
        self.output = output
        self.query_norm = query_norm
        self.latent_norm = latent_norm
        self.scale = scale
        self.attend = attend
        self.indexer = indexer

    def __call__(
        self,
        x: jax.Array,
        by: Rotation,
        batch: AttentionBatch,
        memory: jax.Array | LatentMemory,
        layer: jax.Array,
    ) -> tuple[jax.Array, jax.Array | LatentMemory]:
        """Map x [T, hidden] to (result [T, hidden], the memory with this layer's new latents).

        The memory is a KV pool, or a `LatentMemory`.
        """
        sizes, down = self.sizes, self.down(x)
        query_rank = sizes.query_rank or 0
        starts = (query_rank, query_rank + sizes.rank, query_rank + sizes.width)
        query_latent, latent, key, _ = jnp.split(down, starts, axis=1)
        inputs = x if self.query_norm is None else self.query_norm(query_latent)
        queries = self.queries(inputs)
        by_head = queries.reshape(len(x), -1, sizes.query_dim)
        nope, rope = jnp.split(by_head, [sizes.nope_dim], axis=2)
        rotated_key = rotate(key[:, None], by)[:, 0]
        latents = jnp.concatenate([self.latent_norm(latent), rotated_key], axis=1)
        kv_pool, remembered = memory if isinstance(memory, LatentMemory) else (memory, None)
        index: IndexQueries | ReusedChoice | None = None
        if self.indexer is not None:
            index = self.indexer(x, inputs, by)._replace(is_reused=remembered is not None)
        elif sizes.indexer is not None:
            assert remembered is not None
            index = ReusedChoice(remembered, TENSOR_AXIS)
        out, kv_pool, chosen = self.attend(
            LatentQueries(scale_queries(nope, by), scale_queries(rotate(rope, by), by)),
            latents,
            use_weights((self.key_up, self.value_up), UpProjections),
            kv_pool,
            layer,
            batch,
            self.scale,
            index,
        )
        result = self.output(out.reshape(len(x), -1))
        if remembered is None:
            return result, kv_pool
        return result, LatentMemory(kv_pool, remembered if chosen is None else chosen)

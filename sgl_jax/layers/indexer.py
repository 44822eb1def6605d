"""The queries, weights and keys that choose the tokens that a query attends to (arXiv 2512.02556).

All chips of a rank compute the same numbers, and in decode choose for a share of the rows.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from sgl_jax.core.layer_configs import IndexerConfig
from sgl_jax.kernels.latent_attention.latents import IndexQueries
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.mesh_axes import TENSOR_AXIS
from sgl_jax.layers.norm import LayerNorm
from sgl_jax.layers.rotary import Rotation, rotate


class Indexer(nnx.Module):
    """A key for each token, and for each query several heads with a weight."""

    def __init__(
        self,
        sizes: IndexerConfig,
        rope_dim: int,
        *,
        queries: Linear,
        key: Linear,
        key_norm: LayerNorm,
        weights: Linear,
    ) -> None:
        """Declare the layer. `queries` maps the queries' latent; `key` and `weights` map the hidden
        state.

        The first `rope_dim` outputs of a query and of a key are rotated, in the order of `rotate`.
        """
        self.sizes = sizes
        self.rope_dim = rope_dim
        self.queries = queries
        self.key = key
        self.key_norm = key_norm
        self.weights = weights

    def __call__(self, x: jax.Array, query_latent: jax.Array, by: Rotation) -> IndexQueries:
        """Map x [T, hidden] and the queries' latents [T, query_rank] to what chooses tokens."""
        own = self.sizes
        queries = self.queries(query_latent).reshape(len(x), own.num_heads, own.head_dim)
        keys = self.key_norm(self.key(x))[:, None]
        scale = (own.num_heads * own.head_dim) ** -0.5
        weights = self.weights(x)[:, : own.num_heads].astype(jnp.float32) * scale
        rotated = self._rotated(queries, by), self._rotated(keys, by)[:, 0]
        return IndexQueries(rotated[0], weights, rotated[1], own.top_k, TENSOR_AXIS)

    def _rotated(self, x: jax.Array, by: Rotation) -> jax.Array:
        first, rest = jnp.split(x, [self.rope_dim], axis=2)
        return jnp.concatenate([rotate(first, by), rest], axis=2)

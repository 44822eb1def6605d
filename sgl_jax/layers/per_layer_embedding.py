"""Embeddings by layer: a vector of each token for every layer, which gates the layer's result.

The vectors of all layers are one row of a table, so a step reads only the rows of its tokens.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from sgl_jax.layers.embedding import Embedding
from sgl_jax.layers.linear import Activation, Linear
from sgl_jax.layers.mesh_axes import scatter_sum
from sgl_jax.layers.norm import RMSNorm


class PerLayerEmbedding(nnx.Module):
    """The vectors of each layer: the token's row, and a projection of its usual embedding."""

    def __init__(
        self, table: Embedding, projection: Linear, norm: RMSNorm, *, scatters: bool
    ) -> None:
        """Declare `table` with rows of all layers' vectors, and `projection` [hidden, row].

        `norm` normalises one layer's projected vector. With `scatters`, hidden states are this
        chip's share of the tokens.
        """
        self.table = table
        self.projection = projection
        self.norm = norm
        self.scatters = scatters

    def __call__(self, token_ids: jax.Array, hidden: jax.Array) -> jax.Array:
        """Return vectors [layers, tokens, size] of token_ids, int32 [T].

        `hidden` [tokens, hidden] are their embeddings; both are this chip's share if it `scatters`.
        """
        (size,) = self.norm.weight.shape
        if self.scatters:
            rows = scatter_sum(self.table.own_part(token_ids))
        else:
            rows = self.table(token_ids)
        rows = rows * jnp.asarray(size**0.5, rows.dtype)
        projected = self.projection(hidden) * hidden.shape[1] ** -0.5
        by_layer = (hidden.shape[0], -1, size)
        both = self.norm(projected.reshape(by_layer)) + rows.reshape(by_layer)
        vectors: jax.Array = jnp.moveaxis(both * 2**-0.5, 1, 0)
        return vectors


class PerLayerGate(nnx.Module):
    """norm(projection(activation(gate(x)) * vector)), a layer's last term."""

    def __init__(
        self, gate: Linear, projection: Linear, norm: RMSNorm, activation: Activation
    ) -> None:
        """Declare `gate` [hidden, size] and `projection` [size, hidden], which all chips have.

        Their products are small: exchanging parts of them would take longer.
        """
        self.gate = gate
        self.projection = projection
        self.norm = norm
        self.activation = activation

    def __call__(self, x: jax.Array, vectors: jax.Array) -> jax.Array:
        """Map x [tokens, hidden] and the layer's vectors [tokens, size] to [tokens, hidden]."""
        return self.norm(self.projection(self.activation(self.gate(x)) * vectors))

"""A model's own draft layer (multi-token prediction, MTP): one decoder layer that guesses the token
after the next one.

At position t it joins two vectors: the hidden state at t (the model's, or the layer's own at the
position before a guess), and the embedding of the token at t + 1. Its result at t gives the logits
of the token at t + 2, by the model's head. Its KV is one more layer of the model's cache, at the
same slots (DeepSeek-V3, arXiv 2412.19437, section 2.2).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sgl_jax.layers.layer_weights import gather_over_data, weights_of_layer
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, concatenate_over
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.models.decoder_layer import DecoderLayer


class DraftLayer(nnx.Module):
    """Two norms, a product that joins their results, a decoder layer, and a norm."""

    def __init__(
        self,
        embedding_norm: RMSNorm,
        hidden_norm: RMSNorm,
        join: Linear,
        layer: DecoderLayer,
        norm: RMSNorm,
    ) -> None:
        """`join` is [2 * hidden, hidden], the embedding's rows first, split by its outputs; the
        parameters of `layer` are stacked on axis 0, as the only one of its kind."""
        self.embedding_norm = embedding_norm
        self.hidden_norm = hidden_norm
        self.join = join
        self.layer = layer
        self.norm = norm

    def __call__(
        self,
        vectors: jax.Array,
        hidden: jax.Array,
        is_token: jax.Array,
        reads: tuple[Any, ...],
        kv_pool: jax.Array,
        number: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """The layer over T positions.

        Args:
            vectors: [T, hidden_size] embeddings of the tokens after them.
            hidden: [T, hidden_size] hidden states at them, after the model's last norm or this
                layer's.
            is_token, reads: as `DecoderLayer` has them.
            kv_pool: with K and V of the positions before.
            number: int32 [] of this layer among the layers of the pool.

        Returns:
            [T, hidden_size], ready for the head and to be `hidden` one position on; the pool.
        """
        both = self.embedding_norm(vectors), self.hidden_norm(hidden)
        joined = self.join(jnp.concatenate(both, axis=-1))
        joined = concatenate_over(TENSOR_AXIS, joined, axis=1)
        graphdef, weights = nnx.split(self.layer)
        layer: DecoderLayer = nnx.merge(graphdef, weights_of_layer(weights, jnp.int32(0)))
        gather_over_data(layer)
        out, added, kv_pool, _ = layer(joined, is_token, None, reads, kv_pool, number)
        return self.norm(out + added), kv_pool

"""A decoder-only language model: embedding, a stack of equal layers, a head.

Written as one chip sees it, inside one `jax.shard_map` over ('data', 'tensor'): shapes are local
and collectives are explicit. Layers are stacked on axis 0 of every per-layer parameter and run by
one `lax.scan`, so compile time does not grow with depth; the KV cache is carried through it and
updated in place.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.kernels.ragged_paged_attention.interface import AttentionBatch
from sgl_jax.layers.attention import Attention
from sgl_jax.layers.embedding import Embedding, LMHead
from sgl_jax.layers.layer_weights import gather_over_data, weights_of_layer
from sgl_jax.layers.mlp import GatedMLP
from sgl_jax.layers.moe import MixtureOfExperts
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import stack_layers
from sgl_jax.layers.rotary import RopeScaling, Rotation, inverse_frequencies, rotation
from sgl_jax.layers.sampling import SplitLogits
from sgl_jax.models.config import ModelConfig, RopeConfig


class DecoderLayer(nnx.Module):
    """Attention, then a feed-forward layer, each normalised before and added to its input."""

    def __init__(
        self,
        config: ModelConfig,
        attention: Attention,
        mlp: GatedMLP | MixtureOfExperts,
        dtype: DTypeLike,
    ) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = attention
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = mlp

    def __call__(
        self,
        hidden: jax.Array,
        by: Rotation,
        batch: AttentionBatch,
        kv_cache: jax.Array,
        layer: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """hidden [T, hidden_size] -> (the same after this layer, kv_cache)."""
        attended, kv_cache = self.attention(self.input_norm(hidden), by, batch, kv_cache, layer)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_norm(hidden)), kv_cache


class CausalLM(nnx.Module):
    """The whole model. Its per-layer parameters, in `layers`, are stacked on axis 0."""

    def __init__(
        self,
        config: ModelConfig,
        layer: DecoderLayer,
        *,
        dtype: DTypeLike,
        tp_size: int,
        data_shards: int,
    ) -> None:
        """Stack `layer`, the declaration of one layer.

        `data_shards` is the number of parts its weights are split into over the data axis: 1
        when each rank holds them all.
        """
        stack_layers(layer, config.num_layers, data_shards)
        sizes = (config.vocab_size, config.hidden_size, tp_size, dtype)
        self.config = config
        self.embedding = Embedding(*sizes)
        self.layers = layer
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = None if config.tie_word_embeddings else LMHead(*sizes)

    def __call__(
        self, token_ids: jax.Array, batch: AttentionBatch, kv_cache: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Run one step's tokens.

        Args:
            token_ids: int32 [T], as `batch` lays them out.
            batch: rows and pages of this rank.
            kv_cache: as in `RaggedPagedAttention`, this chip's part.

        Returns:
            hidden [T, hidden_size], normalised and ready for `logits`; the updated kv_cache.
        """
        by = rotation(batch.positions, _frequencies(self.config.head_dim, self.config.rope))
        graphdef, weights = nnx.split(self.layers)

        def run_layer(
            carry: tuple[jax.Array, jax.Array], index: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            layer: DecoderLayer = nnx.merge(graphdef, weights_of_layer(weights, index))
            gather_over_data(layer)
            hidden, kv_cache = carry
            return layer(hidden, by, batch, kv_cache, index), None

        carry = (self.embedding(token_ids), kv_cache)
        layer_indices = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        (hidden, kv_cache), _ = lax.scan(run_layer, carry, layer_indices)
        return self.norm(hidden), kv_cache

    def logits(self, hidden: jax.Array) -> SplitLogits:
        """Of hidden [n, hidden_size], this chip's slice of the vocabulary."""
        head = self.embedding if self.lm_head is None else self.lm_head
        return head.logits(hidden)


def _frequencies(head_dim: int, rope: RopeConfig) -> Any:
    if rope.kind == "linear":
        return inverse_frequencies(head_dim, rope.theta, linear_factor=rope.factor)
    if rope.kind == "llama3":
        scaling = RopeScaling(
            rope.factor,
            rope.low_freq_factor,
            rope.high_freq_factor,
            rope.original_max_position_embeddings,
        )
        return inverse_frequencies(head_dim, rope.theta, llama3=scaling)
    return inverse_frequencies(head_dim, rope.theta)

"""A model's draft layer (multi-token prediction, MTP; DeepSeek-V3, arXiv 2412.19437, section 2.2).

One decoder layer guesses the token after the next token. It uses the model's embedding and head.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sgl_jax.layers.layer_weights import gather_over_data, weights_of_layer
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, concatenate_over
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import stack_layers
from sgl_jax.layers.sampling.split_logits import SplitLogits
from sgl_jax.layers.sources import Tensor
from sgl_jax.models.architecture import Architecture, BuildOptions
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import require_divisible


class DraftLayer(nnx.Module):
    """Two norms, a product that joins their results, a decoder layer, and a norm."""

    captured: Sequence[int] = ()

    def __init__(
        self,
        embedding_norm: RMSNorm,
        hidden_norm: RMSNorm,
        join: Linear,
        layer: DecoderLayer,
        norm: RMSNorm,
    ) -> None:
        """Declare `join` [2 * hidden, hidden], the embedding's rows first, split by its outputs.

        The parameters of `layer` have an axis 0 of size 1.
        """
        self.embedding_norm = embedding_norm
        self.hidden_norm = hidden_norm
        self.join = join
        self.layer = layer
        self.norm = norm

    def first_hidden(self, hidden: jax.Array, _captured: Sequence[jax.Array]) -> jax.Array:
        return hidden

    def __call__(
        self,
        vectors: jax.Array,
        hidden: jax.Array,
        is_token: jax.Array,
        reads: tuple[Any, ...],
        kv_pool: jax.Array,
        number: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        both = self.embedding_norm(vectors), self.hidden_norm(hidden)
        joined = self.join(jnp.concatenate(both, axis=-1))
        joined = concatenate_over(TENSOR_AXIS, joined, axis=1)
        layer = the_only_layer(self.layer)
        out, added, kv_pool, _ = layer(joined, is_token, None, reads, kv_pool, number)
        return self.norm(out + added), kv_pool

    def logits(self, hidden: jax.Array, head: Callable[[jax.Array], SplitLogits]) -> SplitLogits:
        return head(hidden)


def the_only_layer(stacked: DecoderLayer) -> DecoderLayer:
    """Return this chip's layer from parameters with an axis 0 of size 1."""
    graphdef, weights = nnx.split(stacked)
    layer: DecoderLayer = nnx.merge(graphdef, weights_of_layer(weights, jnp.int32(0)))
    gather_over_data(layer)
    return layer


def declare_draft_layer(
    config: ModelConfig, architecture: Architecture, options: BuildOptions
) -> DraftLayer:
    """Declare the draft layer of `config`. Raise ValueError if chips cannot share it."""
    names, hidden = config.draft_names, config.hidden_size
    assert config.draft_layer is not None
    assert names is not None
    require_divisible("hidden_size", hidden, options.tp_size)
    layer = architecture.build_layer(config, config.draft_layer, draft_options(options))
    stack_draft_layer(layer, config.num_layers, options, names.layer)

    def norm(name: str) -> RMSNorm:
        weight = Tensor(f"{name}.weight", (hidden,))
        from_one = architecture.norms_from_one
        return RMSNorm(weight, config.rms_norm_eps, options.dtype, from_one=from_one)

    join = Tensor(f"{names.join}.weight", (2 * hidden, hidden), transposed=True)
    return DraftLayer(
        norm(names.embedding_norm),
        norm(names.hidden_norm),
        Linear(join, options.dtype, "outputs"),
        layer,
        norm(names.norm),
    )


def draft_options(options: BuildOptions) -> BuildOptions:
    """Return options without placement and KV scales: their files do not cover the draft layer.

    Its hidden states are replicated.
    """
    return options._replace(placement=None, has_kv_scales=False, sequence_parallel=False)


def stack_draft_layer(layer: DecoderLayer, number: int, options: BuildOptions, prefix: str) -> None:
    """Declare `layer`, in place, with an axis 0 of size 1, for `the_only_layer`."""
    stack_layers(layer, (number,), options.dp_size if options.shards_weights else 1, prefix)

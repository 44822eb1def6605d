"""EAGLE-3 (arXiv 2503.01840): a decoder layer of a checkpoint of its own that drafts for a model.

It starts from the hidden states before three of the model's layers, and its head has the most
frequent tokens of the model's vocabulary alone. The model embeds tokens for it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sgl_jax.layers.embedding import LMHead, padded_vocab_size
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, concatenate_over
from sgl_jax.layers.mlp import GatedMLP
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.sampling.split_logits import SplitLogits
from sgl_jax.layers.sources import Padded, Tensor
from sgl_jax.models.config import Eagle3Head, ModelConfig
from sgl_jax.models.decoder import BuildOptions
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.draft_layer import draft_options, stack_draft_layer, the_only_layer
from sgl_jax.models.llama import llama_layer, norm

_LAYER = "midlayer."
# Tensors of a head's checkpoint that no parameter needs: the inverse of d2t, and a copy of the
# model's embedding.
SPARE_TENSORS = ("t2d", "embed_tokens.weight")


class Eagle3Layer(nnx.Module):
    """A product that joins hidden states of the model, a decoder layer whose attention also reads
    the next token's embedding, and a head."""

    def __init__(
        self,
        head: Eagle3Head,
        join: Linear,
        hidden_norm: RMSNorm,
        layer: DecoderLayer,
        norm: RMSNorm,
        lm_head: LMHead,
    ) -> None:
        """`join` is [len(head.captured) * hidden, hidden], split by its outputs; the parameters of
        `layer` are stacked on axis 0, as the only one of its kind. Its first norm is for the
        embedding, and its attention has an input of both."""
        self.captured = head.captured
        self.model_vocab_size = head.config.vocab_size
        self.join = join
        self.hidden_norm = hidden_norm
        self.layer = layer
        self.norm = norm
        self.lm_head = lm_head
        # The tokens of the head's columns, each less the number of its column: int32 [columns].
        size, offsets = head.draft_vocab_size, Tensor("d2t", (head.draft_vocab_size,))
        has_some = size < head.config.vocab_size
        self.offsets = parameter(offsets, jnp.int32, initial="zeros") if has_some else None

    def first_hidden(self, _hidden: jax.Array, captured: Sequence[jax.Array]) -> jax.Array:
        joined = self.join(jnp.concatenate(captured, axis=-1))
        return concatenate_over(TENSOR_AXIS, joined, axis=1)

    def __call__(
        self,
        vectors: jax.Array,
        hidden: jax.Array,
        is_token: jax.Array,
        reads: tuple[Any, ...],
        kv_pool: jax.Array,
        number: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        layer = the_only_layer(self.layer)
        assert isinstance(layer.mlp, GatedMLP)
        attend: Any = layer.attention
        both = layer.input_norm(vectors), self.hidden_norm(hidden)
        attended, kv_pool = attend(jnp.concatenate(both, axis=-1), *reads, kv_pool, number)
        hidden += attended
        return hidden + layer.mlp(layer.post_attention_norm(hidden)), kv_pool

    def logits(self, hidden: jax.Array) -> SplitLogits:
        own = self.lm_head.logits(self.norm(hidden))
        if self.offsets is None:
            return own
        token_ids = jnp.arange(own.vocab_size, dtype=jnp.int32) + self.offsets[...]
        return own._replace(token_ids=token_ids, num_tokens=self.model_vocab_size)


def declare_eagle3_layer(
    served: ModelConfig, head: Eagle3Head, options: BuildOptions
) -> Eagle3Layer:
    """The head for a model. Raises ValueError if `tp_size` chips cannot share it."""
    config, hidden, dtype = head.config, head.config.hidden_size, options.dtype
    if hidden % options.tp_size:
        raise ValueError(f"tp_size ({options.tp_size}) must divide hidden_size ({hidden})")
    layer = llama_layer(
        *(config, config.layers[0], draft_options(options)), attention_inputs=2 * hidden
    )
    stack_draft_layer(layer, served.num_layers, options, _LAYER)
    columns = padded_vocab_size(head.draft_vocab_size, options.tp_size)
    lm_head = Tensor("lm_head.weight", (hidden, head.draft_vocab_size), transposed=True)
    join = Tensor("fc.weight", (len(head.captured) * hidden, hidden), transposed=True)
    return Eagle3Layer(
        head,
        Linear(join, dtype, "outputs"),
        norm(f"{_LAYER}hidden_norm", hidden, config, options),
        layer,
        norm("norm", hidden, config, options),
        LMHead(Padded(lm_head, columns, axis=1), head.draft_vocab_size, dtype),
    )

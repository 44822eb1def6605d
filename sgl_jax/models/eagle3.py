"""EAGLE-3 (arXiv 2503.01840): a decoder layer from a separate checkpoint that drafts for a model.

It starts from the hidden states before three of the model's layers, and its head only has the most
frequent tokens of the model's vocabulary. The model embeds tokens for it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sgl_jax.layers.embedding import LMHead, padded_vocab_size
from sgl_jax.layers.linear import GatedMLP, Linear
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, concatenate_over
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.sampling.split_logits import SplitLogits
from sgl_jax.layers.sources import Padded, Tensor
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import Eagle3Head, ModelConfig
from sgl_jax.models.decoder_layer import DecoderLayer, normalised
from sgl_jax.models.draft_layer import draft_options, stack_draft_layer, the_only_layer
from sgl_jax.models.llama import llama_layer, norm, require_divisible

_LAYER = "midlayer."
# Tensors that a checkpoint may hold although no parameter needs them: the drafted tokens, and a
# copy of the model's embedding.
SPARE_TENSORS = frozenset(
    {"d2t", "t2d", "embed_tokens.weight", f"{_LAYER}self_attn.rotary_emb.inv_freq"}
)


class Eagle3Layer(nnx.Module):
    """A join of the model's hidden states, a layer that also attends to embeddings, and a head."""

    def __init__(
        self,
        head: Eagle3Head,
        join: Linear,
        hidden_norm: RMSNorm,
        layer: DecoderLayer,
        norm: RMSNorm,
        lm_head: LMHead | None,
    ) -> None:
        """Declare the layer.

        `join` is [len(head.captured) * hidden, hidden], split by its outputs. The parameters of
        `layer` have an axis 0 of size 1; its first norm is for the embedding, and its attention
        reads the embedding and the hidden state. If `lm_head` is None, the model's head is used.
        """
        self.captured = head.captured
        self.model_vocab_size = head.config.vocab_size
        self.join = join
        self.hidden_norm = hidden_norm
        self.layer = layer
        self.norm = norm
        self.lm_head = lm_head
        # The token of each of the head's columns minus the column's index: int32 [columns].
        size = head.draft_vocab_size
        has_some = size is not None and size < head.config.vocab_size
        offsets = Tensor("d2t", (size or 0,))
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
        both = normalised(vectors, layer.input_norm), self.hidden_norm(hidden)
        attended, kv_pool = attend(jnp.concatenate(both, axis=-1), *reads, kv_pool, number)
        hidden += attended
        return hidden + layer.mlp(normalised(hidden, layer.post_attention_norm)), kv_pool

    def logits(self, hidden: jax.Array, head: Callable[[jax.Array], SplitLogits]) -> SplitLogits:
        own = (head if self.lm_head is None else self.lm_head.logits)(self.norm(hidden))
        if self.offsets is None:
            return own
        token_ids = jnp.arange(own.vocab_size, dtype=jnp.int32) + self.offsets[...]
        return own._replace(token_ids=token_ids, num_tokens=self.model_vocab_size)


def declare_eagle3_layer(
    served: ModelConfig, head: Eagle3Head, options: BuildOptions
) -> Eagle3Layer:
    """Declare the head for a model. Raise ValueError if `tp_size` chips cannot share it."""
    config, hidden, dtype = head.config, head.config.hidden_size, options.dtype
    require_divisible("hidden_size", hidden, options.tp_size)
    layer = llama_layer(
        *(config, config.layers[0], draft_options(options)), attention_inputs=2 * hidden
    )
    stack_draft_layer(layer, served.num_layers, options, _LAYER)
    join = Tensor("fc.weight", (len(head.captured) * hidden, hidden), transposed=True)
    return Eagle3Layer(
        head,
        Linear(join, dtype, "outputs"),
        norm(f"{_LAYER}hidden_norm", hidden, config, options),
        layer,
        norm("norm", hidden, config, options),
        _lm_head(head, options),
    )


def _lm_head(head: Eagle3Head, options: BuildOptions) -> LMHead | None:
    size = head.draft_vocab_size
    if size is None:
        return None
    weight = Tensor("lm_head.weight", (head.config.hidden_size, size), transposed=True)
    columns = padded_vocab_size(size, options.tp_size)
    return LMHead(Padded(weight, columns, axis=1), size, options.dtype)

"""Gemma 3 and Gemma 4: four norms a layer, most layers with a window.

The config has the windows, the rotations, the scale of scores and the activation. In Gemma 4 it
also has the sizes of heads, which differ between layers, and the layers that read an earlier
layer's cache (`gemma4_config`). The smaller models of Gemma 4 have embeddings by layer, one of the
larger ones has experts next to its dense feed-forward layers.
"""

from functools import partial

from sgl_jax.layers.embedding import Embedding, padded_vocab_size
from sgl_jax.layers.linear import ACTIVATIONS, GatedMLP, Linear
from sgl_jax.layers.moe import MLPWithExperts
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.per_layer_embedding import PerLayerEmbedding, PerLayerGate
from sgl_jax.layers.sources import Padded, Tensor
from sgl_jax.models.architecture import Architecture, BuildOptions
from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.gemma4_tower import Gemma4Tower
from sgl_jax.models.gemma_tower import Gemma3Tower
from sgl_jax.models.llama import attention, gated_mlp, norm
from sgl_jax.models.projections import linear
from sgl_jax.models.qwen3 import ExpertNames, mixture_of_experts

_EXPERTS = ExpertNames(block="", router="router.proj")
# Of layers that read another layer's cache; some checkpoints have them.
_UNUSED = tuple(f"self_attn.{name}." for name in ("k_proj", "v_proj", "k_norm", "v_norm"))


def gemma3_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer. Raise ValueError if `tp_size` chips cannot split heads or widths."""
    own_norm = partial(norm, size=config.hidden_size, config=config, options=options, from_one=True)
    return DecoderLayer(
        own_norm("input_layernorm"),
        attention(config, spec, options, qk_norm="each_head", norms_from_one=True),
        own_norm("pre_feedforward_layernorm"),
        gated_mlp(config, spec, options),
        attended_norm=own_norm("post_attention_layernorm"),
        mlp_output_norm=own_norm("post_feedforward_layernorm"),
    )


def gemma4_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer. Raise ValueError if `tp_size` chips cannot split heads or widths."""
    own = config.of_layer(spec)
    own_norm = partial(norm, size=own.hidden_size, config=own, options=options)
    mlp = gated_mlp(own, spec, options)
    return DecoderLayer(
        own_norm("input_layernorm"),
        attention(own, spec, options, qk_norm="each_head", normalises_values=True),
        own_norm("pre_feedforward_layernorm"),
        mlp if spec.moe is None else _with_experts(mlp, own, spec, options),
        attended_norm=own_norm("post_attention_layernorm"),
        mlp_output_norm=own_norm("post_feedforward_layernorm"),
        per_layer_gate=_per_layer_gate(own, spec, options),
        scale=parameter(Tensor("layer_scalar", (1,)), options.dtype, initial="ones"),
    )


def _with_experts(
    mlp: GatedMLP, config: ModelConfig, spec: LayerSpec, options: BuildOptions
) -> MLPWithExperts:
    assert spec.moe is not None
    own_norm = partial(norm, size=config.hidden_size, config=config, options=options)
    experts = mixture_of_experts(
        *(config, spec, spec.moe, options, _EXPERTS),
        input_norm=own_norm("pre_feedforward_layernorm_2"),
        router_scale=config.hidden_size**-0.5,
        expert_scales=Tensor("router.per_expert_scale", (spec.moe.num_experts,)),
    )
    factors = Tensor("router.scale", (config.hidden_size,))
    return MLPWithExperts(
        mlp,
        own_norm("post_feedforward_layernorm_1"),
        experts,
        RMSNorm(factors, config.rms_norm_eps, options.dtype),
        own_norm("post_feedforward_layernorm_2"),
    )


def _per_layer_gate(
    config: ModelConfig, spec: LayerSpec, options: BuildOptions
) -> PerLayerGate | None:
    if config.per_layer_embeddings is None:
        return None
    hidden, size = config.hidden_size, config.per_layer_embeddings.size
    gate = Tensor("per_layer_input_gate.weight", (hidden, size), transposed=True)
    projection = Tensor("per_layer_projection.weight", (size, hidden), transposed=True)
    return PerLayerGate(
        linear(spec, options, gate),
        linear(spec, options, projection),
        norm("post_per_layer_input_norm", hidden, config, options),
        ACTIVATIONS[config.activation],
    )


def per_layer_embedding(
    config: ModelConfig, options: BuildOptions, body: str
) -> PerLayerEmbedding | None:
    """Declare the embeddings by layer; `body` is the prefix of their tensors."""
    sizes, dtype = config.per_layer_embeddings, options.dtype
    if sizes is None:
        return None
    width = config.num_layers * sizes.size
    rows = padded_vocab_size(sizes.vocab_size, options.tp_size)
    table = Tensor(f"{body}embed_tokens_per_layer.weight", (sizes.vocab_size, width))
    projection = Tensor(
        f"{body}per_layer_model_projection.weight", (config.hidden_size, width), transposed=True
    )
    return PerLayerEmbedding(
        Embedding(Padded(table, rows, axis=0), sizes.vocab_size, width, dtype, is_head=False),
        Linear(projection, dtype),
        norm(f"{body}per_layer_projection_norm", sizes.size, config, options),
        scatters=options.sequence_parallel,
    )


GEMMA3_TEXT = Architecture(gemma3_layer, norms_from_one=True, scales_embedding=True)
# The multimodal model: its vision tensors are read only if images are served.
GEMMA3 = GEMMA3_TEXT._replace(
    body="language_model.model.",
    head="language_model.lm_head",
    declare_tower=Gemma3Tower,
    spare_prefixes=("vision_tower.", "multi_modal_projector."),
)
GEMMA4_TEXT = Architecture(
    gemma4_layer,
    scales_embedding=True,
    declare_per_layer_embedding=per_layer_embedding,
    unused_in_sharing_layers=_UNUSED,
)
# The multimodal model: its tensors of images are read only if images are served, and those of
# sounds are not.
GEMMA4 = GEMMA4_TEXT._replace(
    body="model.language_model.",
    declare_tower=Gemma4Tower,
    spare_prefixes=(
        "model.vision_tower.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    ),
)

"""Mixtures of experts on Llama's attention: GLM-4.5 and GLM-4.6, MiniMax-M2, Llama 4's text model.

- GLM-4.5: half of each head is rotated, dense layers first. The config has the biases of Q, K and
  V, and whether queries and keys are normalised.
- MiniMax-M2: queries and keys normalised over all heads, half of each head rotated.
- Llama 4: chunked attention, experts with weighted inputs, dense layers among them. The config has
  the chunks, the unrotated layers and the scale of their queries.
"""

from sgl_jax.models.architecture import Architecture, BuildOptions
from sgl_jax.models.config import LayerSpec, ModelConfig, ModelConfigError
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import QKNorm, attention, gated_mlp, llama_layer, norm
from sgl_jax.models.qwen3 import ExpertNames, mixture_of_experts

_MINIMAX_EXPERTS = ExpertNames(
    "block_sparse_moe.", "w1", "w3", "w2", choice_bias="e_score_correction_bias"
)
_LLAMA4_BLOCK = "feed_forward."
_LLAMA4_EXPERTS = ExpertNames(
    _LLAMA4_BLOCK, router="router", shared="shared_expert", layouts="columns"
)


def glm4_moe_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer, with experts if its spec has them."""
    experts = mixture_of_experts(config, spec, spec.moe, options) if spec.moe else None
    qk_norm: QKNorm | None = "each_head" if config.qk_norm else None
    return llama_layer(config, spec, options, qk_norm=qk_norm, experts=experts)


def minimax_m2_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer. Raise ValueError if chips cannot split heads or experts."""
    if spec.moe is None:
        raise ModelConfigError("MiniMaxM2ForCausalLM needs num_local_experts")
    return DecoderLayer(
        norm("input_layernorm", config.hidden_size, config, options),
        attention(config, spec, options, qk_norm="all_heads"),
        norm("post_attention_layernorm", config.hidden_size, config, options),
        mixture_of_experts(config, spec, spec.moe, options, _MINIMAX_EXPERTS),
    )


def llama4_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer. Raise ValueError if chips cannot split heads or widths."""
    has_norm = config.qk_norm and spec.rope is not None
    if spec.rope is not None and spec.rope.attention_factor != 1:
        # The norm follows the rotation, which would change it. Without a factor the order of both
        # is of no effect, since the norm has no weights.
        raise ModelConfigError("rope_parameters with an attention_factor are not supported")
    return DecoderLayer(
        norm("input_layernorm", config.hidden_size, config, options),
        attention(
            *(config, spec, options),
            qk_norm="weightless" if has_norm else None,
            pairs_neighbours=True,
        ),
        norm("post_attention_layernorm", config.hidden_size, config, options),
        mixture_of_experts(config, spec, spec.moe, options, _LLAMA4_EXPERTS)
        if spec.moe
        else gated_mlp(config, spec, options, _LLAMA4_BLOCK),
    )


GLM4_MOE = Architecture(glm4_moe_layer, has_further_layers=True)
LLAMA4_TEXT = Architecture(llama4_layer)
# The multimodal model: its vision tensors are not read.
LLAMA4 = LLAMA4_TEXT._replace(
    body="language_model.model.",
    head="language_model.lm_head",
    spare_prefixes=("vision_model.", "multi_modal_projector."),
)

"""MiniMax-M2: queries and keys normalised over all heads, half of each head rotated, experts."""

from sgl_jax.models.config import LayerSpec, ModelConfig, ModelConfigError
from sgl_jax.models.decoder import BuildOptions
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import attention, norm
from sgl_jax.models.qwen3 import ExpertNames, mixture_of_experts

_NAMES = ExpertNames("block_sparse_moe.", "w1", "w3", "w2", choice_bias="e_score_correction_bias")


def minimax_m2_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer. Raise ValueError if chips cannot split heads or experts."""
    if spec.moe is None:
        raise ModelConfigError("MiniMaxM2ForCausalLM needs num_local_experts")
    return DecoderLayer(
        norm("input_layernorm", config.hidden_size, config, options),
        attention(config, spec, options, qk_norm="all_heads"),
        norm("post_attention_layernorm", config.hidden_size, config, options),
        mixture_of_experts(config, spec, spec.moe, options, _NAMES),
    )

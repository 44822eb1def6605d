"""Phi-3 and Phi-4: Llama with one tensor for Q, K and V, and one for gate and up."""

from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder import BuildOptions
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import attention, gated_mlp, norm


def phi3_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer. Raise ValueError if `tp_size` chips cannot split heads or widths."""
    return DecoderLayer(
        norm("input_layernorm", config.hidden_size, config, options),
        attention(config, spec, options, fused=True),
        norm("post_attention_layernorm", config.hidden_size, config, options),
        gated_mlp(config, spec, options, fused=True),
    )

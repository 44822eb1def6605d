"""GLM-4.5 and GLM-4.6: half of each head is rotated, dense layers first, then experts.

The config has the biases of Q, K and V, and whether queries and keys are normalised.
"""

from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder import Architecture, BuildOptions
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import QKNorm, llama_layer
from sgl_jax.models.qwen3 import mixture_of_experts


def glm4_moe_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer, with experts if its spec has them."""
    experts = mixture_of_experts(config, spec, spec.moe, options) if spec.moe else None
    qk_norm: QKNorm | None = "each_head" if config.qk_norm else None
    return llama_layer(config, spec, options, qk_norm=qk_norm, experts=experts)


GLM4_MOE = Architecture(glm4_moe_layer, has_further_layers=True)

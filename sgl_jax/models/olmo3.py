"""OLMo 3: norms after attention and after the feed-forward layer, not before them.

The config has the windows and the rotation (YaRN) of layers without them.
"""

from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder import BuildOptions
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import attention, gated_mlp, norm


def olmo3_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer. Raise ValueError if `tp_size` chips cannot split heads or widths."""
    return DecoderLayer(
        None,
        attention(config, spec, options, qk_norm="all_heads"),
        None,
        gated_mlp(config, spec, options),
        attended_norm=norm("post_attention_layernorm", config.hidden_size, config, options),
        mlp_output_norm=norm("post_feedforward_layernorm", config.hidden_size, config, options),
    )

"""Gemma 3's text model: four norms a layer, most layers with a window.

The config has the windows and their rotation's base, the scale of scores and the activation.
"""

from functools import partial

from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder import Architecture, BuildOptions
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import attention, gated_mlp, norm


def gemma3_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    own_norm = partial(norm, size=config.hidden_size, config=config, options=options, from_one=True)
    return DecoderLayer(
        own_norm("input_layernorm"),
        attention(config, spec, options, qk_norm="each_head", norms_from_one=True),
        own_norm("pre_feedforward_layernorm"),
        gated_mlp(config, spec, options),
        attended_norm=own_norm("post_attention_layernorm"),
        mlp_output_norm=own_norm("post_feedforward_layernorm"),
    )


GEMMA3_TEXT = Architecture(gemma3_layer, norms_from_one=True, scales_embedding=True)
# The multimodal model: its vision tensors are not read.
GEMMA3 = GEMMA3_TEXT._replace(
    body="language_model.model.",
    head="language_model.lm_head",
    spare_prefixes=("vision_tower.", "multi_modal_projector."),
)

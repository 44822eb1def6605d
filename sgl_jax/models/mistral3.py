"""Mistral 3's multimodal models: their text model is Mistral, Ministral 3 or Mistral 4."""

from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder import Architecture, BuildOptions
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.deepseek import deepseek_layer
from sgl_jax.models.llama import llama_layer


def mistral3_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer: Mistral 4 has latents."""
    return (deepseek_layer if spec.latent else llama_layer)(config, spec, options)


# Vision tensors are not read.
MISTRAL3 = Architecture(
    mistral3_layer,
    body="language_model.model.",
    head="language_model.lm_head",
    spare_prefixes=("vision_tower.", "multi_modal_projector."),
)

"""Llama 4's text model: chunked attention, experts with weighted inputs, dense layers among them.

The config has the chunks, the unrotated layers and the scale of their queries.
"""

from sgl_jax.models.config import LayerSpec, ModelConfig, ModelConfigError
from sgl_jax.models.decoder import Architecture, BuildOptions
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import attention, gated_mlp, norm
from sgl_jax.models.qwen3 import ExpertNames, mixture_of_experts

_BLOCK = "feed_forward."
_NAMES = ExpertNames(_BLOCK, router="router", shared="shared_expert", layouts="columns")


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
        mixture_of_experts(config, spec, spec.moe, options, _NAMES)
        if spec.moe
        else gated_mlp(config, spec, options, _BLOCK),
    )


LLAMA4_TEXT = Architecture(llama4_layer)
# The multimodal model: its vision tensors are not read.
LLAMA4 = LLAMA4_TEXT._replace(
    body="language_model.model.",
    head="language_model.lm_head",
    spare_prefixes=("vision_model.", "multi_modal_projector."),
)

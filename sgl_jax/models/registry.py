"""From a Hugging Face architecture name to a model; docs/adding_a_model.md says how to add one."""

from collections.abc import Mapping
from types import MappingProxyType

from sgl_jax.models.config import ModelConfig, ModelConfigError
from sgl_jax.models.decoder import BuildOptions, CausalLM, LayerBuilder
from sgl_jax.models.llama import llama_layer
from sgl_jax.models.mistral import mistral_layer
from sgl_jax.models.qwen2 import qwen2_layer
from sgl_jax.models.qwen3 import qwen3_layer, qwen3_moe_layer

_LAYERS: Mapping[str, LayerBuilder] = MappingProxyType(
    {
        "LlamaForCausalLM": llama_layer,
        "MistralForCausalLM": mistral_layer,
        "Qwen2ForCausalLM": qwen2_layer,
        "Qwen3ForCausalLM": qwen3_layer,
        "Qwen3MoeForCausalLM": qwen3_moe_layer,
    }
)


def build_model(config: ModelConfig, options: BuildOptions) -> CausalLM:
    """Declare the model: its parameters are shapes until a checkpoint fills them.

    Raises:
        ModelConfigError: the architecture is unknown; the message lists those that are known.
        ValueError: the heads cannot be split over `tp_size` chips.
    """
    if config.architecture not in _LAYERS:
        known = ", ".join(sorted(_LAYERS))
        raise ModelConfigError(
            f"architecture {config.architecture!r} is not supported; supported: {known}"
        )
    return CausalLM(config, _LAYERS[config.architecture], options)

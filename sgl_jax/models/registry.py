"""Models by Hugging Face architecture name; docs/adding_a_model.md explains how to add one."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from sgl_jax.models.architecture import Architecture, BuildOptions
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.decoder import CausalLM
from sgl_jax.models.deepseek import DEEPSEEK, MISTRAL3, deepseek_layer
from sgl_jax.models.draft_layer import declare_draft_layer
from sgl_jax.models.drafter import Drafter
from sgl_jax.models.eagle3 import declare_eagle3_layer
from sgl_jax.models.expert_families import (
    GLM4_MOE,
    LLAMA4,
    LLAMA4_TEXT,
    minimax_m2_layer,
)
from sgl_jax.models.gemma import GEMMA3, GEMMA3_TEXT, GEMMA4, GEMMA4_TEXT
from sgl_jax.models.gpt_oss import gpt_oss_layer
from sgl_jax.models.granite import GRANITE, GRANITE_HYBRID
from sgl_jax.models.kimi_linear import KIMI_LINEAR
from sgl_jax.models.llama import llama_layer, olmo3_layer
from sgl_jax.models.nemotron_h import NEMOTRON_H
from sgl_jax.models.qwen3 import QWEN3_VL, QWEN3_VL_MOE, qwen3_layer, qwen3_moe_layer
from sgl_jax.models.qwen3_next import QWEN3_5, QWEN3_5_TEXT, QWEN3_NEXT

_ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": DEEPSEEK,
        "DeepseekV32ForCausalLM": DEEPSEEK,
        "DeepseekV3ForCausalLM": DEEPSEEK,
        "Gemma3ForCausalLM": GEMMA3_TEXT,
        "Gemma3ForConditionalGeneration": GEMMA3,
        "Gemma4ForCausalLM": GEMMA4_TEXT,
        "Gemma4ForConditionalGeneration": GEMMA4,
        "Glm4MoeForCausalLM": GLM4_MOE,
        "GlmMoeDsaForCausalLM": DEEPSEEK,
        "GptOssForCausalLM": Architecture(gpt_oss_layer),
        "GraniteForCausalLM": GRANITE,
        "GraniteMoeForCausalLM": GRANITE,
        "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
        "KimiLinearForCausalLM": KIMI_LINEAR,
        "Llama4ForCausalLM": LLAMA4_TEXT,
        "Llama4ForConditionalGeneration": LLAMA4,
        "LlamaForCausalLM": Architecture(llama_layer),
        "MiniMaxM2ForCausalLM": Architecture(minimax_m2_layer),
        "Ministral3ForCausalLM": Architecture(llama_layer),  # the config has the queries' scale
        "MinistralForCausalLM": Architecture(llama_layer),
        "Mistral3ForConditionalGeneration": MISTRAL3,
        "Mistral4ForCausalLM": Architecture(deepseek_layer),
        "MistralForCausalLM": Architecture(llama_layer),  # the config has the window
        "NemotronHForCausalLM": NEMOTRON_H,
        "Olmo3ForCausalLM": Architecture(olmo3_layer),
        "Phi3ForCausalLM": Architecture(partial(llama_layer, fused=True)),
        "Qwen2ForCausalLM": Architecture(partial(llama_layer, qkv_bias=True)),
        "Qwen3ForCausalLM": Architecture(qwen3_layer),
        "Qwen3MoeForCausalLM": Architecture(qwen3_moe_layer),
        "Qwen3NextForCausalLM": QWEN3_NEXT,
        "Qwen3VLForConditionalGeneration": QWEN3_VL,
        "Qwen3VLMoeForConditionalGeneration": QWEN3_VL_MOE,
        "Qwen3_5ForCausalLM": QWEN3_5_TEXT,
        "Qwen3_5ForConditionalGeneration": QWEN3_5,
        "Qwen3_5MoeForCausalLM": QWEN3_5_TEXT,
        "Qwen3_5MoeForConditionalGeneration": QWEN3_5,
        "SeedOssForCausalLM": Architecture(llama_layer),
        "SmolLM3ForCausalLM": Architecture(llama_layer),  # the config has the unrotated layers
    }
)


def build_model(config: ModelConfig, options: BuildOptions) -> CausalLM:
    """Declare the model: its parameters are shapes until a checkpoint fills them.

    Raises ValueError if `tp_size` chips cannot split the heads.
    """
    architecture = _ARCHITECTURES[config.architecture]
    return CausalLM(config, architecture, options, _drafter(config, architecture, options))


def names_of_embeddings(config: ModelConfig) -> tuple[str, str]:
    """Return the names of the embeddings and of the head."""
    architecture = _ARCHITECTURES[config.architecture]
    return architecture.embeddings_tensor, architecture.head_tensor


def _drafter(
    config: ModelConfig, architecture: Architecture, options: BuildOptions
) -> Drafter | None:
    if config.eagle3 is not None:
        return declare_eagle3_layer(config, config.eagle3, options)
    if config.draft_layer is not None:
        return declare_draft_layer(config, architecture, options)
    return None

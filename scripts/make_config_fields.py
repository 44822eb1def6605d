#!/usr/bin/env python3
"""Record the config fields of transformers' text models in tests/golden/config_fields.json.

The file has the names of all text models and of their fields, and the default config.json of each
model that sgl_jax serves. Needs transformers; tests read the file.
"""

import json
from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

_TARGET = Path(__file__).parents[1] / "tests/golden/config_fields.json"
_SERVED = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "llama4_text": "Llama4ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mistral4": "Mistral4ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def main() -> None:
    kinds = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    fields: set[str] = set()
    configs = {}
    for kind in kinds:
        try:
            config = CONFIG_MAPPING[kind]().to_dict()
        except Exception as error:
            print(f"left out, {kind} has no default config: {str(error).splitlines()[0]}")
            continue
        text = config.get("text_config")
        fields |= set(text if isinstance(text, dict) else config)
        if kind in _SERVED:
            configs[_SERVED[kind]] = config | {"architectures": [_SERVED[kind]]}
    names = {name for name in kinds.values() if isinstance(name, str)}
    record = {
        "version": transformers.__version__,
        "fields": sorted(fields),
        "architectures": sorted(names),
        "configs": configs,
    }
    _TARGET.write_text(json.dumps(record, sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

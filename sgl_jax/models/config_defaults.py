"""Defaults that transformers gives to fields absent from an architecture's config.json.

A field that is present applies, even if it is null.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sgl_jax.models.config_fields import ModelConfigError, required

# If windows are switched on, the layers before `max_window_layers` have none.
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
}
_GPT_OSS = {
    "attention_bias": True,
    "head_dim": 64,
    "norm_topk_prob": True,  # its softmax is only over the chosen experts, which is the same
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_HYBRID = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
}
_QWEN3_NEXT = _HYBRID | {
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,  # Qwen3.5 has no such field: its router always normalises
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
}
_QWEN3_5_MOE = _QWEN3_NEXT | {"num_experts": 256, "num_experts_per_tok": 8}
_DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "rms_norm_eps": 1e-6,
}
_DEEPSEEK_V2 = _DEEPSEEK | {"topk_method": "greedy", "scoring_func": "softmax"}
_DEEPSEEK_V3 = _DEEPSEEK | {
    "first_k_dense_replace": 3,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
}
# Other names of fields, by architecture.
_ALIASES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "GptOssForCausalLM": {"moe_intermediate_size": "intermediate_size"},
        # All layers have experts.
        "Qwen3_5MoeForCausalLM": {"intermediate_size": "moe_intermediate_size"},
        "Qwen3_5MoeForConditionalGeneration": {"intermediate_size": "moe_intermediate_size"},
    }
)
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": _DEEPSEEK_V2,
        "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma3ForConditionalGeneration": _GEMMA3,
        "GptOssForCausalLM": _GPT_OSS,
        "MistralForCausalLM": {"sliding_window": 4096},
        "Qwen2ForCausalLM": _QWEN,
        "Qwen3ForCausalLM": _QWEN,
        "Qwen3MoeForCausalLM": _QWEN,
        "Qwen3NextForCausalLM": _QWEN3_NEXT,
        "Qwen3_5ForCausalLM": _HYBRID,
        "Qwen3_5ForConditionalGeneration": _HYBRID,
        "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
        "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    }
)
# The section of a multimodal config that describes the text model.
_TEXT_PART = "text_config"
_WITH_TEXT_PART = (
    "Gemma3ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
# Top-level fields that replace those in the text section: they have the end tokens of chats.
_OF_THE_WHOLE = ("eos_token_id", "tie_word_embeddings")


# Classes without a head, whose other tensors are those of the class with one.
_BASE_MODELS = {"Qwen3Model": "Qwen3ForCausalLM"}


def architecture_name(raw: Mapping[str, Any]) -> str:
    """Return the model's class in transformers, with a head. Raise ModelConfigError."""
    names = required(raw, "architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ModelConfigError(f"architectures must be a list of one name, got {names!r}")
    return _BASE_MODELS.get(str(names[0]), str(names[0]))


def completed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text model's fields of config.json, with defaults. Raise ModelConfigError."""
    architecture = architecture_name(raw)
    given = dict(raw)
    if architecture in _WITH_TEXT_PART:
        text = required(raw, _TEXT_PART)
        if not isinstance(text, dict):
            raise ModelConfigError(f"{_TEXT_PART} must be an object, got {text!r}")
        given |= text | {"architectures": [architecture]}
        given |= {name: raw[name] for name in _OF_THE_WHOLE if name in raw}
    given = {**_DEFAULTS.get(architecture, {}), **given}
    for name, alias in _ALIASES.get(architecture, {}).items():
        given[name] = given.get(alias)
    return given


def is_hybrid(raw: Mapping[str, Any]) -> bool:
    """Return True for architectures with recurrent layers."""
    return "linear_num_key_heads" in _DEFAULTS.get(architecture_name(raw), {})


def has_latents(raw: Mapping[str, Any]) -> bool:
    """Return True for architectures with latent attention."""
    return "kv_lora_rank" in _DEFAULTS.get(architecture_name(raw), {})

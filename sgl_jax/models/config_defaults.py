"""Defaults that transformers gives to fields absent from an architecture's config.json.

A field that is present applies, even if it is null.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sgl_jax.models.config_fields import ModelConfigError, required
from sgl_jax.models.kimi_linear_config import KIMI_LINEAR, usual_fields
from sgl_jax.models.recurrent_defaults import (
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    HYBRID,
    NEMOTRON_H,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    RECURRENT_ALIASES,
    single_parts,
)

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
_GEMMA4 = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 1,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size_per_layer_input": 262144,
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
_DEEPSEEK_V32 = _DEEPSEEK_V3 | {
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "indexer_rope_interleave": False,
}
_GLM_MOE_DSA = _DEEPSEEK_V32 | {
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "n_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "topk_group": 1,
    "v_head_dim": 256,
}
_SMOLLM3 = {
    "no_rope_layer_interval": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
_SEED_OSS = {"attention_bias": True, "attention_out_bias": False, "head_dim": 128}
_PHI3 = {"original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0}
_OLMO3 = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
_GLM4_MOE = {
    "attention_out_bias": False,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "partial_rotary_factor": 0.5,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_qk_norm": False,
}
_MINIMAX_M2 = {
    "head_dim": 128,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "partial_rotary_factor": None,  # by `rotary_dim`
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
}
_MINISTRAL3 = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_MISTRAL4 = {
    "first_k_dense_replace": 0,
    "kv_lora_rank": 256,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "partial_rotary_factor": None,  # of a whole query
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "group_limited_greedy",
    "v_head_dim": 128,
}
_LLAMA4 = {
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "head_dim": 128,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 16384,
    "no_rope_layer_interval": 4,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
}
# Other names of fields, by architecture.
_ALIASES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        **RECURRENT_ALIASES,
        "Gemma4ForCausalLM": {"num_experts_per_tok": "top_k_experts"},
        "Gemma4ForConditionalGeneration": {"num_experts_per_tok": "top_k_experts"},
        "GptOssForCausalLM": {"moe_intermediate_size": "intermediate_size"},
        "Llama4ForCausalLM": {
            "moe_intermediate_size": "intermediate_size",
            "shared_expert_intermediate_size": "intermediate_size",
            "intermediate_size": "intermediate_size_mlp",  # of layers without experts
        },
        "MiniMaxM2ForCausalLM": {"moe_intermediate_size": "intermediate_size"},
    }
)
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": _DEEPSEEK_V2,
        "DeepseekV32ForCausalLM": _DEEPSEEK_V32,
        "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma3ForConditionalGeneration": _GEMMA3,
        "Gemma4ForCausalLM": _GEMMA4,
        "Gemma4ForConditionalGeneration": _GEMMA4,
        "Glm4MoeForCausalLM": _GLM4_MOE,
        "GlmMoeDsaForCausalLM": _GLM_MOE_DSA,
        "GptOssForCausalLM": _GPT_OSS,
        "GraniteForCausalLM": GRANITE,
        "GraniteMoeForCausalLM": GRANITE_MOE,
        "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
        "KimiLinearForCausalLM": KIMI_LINEAR,
        "Llama4ForCausalLM": _LLAMA4,
        "MiniMaxM2ForCausalLM": _MINIMAX_M2,
        "Ministral3ForCausalLM": _MINISTRAL3,
        "MinistralForCausalLM": {"sliding_window": 4096},
        "Mistral4ForCausalLM": _MISTRAL4,
        "MistralForCausalLM": {"sliding_window": 4096},
        "NemotronHForCausalLM": NEMOTRON_H,
        "Olmo3ForCausalLM": _OLMO3,
        "Phi3ForCausalLM": _PHI3,
        "Qwen2ForCausalLM": _QWEN,
        "Qwen3ForCausalLM": _QWEN,
        "Qwen3MoeForCausalLM": _QWEN,
        "Qwen3NextForCausalLM": QWEN3_NEXT,
        "Qwen3VLMoeForConditionalGeneration": {"norm_topk_prob": True},
        "Qwen3_5ForCausalLM": HYBRID,
        "Qwen3_5ForConditionalGeneration": HYBRID,
        "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
        "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE,
        "SeedOssForCausalLM": _SEED_OSS,
        "SmolLM3ForCausalLM": _SMOLLM3,
    }
)
# Fields under other names, whose values are read after these were checked.
_RENAMES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = MappingProxyType(
    {"KimiLinearForCausalLM": usual_fields}
)
# The section of a multimodal config that describes the text model.
_TEXT_PART = "text_config"
_WITH_TEXT_PART = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
# The text models of multimodal ones that may have several, by the section's `model_type`.
_TEXT_MODELS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
        "Mistral3ForConditionalGeneration": {
            "mistral": "MistralForCausalLM",
            "ministral3": "Ministral3ForCausalLM",
            "mistral4": "Mistral4ForCausalLM",
        },
    }
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


def text_architecture(raw: Mapping[str, Any]) -> str:
    """Return the text model's class in transformers, from its fields. Raise ModelConfigError."""
    architecture = architecture_name(raw)
    if architecture not in _TEXT_MODELS:
        return architecture
    known, kind = _TEXT_MODELS[architecture], raw.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise ModelConfigError(
            f"model_type in {_TEXT_PART} must be one of {', '.join(known)}, got {kind!r}"
        )
    return known[kind]


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
    text_model = text_architecture(given)
    given = {**_DEFAULTS.get(text_model, {}), **given}
    for name, alias in _ALIASES.get(text_model, {}).items():
        given[name] = given.get(alias)
    if has_single_parts(given):
        given |= single_parts(given)
    return given


def renamed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the completed fields under the names that are read. Raise ModelConfigError."""
    rename = _RENAMES.get(text_architecture(raw), dict)
    return rename(raw)


def _by_field(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return a test of config fields: True for architectures with one of the fields `names`."""

    def has_field(raw: Mapping[str, Any]) -> bool:
        return not _DEFAULTS.get(text_architecture(raw), {}).keys().isdisjoint(names)

    return has_field


is_hybrid = _by_field("linear_conv_kernel_dim")  # recurrent layers with a delta rule
has_state_spaces = _by_field("mamba_n_heads", "mamba_num_heads")  # Mamba-2
has_single_parts = _by_field("layers_block_type")  # attention, recurrence or feed-forward
has_multipliers = _by_field("residual_multiplier")  # of embeddings, scores, residuals and logits
rotates_partly = _by_field("partial_rotary_factor")  # a part of each head may be rotated
leaves_layers_unrotated = _by_field("no_rope_layer_interval")
chooses_qk_norm = _by_field("use_qk_norm")
has_chunks = _by_field("attention_chunk_size")  # attention to the tokens of a chunk
has_head_sizes_by_layer = _by_field("global_head_dim")
has_latents = _by_field("kv_lora_rank")
has_indexer = _by_field("index_topk")  # attention to tokens that an indexer chooses

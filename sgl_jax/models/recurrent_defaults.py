"""Defaults of fields absent from config.json, for models with recurrences and their families.

See `config_defaults`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sgl_jax.models.config_fields import ModelConfigError

HYBRID = {
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
QWEN3_NEXT = HYBRID | {
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,  # Qwen3.5 has no such field: its router always normalises
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
}
QWEN3_5_MOE = QWEN3_NEXT | {"num_experts": 256, "num_experts_per_tok": 8}
GRANITE = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}
GRANITE_MOE = GRANITE | {
    "norm_topk_prob": True,  # its softmax is only over the chosen experts, which is the same
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
GRANITE_HYBRID = GRANITE_MOE | {
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": "auto",
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "shared_intermediate_size": 1024,
}
NEMOTRON_H = {
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-5,
    "layers_block_type": None,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "scoring_func": "sigmoid",
    "ssm_state_size": 128,
    "time_step_min": 0.001,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_conv_bias": True,
    "vocab_size": 131072,
}
# Other names of fields, by architecture.
RECURRENT_ALIASES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "GraniteMoeForCausalLM": {"moe_intermediate_size": "intermediate_size"},
        "GraniteMoeHybridForCausalLM": {
            "moe_intermediate_size": "intermediate_size",
            "shared_expert_intermediate_size": "shared_intermediate_size",
            "intermediate_size": "shared_intermediate_size",  # of layers without experts
        },
        "NemotronHForCausalLM": {
            "hidden_act": "mlp_hidden_act",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_d_conv": "conv_kernel",
            "mamba_d_head": "mamba_head_dim",
            "mamba_d_state": "ssm_state_size",
            "mamba_n_groups": "n_groups",
            "mamba_n_heads": "mamba_num_heads",
            "rms_norm_eps": "layer_norm_epsilon",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        },
        # All layers have experts.
        "Qwen3_5MoeForCausalLM": {"intermediate_size": "moe_intermediate_size"},
        "Qwen3_5MoeForConditionalGeneration": {"intermediate_size": "moe_intermediate_size"},
    }
)

# The kind of each layer as a letter.
_PARTS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def single_parts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kinds of layers and their number, which a list or a string of letters gives.

    Raises ModelConfigError.
    """
    kinds, pattern = given.get("layers_block_type"), given.get("hybrid_override_pattern") or "ME*-"
    if not isinstance(kinds, list | None) or not isinstance(pattern, str):
        raise ModelConfigError(
            "layers_block_type must be a list, and hybrid_override_pattern a string, got "
            f"{kinds!r} and {pattern!r}"
        )
    if kinds is None:
        kinds = [_PARTS.get(letter, letter) for letter in pattern]
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}

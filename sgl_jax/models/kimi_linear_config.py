"""The fields of Kimi Linear's config.json, under the names of the other models' fields."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sgl_jax.models.config_fields import ModelConfigError, is_int, object_field, positive_int

KIMI_LINEAR: Mapping[str, Any] = MappingProxyType(
    {
        "kv_lora_rank": 512,
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 1048576,
        "moe_intermediate_size": 1024,
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "no_rope_layer_interval": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,  # which pairs is of no effect without rotation
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    }
)
# This model's spellings.
_SPELLINGS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# Values that change nothing: all that this model computes.
KIMI_LINEAR_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "mla_use_nope": (True,),
        "moe_router_activation_func": ("sigmoid",),
        "no_rope_layer_interval": (1,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "use_grouped_topk": (True,),
    }
)
KIMI_LINEAR_FIELDS = (
    KIMI_LINEAR.keys()
    | _SPELLINGS.keys()
    | {"layer_types", "linear_attn_config"}
    | {"mlp_layer_types", "q_lora_rank"}
) - KIMI_LINEAR_NEUTRAL.keys()
_LINEAR = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_KINDS = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}


def usual_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Kimi Linear, with defaults, under the usual names.

    Raises ModelConfigError for what it does not compute.
    """
    usual = dict(raw)
    for name in ("rope_parameters", "rope_scaling", "tie_word_embeddings"):
        if raw.get(name):
            raise ModelConfigError(
                f"{name} = {raw[name]!r} is not supported for KimiLinearForCausalLM"
            )
    for own, name in _SPELLINGS.items():
        if own in usual:
            usual[name] = usual.pop(own)
    linear = object_field(usual, "linear_attn_config")
    if unknown := linear.keys() - _LINEAR.keys() - _KINDS.keys():
        raise ModelConfigError(f"{min(unknown)} in linear_attn_config is not supported")
    usual |= {name: linear[own] for own, name in _LINEAR.items() if own in linear}
    if usual.get("layer_types") is None:
        usual["layer_types"] = _layer_types(linear, positive_int(usual, "num_hidden_layers"))
    for kind in ("key", "value"):
        usual[f"linear_num_{kind}_heads"] = usual["linear_num_heads"]
        usual[f"linear_{kind}_head_dim"] = usual["linear_head_dim"]
    return usual


def _layer_types(linear: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return the kinds of layers, which are listed by number, starting with 1."""
    if not _KINDS.keys() <= linear.keys():
        full, recurrent = _KINDS.values()
        return [full if layer and layer % 4 == 0 else recurrent for layer in range(num_layers)]
    listed = sorted((n, kind) for name, kind in _KINDS.items() for n in _numbers(linear, name))
    if [number for number, _ in listed] != list(range(1, num_layers + 1)):
        raise ModelConfigError(
            f"{' and '.join(_KINDS)} in linear_attn_config must name each of the layers 1 to "
            f"{num_layers} (num_hidden_layers) once"
        )
    return [kind for _, kind in listed]


def _numbers(linear: Mapping[str, Any], name: str) -> list[int]:
    listed = linear[name]
    if not isinstance(listed, list) or not all(map(is_int, listed)):
        raise ModelConfigError(f"{name} must be a list of layers' numbers, got {listed!r}")
    return listed

"""The experts of a model's layers, from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_jax.core.layer_configs import ExpertChoice
from sgl_jax.models.config_defaults import (
    has_chunks,
    has_head_sizes_by_layer,
    has_state_spaces,
    is_hybrid,
    text_architecture,
)
from sgl_jax.models.config_fields import (
    ModelConfigError,
    optional_float,
    positive_float,
    positive_int,
    switch,
)

# A group's score is the sum of its two best, although no biases are added for the choice.
_SUMS_OF_TWO = ("Mistral4ForCausalLM",)
# Routers of DeepSeek's models: topk_method and scoring_func.
_ROUTERS = (("greedy", "softmax"), ("group_limited_greedy", "softmax"), ("noaux_tc", "sigmoid"))


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: a router chooses some of them for each token."""

    num_experts: int
    choice: ExpertChoice
    intermediate_size: int
    swiglu_limit: float | None = None  # clamps gates and values, see `clamped_swiglu`
    swiglu_alpha: float = 1.0  # factor in the clamped gates' sigmoid
    shared_intermediate_size: int | None = None  # width of an expert that serves every token
    gates_shared: bool = True  # the sigmoid of a product with the token multiplies its result
    has_choice_bias: bool = False  # the router has biases that only affect the choice
    weighs_inputs: bool = False  # the router's weights multiply experts' inputs, not their results


def read_moe(raw: Mapping[str, Any]) -> MoeConfig | None:
    if raw.get("n_routed_experts") is not None:
        return _deepseek_moe(raw)
    if has_head_sizes_by_layer(raw):
        if not switch(raw, "enable_moe_block"):
            return None
        if raw.get("num_experts") is None:
            raise ModelConfigError("enable_moe_block needs num_experts")
    # transformers 5 writes num_local_experts where earlier versions wrote num_experts.
    count_name = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    if raw.get(count_name) is None or (raw[count_name] == 0 and has_state_spaces(raw)):
        return None
    num_experts = positive_int(raw, count_name)
    top_k = positive_int(raw, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelConfigError(
            f"num_experts_per_tok ({top_k}) must not exceed {count_name} ({num_experts})"
        )
    return MoeConfig(
        num_experts=num_experts,
        choice=ExpertChoice(
            top_k,
            switch(raw, "norm_topk_prob"),
            has_sigmoid_scores=raw.get("scoring_func") == "sigmoid",
        ),
        intermediate_size=positive_int(raw, "moe_intermediate_size"),
        swiglu_limit=optional_float(raw, "swiglu_limit"),
        swiglu_alpha=positive_float(raw, "swiglu_alpha", default=1.0),
        shared_intermediate_size=(
            positive_int(raw, "shared_expert_intermediate_size")
            if is_hybrid(raw) or raw.get("shared_expert_intermediate_size")
            else None
        ),
        gates_shared=not (has_chunks(raw) or has_state_spaces(raw)),
        has_choice_bias=switch(raw, "use_routing_bias"),
        weighs_inputs=has_chunks(raw),
    )


def _deepseek_moe(raw: Mapping[str, Any]) -> MoeConfig:
    num_experts = positive_int(raw, "n_routed_experts")
    top_k, width = (positive_int(raw, x) for x in ("num_experts_per_tok", "moe_intermediate_size"))
    method, scores = raw.get("topk_method"), raw.get("scoring_func")
    if (method, scores) not in _ROUTERS:
        known = ", ".join(f"{one} with {other}" for one, other in _ROUTERS)
        raise ModelConfigError(
            f"topk_method and scoring_func must be one of {known}; got {method!r}, {scores!r}"
        )
    has_groups = method != "greedy" and (raw.get("n_group") or 1) != 1
    num_groups, top_groups = (
        positive_int(raw, name) if has_groups else 1 for name in ("n_group", "topk_group")
    )
    if num_experts % num_groups or not top_groups <= num_groups:
        raise ModelConfigError(
            f"n_group ({num_groups}) must divide n_routed_experts ({num_experts}), and topk_group "
            f"({top_groups}) must not exceed it"
        )
    if top_k > num_experts // num_groups * top_groups:
        raise ModelConfigError(
            f"num_experts_per_tok ({top_k}) must not exceed the experts of topk_group groups "
            f"({num_experts // num_groups * top_groups})"
        )
    shared = raw.get("n_shared_experts") or 0
    return MoeConfig(
        num_experts=num_experts,
        choice=ExpertChoice(
            top_k,
            switch(raw, "norm_topk_prob"),
            has_sigmoid_scores=scores == "sigmoid",
            num_groups=num_groups,
            top_groups=top_groups,
            best_of_group=1 + (method == "noaux_tc" or text_architecture(raw) in _SUMS_OF_TWO),
            scale=positive_float(raw, "routed_scaling_factor", default=1.0),
        ),
        intermediate_size=width,
        shared_intermediate_size=(
            positive_int(raw, "shared_expert_intermediate_size", default=width * shared)
            if shared
            else None
        ),
        gates_shared=False,
        has_choice_bias=method == "noaux_tc",
    )

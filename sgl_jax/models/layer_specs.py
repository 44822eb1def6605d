"""The specification of each layer of a model, from config.json.

These fields were renamed over the years; each spelling is read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.layer_configs import ExpertChoice, GatedDeltaConfig, LatentConfig
from sgl_jax.models.config_defaults import has_latents, is_hybrid
from sgl_jax.models.config_fields import (
    ModelConfigError,
    is_int,
    object_field,
    optional_float,
    positive_float,
    positive_int,
    switch,
)
from sgl_jax.models.quantization import Rule

RopeKind = Literal["default", "linear", "llama3", "yarn"]
LayerKind = Literal["full_attention", "sliding_attention", "linear_attention"]
_FULL: LayerKind = "full_attention"
_SLIDING: LayerKind = "sliding_attention"
_LINEAR: LayerKind = "linear_attention"
# Routers of DeepSeek's models: topk_method and scoring_func.
_ROUTERS = (("greedy", "softmax"), ("group_limited_greedy", "softmax"), ("noaux_tc", "sigmoid"))


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: its base frequency and its extension to long contexts."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # stretches positions, in all kinds except the default
    low_freq_factor: float = 1.0  # only llama3, also high_freq_factor
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192  # llama3 and yarn
    beta_fast: float = 32.0  # only yarn, also the fields up to attention_factor
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies queries and keys
    share: float = 1.0  # leading share of a head's dimensions to rotate

    def num_dims(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(head_dim * self.share)

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """Return the angle per position of each pair of rotated dimensions, [num_dims / 2].

        "linear" divides all of them by `factor`. "llama3" divides frequencies of wavelengths above
        original / low_freq_factor by `factor`, leaves wavelengths below original /
        high_freq_factor, and blends in between: for contexts longer than in Llama 3's pre-training.
        "yarn" (arXiv 2309.00071) leaves pairs that turn more than `beta_fast` times in the original
        context, divides pairs that turn less than `beta_slow` times, and blends in between,
        linearly by dimension; `truncate` rounds the bounds outwards to whole dimensions.
        """
        num_dims, original = self.num_dims(head_dim), self.original_max_position_embeddings
        exponents = np.arange(0, num_dims, 2, dtype=np.float32) / num_dims
        frequencies = (1.0 / self.theta**exponents).astype(np.float64)
        if self.kind == "linear":
            frequencies = frequencies / self.factor
        if self.kind == "llama3":
            turns = original * frequencies / (2 * math.pi)
            width = self.high_freq_factor - self.low_freq_factor
            blend = np.clip((turns - self.low_freq_factor) / width, 0.0, 1.0)
            frequencies = frequencies * (blend + (1.0 - blend) / self.factor)
        if self.kind == "yarn":
            # Dimension (of the first half) with a pair that turns `turns` times in the original
            # context.
            first, last = (
                num_dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
                for turns in (self.beta_fast, self.beta_slow)
            )
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, num_dims - 1)
            width = last - first or 0.001
            stretched = np.clip((np.arange(num_dims // 2) - first) / width, 0.0, 1.0)
            frequencies = frequencies * (1.0 - stretched + stretched / self.factor)
        return frequencies.astype(np.float32)


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


@dataclass(frozen=True)
class LayerSpec:
    """One layer: all settings that may differ between the layers of one model."""

    rope: RopeConfig | None  # None: a recurrence, without rotation
    sliding_window: int | None  # None: attention to all tokens, or a recurrence
    moe: MoeConfig | None  # None: a dense feed-forward layer
    recurrence: GatedDeltaConfig | None = None  # None: attention
    latent: LatentConfig | None = None  # None: no latent attention
    rules: tuple[tuple[str, Rule], ...] = ()  # of quantized matrices, by their modules' names


def read_layers(raw: Mapping[str, Any], max_positions: int) -> tuple[LayerSpec, ...]:
    """Return the layers of config.json's contents `raw`, starting next to the embedding.

    `max_positions` is the model's context. Raises ModelConfigError.
    """
    num_layers = positive_int(raw, "num_hidden_layers")
    kinds = _layer_kinds(raw, num_layers)
    ropes = {kind: _rope(raw, kind, max_positions) for kind in sorted(set(kinds) - {_LINEAR})}
    has_windows = _SLIDING in kinds and switch(raw, "use_sliding_window", default=True)
    window = positive_int(raw, "sliding_window") if has_windows else None
    moe, recurrence = _moe(raw), _recurrence(raw) if _LINEAR in kinds else None
    latent = read_latent(raw) if has_latents(raw) else None
    is_sparse = [False] * num_layers if moe is None else _sparse_layers(raw, num_layers)
    return tuple(
        LayerSpec(
            rope=ropes.get(kind),
            sliding_window=window if kind == _SLIDING else None,
            moe=moe if sparse else None,
            recurrence=recurrence if kind == _LINEAR else None,
            latent=latent,
        )
        for kind, sparse in zip(kinds, is_sparse, strict=True)
    )


def _layer_kinds(raw: Mapping[str, Any], num_layers: int) -> list[LayerKind]:
    """Return each layer's kind from the fields that specify it.

    These are a list of kinds; or a period, with each n-th layer full; or the number of full layers
    before layers with a window. Hybrid models have recurrences instead of windows.
    """
    kinds = raw.get("layer_types")
    if kinds is not None:
        known = (_FULL, _LINEAR if is_hybrid(raw) else _SLIDING)
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ModelConfigError(
                f"layer_types must be a list of {num_layers} names (num_hidden_layers), got "
                f"{kinds!r}"
            )
        for kind in kinds:
            if kind not in known:
                raise ModelConfigError(
                    f"layer_types may name {' and '.join(known)}; {kind!r} is not supported"
                )
        return kinds
    if is_hybrid(raw):
        period = positive_int(raw, "full_attention_interval")
        return [_LINEAR if (i + 1) % period else _FULL for i in range(num_layers)]
    for name in ("_sliding_window_pattern", "sliding_window_pattern"):
        if raw.get(name) is not None:
            period = positive_int(raw, name)
            return [_SLIDING if (i + 1) % period else _FULL for i in range(num_layers)]
    if not switch(raw, "use_sliding_window", default=raw.get("sliding_window") is not None):
        return [_FULL] * num_layers
    full = raw.get("max_window_layers") or 0
    if not is_int(full) or full < 0:
        raise ModelConfigError(f"max_window_layers must be 0 or more, got {full!r}")
    return [_FULL if i < full else _SLIDING for i in range(num_layers)]


def _rope(raw: Mapping[str, Any], kind: LayerKind, max_positions: int) -> RopeConfig:
    """Return the rotary embedding of layers of one kind.

    Transformers 5 writes `rope_parameters`, for all layers or by kind of layer. Before, there were
    `rope_theta` and `rope_scaling`; if layers with a window had a separate base
    (`rope_local_base_freq`), these two applied to the rest.
    """
    given = object_field(raw, "rope_parameters") or object_field(raw, "rope_scaling")
    has_own_base = kind == _SLIDING and raw.get("rope_local_base_freq") is not None
    base = {"rope_theta": raw.get("rope_local_base_freq" if has_own_base else "rope_theta")}
    base |= {"partial_rotary_factor": raw.get("partial_rotary_factor")}
    if any(name in given for name in (_FULL, _SLIDING)):
        own = base | object_field(given, kind)
    else:
        own = base if has_own_base else base | given
    share = positive_float(own, "partial_rotary_factor", default=1.0)
    if share > 1 or (share < 1 and not is_hybrid(raw)):
        most = "at most 1" if is_hybrid(raw) else "1.0"
        raise ModelConfigError(f"partial_rotary_factor must be {most}, got {share!r}")
    return replace(_scaled_rope(own, max_positions), share=share)


def _scaled_rope(own: Mapping[str, Any], max_positions: int) -> RopeConfig:
    theta = positive_float(own, "rope_theta", default=10000.0)
    kind = own.get("rope_type", own.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", positive_float(own, "factor"))
    original = positive_int(own, "original_max_position_embeddings", default=max_positions)
    if kind == "llama3":
        low, high = (positive_float(own, f"{end}_freq_factor") for end in ("low", "high"))
        return RopeConfig(theta, kind, positive_float(own, "factor"), low, high, original)
    if kind == "yarn":
        return _yarn(own, theta, original)
    raise ModelConfigError(f"rope type must be one of default, linear, llama3, yarn, got {kind!r}")


def _yarn(own: Mapping[str, Any], theta: float, original_max_positions: int) -> RopeConfig:
    if theta <= 1:
        raise ModelConfigError(f"rope_theta must be above 1 with rope type yarn, got {theta!r}")
    factor = positive_float(own, "factor")

    attention_factor = optional_float(own, "attention_factor")
    if attention_factor is None:
        above, below = (optional_float(own, name) for name in ("mscale", "mscale_all_dim"))
        if above is None or below is None:
            above, below = 1.0, 0.0
        attention_factor = _yarn_growth(factor, above) / _yarn_growth(factor, below)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position_embeddings=original_max_positions,
        beta_fast=positive_float(own, "beta_fast", default=32.0),
        beta_slow=positive_float(own, "beta_slow", default=1.0),
        truncate=switch(own, "truncate", default=True),
        attention_factor=attention_factor,
    )


def score_factor(raw: Mapping[str, Any]) -> float:
    """Return YaRN's factor of latent attention's scores; 1 without YaRN."""
    own = object_field(raw, "rope_parameters") or object_field(raw, "rope_scaling")
    if own.get("rope_type", own.get("type", "default")) == "default":
        return 1.0
    weight = optional_float(own, "mscale_all_dim")
    return 1.0 if weight is None else _yarn_growth(positive_float(own, "factor"), weight) ** 2


def _yarn_growth(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def read_latent(raw: Mapping[str, Any]) -> LatentConfig:
    """Return the sizes of latent attention in config.json's contents. Raise ModelConfigError."""
    rope_dim = positive_int(raw, "qk_rope_head_dim")
    if rope_dim % 2:
        raise ModelConfigError(f"qk_rope_head_dim must be even, got {rope_dim}")
    if not switch(raw, "rope_interleave"):
        raise ModelConfigError("rope_interleave = False is not supported")
    return LatentConfig(
        rank=positive_int(raw, "kv_lora_rank"),
        nope_dim=positive_int(raw, "qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=positive_int(raw, "v_head_dim"),
        query_rank=None if raw.get("q_lora_rank") is None else positive_int(raw, "q_lora_rank"),
    )


def _moe(raw: Mapping[str, Any]) -> MoeConfig | None:
    if has_latents(raw):
        return _deepseek_moe(raw)
    # transformers 5 writes num_local_experts where earlier versions wrote num_experts.
    count_name = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    if raw.get(count_name) is None:
        return None
    num_experts = positive_int(raw, count_name)
    top_k = positive_int(raw, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelConfigError(
            f"num_experts_per_tok ({top_k}) must not exceed {count_name} ({num_experts})"
        )
    return MoeConfig(
        num_experts=num_experts,
        choice=ExpertChoice(top_k, switch(raw, "norm_topk_prob")),
        intermediate_size=positive_int(raw, "moe_intermediate_size"),
        swiglu_limit=optional_float(raw, "swiglu_limit"),
        swiglu_alpha=positive_float(raw, "swiglu_alpha", default=1.0),
        shared_intermediate_size=(
            positive_int(raw, "shared_expert_intermediate_size") if is_hybrid(raw) else None
        ),
    )


def _deepseek_moe(raw: Mapping[str, Any]) -> MoeConfig | None:
    if raw.get("n_routed_experts") is None:
        return None
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
            best_of_group=2 if method == "noaux_tc" else 1,
            scale=positive_float(raw, "routed_scaling_factor", default=1.0),
        ),
        intermediate_size=width,
        shared_intermediate_size=width * positive_int(raw, "n_shared_experts") if shared else None,
        gates_shared=False,
        has_choice_bias=method == "noaux_tc",
    )


def _recurrence(raw: Mapping[str, Any]) -> GatedDeltaConfig:
    key_heads = positive_int(raw, "linear_num_key_heads")
    value_heads = positive_int(raw, "linear_num_value_heads")
    if value_heads % key_heads:
        raise ModelConfigError(
            f"linear_num_value_heads ({value_heads}) must be a multiple of linear_num_key_heads "
            f"({key_heads})"
        )
    conv_size = positive_int(raw, "linear_conv_kernel_dim")
    if conv_size < 2:
        raise ModelConfigError("linear_conv_kernel_dim must be 2 or more, got 1")
    return GatedDeltaConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=positive_int(raw, "linear_key_head_dim"),
        value_dim=positive_int(raw, "linear_value_head_dim"),
        conv_size=conv_size,
    )


def _sparse_layers(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return which layers have experts: every `decoder_sparse_step`-th except `mlp_only_layers`.

    With latent attention, all layers after the first `first_k_dense_replace` have experts.
    """
    if has_latents(raw):
        first = raw.get("first_k_dense_replace") or 0
        if not is_int(first) or not 0 <= first <= num_layers:
            raise ModelConfigError(
                f"first_k_dense_replace must be in [0, {num_layers}], got {first!r}"
            )
        if (every := positive_int(raw, "moe_layer_freq", default=1)) != 1:
            raise ModelConfigError(f"moe_layer_freq must be 1, got {every}")
        return [layer >= first for layer in range(num_layers)]
    step = positive_int(raw, "decoder_sparse_step", default=1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(
        is_int(layer) and 0 <= layer < num_layers for layer in dense
    ):
        raise ModelConfigError(
            f"mlp_only_layers must be a list of layers in [0, {num_layers}), got {dense!r}"
        )
    return [(layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)]

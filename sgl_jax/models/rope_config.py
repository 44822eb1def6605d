"""The rotary embedding of a model's layers, from config.json.

Its fields were renamed over the years; each spelling is read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sgl_jax.models.config_defaults import architecture_name, has_latents, rotates_partly
from sgl_jax.models.config_fields import (
    ModelConfigError,
    object_field,
    optional_float,
    positive_float,
    positive_floats,
    positive_int,
    switch,
)

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
LayerKind = Literal[
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "mlp", "moe"
]
FULL: LayerKind = "full_attention"
SLIDING: LayerKind = "sliding_attention"
CHUNKED: LayerKind = "chunked_attention"
LINEAR: LayerKind = "linear_attention"
EXPERTS: LayerKind = "moe"
FEEDING: frozenset[LayerKind] = frozenset({"mlp", EXPERTS})  # a feed-forward layer alone
UNROTATED = FEEDING | {LINEAR}
_ORIGINAL = "original_max_position_embeddings"
# Their `rope_scaling` applies only to layers without windows.
_UNSCALED_WINDOWS = ("Olmo3ForCausalLM",)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: its base frequency and its extension to long contexts."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # stretches positions, in all kinds except the default and longrope
    low_freq_factor: float = 1.0  # only llama3, also high_freq_factor
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192  # llama3, yarn and longrope
    beta_fast: float = 32.0  # only yarn, also the fields up to attention_factor
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies queries and keys
    share: float = 1.0  # leading share of a head's dimensions to rotate
    # Only longrope: a divisor of each pair's frequency, for contexts longer than the original and
    # for others (see `for_context`).
    long_factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    pair_share: float = 1.0  # only proportional: leading share of a head's pairs to rotate

    def num_dims(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(head_dim * self.share)

    def for_context(self, num_tokens: int) -> "RopeConfig":
        """Return the rotation of an engine with contexts of up to `num_tokens` tokens.

        LongRoPE (arXiv 2402.13753) has divisors for texts of up to the original length, and others.
        Cached keys keep their rotation, so all texts of an engine must have the same divisors.
        """
        if self.kind != "longrope" or num_tokens > self.original_max_position_embeddings:
            return self
        return replace(self, long_factors=self.short_factors)

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """Return the angle per position of each pair of rotated dimensions, [num_dims / 2].

        "linear" divides all of them by `factor`. "llama3" divides frequencies of wavelengths above
        original / low_freq_factor by `factor`, leaves wavelengths below original /
        high_freq_factor, and blends in between: for contexts longer than in Llama 3's pre-training.
        "yarn" (arXiv 2309.00071) leaves pairs that turn more than `beta_fast` times in the original
        context, divides pairs that turn less than `beta_slow` times, and blends in between,
        linearly by dimension; `truncate` rounds the bounds outwards to whole dimensions. "longrope"
        divides each frequency by its factor in `long_factors`. "proportional" has frequencies only
        for the first pairs of a whole head.
        """
        num_dims, original = self.num_dims(head_dim), self.original_max_position_embeddings
        exponents = np.arange(0, num_dims, 2, dtype=np.float32) / num_dims
        frequencies = (1.0 / self.theta**exponents).astype(np.float64)
        if self.kind == "proportional":
            frequencies = frequencies[: int(self.pair_share * head_dim // 2)]
        if self.kind in ("linear", "proportional"):
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
        if self.kind == "longrope":
            frequencies = frequencies / np.array(self.long_factors, np.float32)
        return frequencies.astype(np.float32)


@dataclass(frozen=True)
class QueryScale:
    """A factor of queries, 1 + weight * log(1 + (position + first) // period)."""

    weight: float
    period: int
    first: int = 0


def read_query_scale(raw: Mapping[str, Any], max_positions: int) -> QueryScale | None:
    """Return the factor of queries; None if it is 1 at all positions."""
    own = _given(raw)
    if not own.get("llama_4_scaling_beta"):
        return None
    period = positive_int(own, _ORIGINAL, default=max_positions)
    return QueryScale(positive_float(own, "llama_4_scaling_beta"), period)


def read_unrotated_query_scale(raw: Mapping[str, Any]) -> QueryScale | None:
    """Return the factor of queries of layers without rotation; None if it is 1."""
    if not raw.get("attn_temperature_tuning"):  # some configs have a number
        return None
    scale = positive_float(raw, "attn_scale")
    return QueryScale(scale, positive_int(raw, "floor_scale"), first=1)


def read_rope(raw: Mapping[str, Any], kind: LayerKind, max_positions: int) -> RopeConfig:
    """Return the rotary embedding of layers of one kind.

    Transformers 5 writes `rope_parameters`, for all layers or by kind of layer. Before, there were
    `rope_theta` and `rope_scaling`; if layers with a window had a separate base
    (`rope_local_base_freq`), these two applied to the rest.
    """
    given = _given(raw)
    if raw.get(_ORIGINAL) is not None:
        given = given | {_ORIGINAL: positive_int(raw, _ORIGINAL)}
    has_own_base = kind == SLIDING and raw.get("rope_local_base_freq") is not None
    is_unscaled = kind == SLIDING and architecture_name(raw) in _UNSCALED_WINDOWS
    base = {"rope_theta": raw.get("rope_local_base_freq" if has_own_base else "rope_theta")}
    base |= {"partial_rotary_factor": _rotated_share(raw)}
    if any(name in given for name in (FULL, SLIDING)):
        own = base | object_field(given, kind)
    else:
        own = base if has_own_base or is_unscaled else base | given
    share = positive_float(own, "partial_rotary_factor", default=1.0)
    if own.get("rope_type", own.get("type")) == "proportional" and share <= 1:
        theta = positive_float(own, "rope_theta", default=10000.0)
        factor = positive_float(own, "factor", default=1.0)
        return RopeConfig(theta, "proportional", factor, pair_share=share)
    if has_latents(raw) and rotates_partly(raw):
        _check_latent_share(raw, own.get("partial_rotary_factor"))
        share = 1.0
    if share > 1 or (share < 1 and not rotates_partly(raw)):
        most = "at most 1" if rotates_partly(raw) else "1.0"
        raise ModelConfigError(f"partial_rotary_factor must be {most}, got {share!r}")
    return replace(_scaled_rope(own, max_positions), share=share)


def _check_latent_share(raw: Mapping[str, Any], share: float | None) -> None:
    """Raise ModelConfigError unless `share` of a query is the part of it that latents rotate."""
    rotated, still = (positive_int(raw, f"qk_{part}_head_dim") for part in ("rope", "nope"))
    if share is not None and int((rotated + still) * share) != rotated:
        raise ModelConfigError(
            f"partial_rotary_factor must be {rotated / (rotated + still)} (qk_rope_head_dim / "
            f"(qk_rope_head_dim + qk_nope_head_dim)), got {share!r}"
        )


def _rotated_share(raw: Mapping[str, Any]) -> float | None:
    share: float | None = raw.get("partial_rotary_factor")
    if share is None and raw.get("rotary_dim") is not None:
        return positive_int(raw, "rotary_dim") / positive_int(raw, "head_dim")
    return share


def _scaled_rope(own: Mapping[str, Any], max_positions: int) -> RopeConfig:
    theta = positive_float(own, "rope_theta", default=10000.0)
    kind = own.get("rope_type", own.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", positive_float(own, "factor"))
    original = positive_int(own, _ORIGINAL, default=max_positions)
    if kind == "llama3":
        low, high = (positive_float(own, f"{end}_freq_factor") for end in ("low", "high"))
        return RopeConfig(theta, kind, positive_float(own, "factor"), low, high, original)
    if kind == "yarn":
        return _yarn(own, theta, original)
    if kind == "longrope":
        return _longrope(own, theta, original, max_positions)
    raise ModelConfigError(
        "rope type must be one of default, linear, llama3, yarn, longrope, proportional, got "
        f"{kind!r}"
    )


def _longrope(
    own: Mapping[str, Any], theta: float, original: int, max_positions: int
) -> RopeConfig:
    factor = positive_float(own, "factor", default=max_positions / original)
    attention_factor = optional_float(own, "attention_factor")
    if attention_factor is None:
        if original < 2:
            raise ModelConfigError(f"{_ORIGINAL} must be 2 or more with longrope, got {original}")
        growth = math.log(factor) / math.log(original) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + growth)
    return RopeConfig(
        theta,
        "longrope",
        factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        long_factors=positive_floats(own, "long_factor"),
        short_factors=positive_floats(own, "short_factor"),
    )


def _yarn(own: Mapping[str, Any], theta: float, original_max_positions: int) -> RopeConfig:
    if theta <= 1:
        raise ModelConfigError(f"rope_theta must be above 1 with rope type yarn, got {theta!r}")
    factor = positive_float(own, "factor")

    attention_factor = optional_float(own, "attention_factor")
    if attention_factor is None:
        above, below = (_mscale(own, name) for name in ("mscale", "mscale_all_dim"))
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


def _given(raw: Mapping[str, Any]) -> dict[str, Any]:
    return object_field(raw, "rope_parameters") or object_field(raw, "rope_scaling")


def score_factor(raw: Mapping[str, Any]) -> float:
    """Return YaRN's factor of latent attention's scores; 1 without YaRN."""
    own = _given(raw)
    if own.get("rope_type", own.get("type", "default")) == "default":
        return 1.0
    weight = _mscale(own, "mscale_all_dim")
    return 1.0 if weight is None else _yarn_growth(positive_float(own, "factor"), weight) ** 2


def _mscale(own: Mapping[str, Any], name: str) -> float | None:
    """Return a weight of YaRN's growth; None if it is absent, or 0, which means the same."""
    return None if own.get(name) == 0 else optional_float(own, name)


def _yarn_growth(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

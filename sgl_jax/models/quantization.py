"""The quantized matrices of a model: a scheme for each, and its layout in files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from sgl_jax.core.layer_configs import Scheme

# The layouts of matrices in files; `checkpoint.stored` has a reader for each.
Packing = Literal["float", "plain", "compressed", "awq", "gptq", "mxfp4"]
# Schemes to which floats can be quantized at load, by the values of `--quantization`.
AT_LOAD: Mapping[str, Scheme] = MappingProxyType(
    {
        "int8": Scheme("int8"),
        "fp8": Scheme("fp8"),
        "int4": Scheme("int4", 128),
        "w8a8_int8": Scheme("int8", activation="int8"),
        "w8a8_fp8": Scheme("fp8", activation="fp8"),
    }
)

_SHARED_EXPERT = ("shared_expert", "shared_experts")  # the names in Qwen and DeepSeek
_PER_LAYER = ("per_layer_input_gate", "per_layer_projection")  # Gemma 4
# The parts of a layer that checkpoints quantize, relative to it; expert 0 stands for all experts.
MODULES = (
    *(f"self_attn.{x}_proj" for x in "qkvo"),
    *(f"self_attn.{x}" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
    *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
    *(f"mlp.experts.0.{x}_proj" for x in ("gate", "up", "down")),
    *(f"mlp.experts.{x}_proj" for x in ("gate_up", "down")),
    *(f"mlp.{x}.{y}_proj" for x in _SHARED_EXPERT for y in ("gate", "up", "down")),
    *(f"linear_attn.in_proj_{x}" for x in ("qkvz", "qkv", "z", "ba", "b", "a")),
    "linear_attn.out_proj",
    *(f"experts.0.{x}_proj" for x in ("gate", "up", "down")),  # Gemma 4
    *_PER_LAYER,
)
_LINEAR_GATES = ("in_proj_ba", "in_proj_b", "in_proj_a")  # too small to be worth quantizing
# Prefixes of layers, see `Architecture`. In a model with a text part, files and config may differ.
_BODIES = ("model", "model.language_model", "language_model.model")
_LAYER = re.compile(rf"(?:{'|'.join(map(re.escape, _BODIES))})\.(layers\..*)")
_EXPERT = re.compile(r"\bexperts\.\d+\.")


class Stored(NamedTuple):
    """The layout of a quantized matrix's parts in files."""

    packing: Packing
    scales: str = "weight_scale"  # the name of scales, in place of "weight"
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale; None: not blocks
    zero_points_less_one: bool = False  # stored zero points are one less than their values


class Rule(NamedTuple):
    """The scheme of some matrices."""

    scheme: Scheme
    stored: Stored


@dataclass(frozen=True)
class QuantizationConfig:
    """The quantized matrices of a checkpoint, and their schemes.

    Patterns are names of modules, whole or in part, or regular expressions after "re:". The first
    matching rule applies; None: the module is not quantized.
    """

    rules: tuple[tuple[tuple[str, ...], Rule | None], ...]  # patterns, () matches all, and a rule
    ignored: tuple[str, ...] = ()  # patterns of matrices to leave as floats
    has_kv_scales: bool = False  # the checkpoint has scales of an 8-bit KV cache

    @property
    def scheme_names(self) -> list[str]:
        """Return the names of the schemes for display, without duplicates."""
        return list(dict.fromkeys(rule.scheme.name for _, rule in self.rules if rule))

    def rule_of(self, module: str) -> Rule | None:
        """Return the rule for a module by its name in the checkpoint; None if it is not quantized.

        A pattern matches a layer's module if it does so with any prefix of layers.
        """
        module = of_first_expert(module)
        in_layer = _LAYER.fullmatch(module)
        names = [f"{body}.{in_layer[1]}" for body in _BODIES] if in_layer else [module]
        if _any_fits(self.ignored, names):
            return None
        for patterns, rule in self.rules:
            if not patterns or _any_fits(patterns, names):
                return rule
        return None

    def of_layer(self, layer: int) -> tuple[tuple[str, Rule], ...]:
        """Return the rules of a layer's modules, by their names relative to it."""
        return self.under(f"{_BODIES[0]}.layers.{layer}.")

    def under(self, prefix: str) -> tuple[tuple[str, Rule], ...]:
        """Return the rules of modules with names under `prefix`, by their relative names."""
        found = ((module, self.rule_of(prefix + module)) for module in MODULES)
        return tuple((module, rule) for module, rule in found if rule is not None)


def rule_of_module(rules: tuple[tuple[str, Rule], ...], module: str) -> Rule | None:
    """Return the rule of a layer's module; `module` is relative to the layer."""
    return dict(rules).get(of_first_expert(module))


def of_first_expert(module: str) -> str:
    """Return the name of the same matrix of expert 0, which stands for all."""
    return _EXPERT.sub("experts.0.", module)


def _any_fits(patterns: tuple[str, ...], names: list[str]) -> bool:
    return any(_fits(pattern, name) for pattern in patterns for name in names)


def _fits(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."


def quantize_at_load(scheme: Scheme) -> QuantizationConfig:
    """Return a configuration that quantizes all layers' matrices at load except the smallest."""
    rule = Rule(scheme, Stored("float"))
    return QuantizationConfig((((), rule),), ("lm_head", *_LINEAR_GATES, *_PER_LAYER))

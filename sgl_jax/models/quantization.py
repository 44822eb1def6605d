"""The quantized matrices of a model: a scheme for each, and its layout in files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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

# Matrices too small to be worth quantizing: gates of gated delta nets, and Gemma 4's projections of
# a layer's embeddings.
_SMALL = (
    *("in_proj_ba", "in_proj_b", "in_proj_a", "b_proj"),
    *("per_layer_input_gate", "per_layer_projection"),
)
# Prefixes of layers, see `Architecture`. In a model with a text part, files and config may differ.
_BODIES = ("model", "model.language_model", "language_model.model", "backbone")
_LAYER = re.compile(rf"(?:{'|'.join(map(re.escape, _BODIES))})\.(layers\..*)")
_EXPERT = re.compile(r"\bexperts\.\d+\.")


class Stored(NamedTuple):
    """The layout of a quantized matrix's parts in files."""

    packing: Packing
    scales: str = "weight_scale"  # the name of scales, in place of "weight"
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale; None: not blocks
    zero_points_less_one: bool = False  # stored zero points are one less than their values
    input_scale: str = "input_scale"  # the name of the activations' scale


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

    def of_layer(self, layer: int) -> "LayerRules":
        return LayerRules(self, f"{_BODIES[0]}.layers.{layer}.")


@dataclass(frozen=True)
class LayerRules:
    """The rules of a layer's modules, by their names relative to the layer."""

    config: QuantizationConfig | None = None  # None: all are floats
    prefix: str = ""  # of the layer's modules

    def of(self, module: str) -> Rule | None:
        return None if self.config is None else self.config.rule_of(self.prefix + module)


@dataclass(frozen=True)
class RecordingRules(LayerRules):
    """Rules of a layer of floats, with a list of the modules that its declaration asks for."""

    modules: list[str] = field(default_factory=list)

    def of(self, module: str) -> Rule | None:
        self.modules.append(module)
        return None


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
    return QuantizationConfig((((), rule),), ("lm_head", *_SMALL))

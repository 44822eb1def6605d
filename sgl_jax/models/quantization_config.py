"""Reading of `quantization_config` in config.json.

An unsupported scheme or setting is refused by name.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from sgl_jax.core.layer_configs import MXFP4_GROUP, ActivationFormat, Scheme, WeightFormat
from sgl_jax.models.config_fields import ModelConfigError, is_int
from sgl_jax.models.quantization import QuantizationConfig, Rule, Stored, of_first_expert

_ALL = "Linear"  # the class of all matrices, as a target


def read_quantization(raw: Mapping[str, Any]) -> QuantizationConfig | None:
    """Return the contents of `quantization_config` in config.json's `raw`; None if it is absent.

    Raises ModelConfigError for unsupported schemes.
    """
    given = raw.get("quantization_config") or raw.get("compression_config")
    if not given:
        return None
    if not isinstance(given, dict):
        raise ModelConfigError(f"quantization_config must be an object, got {given!r}")
    method = given.get("quant_method")
    readers: dict[Any, Callable[[Mapping[str, Any]], QuantizationConfig]] = {
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": _mxfp4,
        "modelopt": _modelopt,
    }
    if method not in readers:
        known = ", ".join(readers)
        raise ModelConfigError(f"quant_method must be one of {known}, got {method!r}")
    return readers[method](given)


def _compressed_tensors(given: Mapping[str, Any]) -> QuantizationConfig:
    for name in ("sparsity_config", "transform_config"):
        if given.get(name):
            raise ModelConfigError(f"{name} of compressed-tensors is not supported")
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelConfigError("compressed-tensors needs config_groups")
    rules: dict[str, Rule] = {}
    for own in groups.values():
        rule = _compressed_rule(own, own.get("format") or given.get("format"))
        for target in map(of_first_expert, _names(own, "targets")):
            if rules.setdefault(target, rule) != rule:
                raise ModelConfigError(
                    f"config_groups have several schemes for the target {target!r}; experts of a "
                    "layer must be quantized alike"
                )
    ignored, cache = _names(given, "ignore"), given.get("kv_cache_scheme")
    if cache:
        _check(cache, "kv_cache_scheme", num_bits=8, type="float", dynamic=False)
        _check(cache, "kv_cache_scheme", strategy="tensor", symmetric=True)
    config = QuantizationConfig(_by_precedence(rules), ignored, bool(cache))
    if config.rule_of("lm_head") is not None:
        raise ModelConfigError("a quantized lm_head is not supported: ignore must name it")
    return config


def _by_precedence(rules: Mapping[str, Rule]) -> tuple[tuple[tuple[str, ...], Rule], ...]:
    """Order targets like compressed-tensors if several match a module.

    Names come first, then regular expressions, by their text, then the class of all matrices.
    Names, which may be parts, are ordered by length, the longest first.
    """

    def key(target: str) -> tuple[int, int, str]:
        if target == _ALL or target.startswith("re:"):
            return 2 if target == _ALL else 1, 0, target
        return 0, -len(target), target

    targets = sorted(rules, key=key)
    return tuple((() if own == _ALL else (own,), rules[own]) for own in targets)


def _compressed_rule(own: Mapping[str, Any], layout: Any) -> Rule:
    layouts = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
    if layout not in layouts:
        raise ModelConfigError(
            f"the format of compressed-tensors must be one of {', '.join(layouts)}, got {layout!r}"
        )
    weights = own.get("weights")
    if not isinstance(weights, dict):
        raise ModelConfigError("config_groups of compressed-tensors must have weights")
    if own.get("output_activations"):
        raise ModelConfigError("quantized output_activations are not supported")
    bits, kind = weights.get("num_bits"), weights.get("type")
    packed = layout == "pack-quantized"
    formats: dict[Any, WeightFormat] = {(8, "int"): "int8", (8, "float"): "fp8", (4, "int"): "int4"}
    weight = formats.get((bits, kind))
    if weight is None or (weight == "int4") != (packed and bits == 4):
        raise ModelConfigError(
            f"weights of {bits} bits of type {kind} as {layout} are not supported; supported: "
            "int of 8 bits, float of 8 bits, and int of 4 bits as pack-quantized"
        )
    is_symmetric = weights.get("symmetric", True)
    if not is_symmetric and not packed:
        raise ModelConfigError(f"asymmetric weights are supported as pack-quantized, not {layout}")
    group, block = _granularity(weights)
    activation, is_static = _activations(own.get("input_activations"), weight)
    if group is not None:  # sums of 8-bit activations would be scaled group by group
        activation, is_static = None, False
    scheme = Scheme(
        weight,
        group,
        has_zero_points=not is_symmetric,
        # "static" order leaves groups unchanged.
        has_input_order=weights.get("actorder") in ("group", "dynamic"),
        activation=activation,
        has_input_scale=is_static,
    )
    return Rule(scheme, Stored("compressed" if packed else "plain", block=block))


def _granularity(weights: Mapping[str, Any]) -> tuple[int | None, tuple[int, int] | None]:
    """Return the inputs that share a scale, None for all; and such blocks of outputs and inputs."""
    strategy = weights.get("strategy")
    if strategy in ("channel", "tensor"):
        return None, None
    if strategy == "group":
        group = _size(weights, "group_size")
        return group, None
    if strategy == "block":
        block = _block(weights, "block_structure")
        return block[1], block
    raise ModelConfigError(
        f"strategy must be one of tensor, channel, group, block for weights, got {strategy!r}"
    )


def _activations(given: Any, weight: WeightFormat) -> tuple[ActivationFormat | None, bool]:
    """Return the activations' format, None if not quantized, and whether their scale is stored."""
    if not given:
        return None, False
    expected: ActivationFormat | None = weight if weight in ("int8", "fp8") else None
    kind = {"int8": "int", "fp8": "float"}.get(weight)
    if expected is None or given.get("num_bits") != 8 or given.get("type") != kind:
        raise ModelConfigError(
            f"input_activations = {given!r} with {weight} weights are not supported; supported: "
            "8 bits of the weights' type"
        )
    if not given.get("symmetric", True):
        raise ModelConfigError("asymmetric input_activations are not supported")
    is_static = not given.get("dynamic", False)
    allowed = ("tensor",) if is_static else ("token", "tensor", "group")
    if given.get("strategy") not in allowed:
        raise ModelConfigError(
            f"strategy of {'static' if is_static else 'dynamic'} input_activations must be one of "
            f"{', '.join(allowed)}, got {given.get('strategy')!r}"
        )
    return expected, is_static


def _fp8(given: Mapping[str, Any]) -> QuantizationConfig:
    if given.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ModelConfigError(f"fmt of fp8 must be e4m3, got {given['fmt']!r}")
    ignored = (*_names(given, "modules_to_not_convert"), *_names(given, "ignored_layers"))
    if given.get("weight_block_size") is not None:
        block = _block(given, "weight_block_size")
        # Activations stay floats: their sums would be scaled block by block.
        stored = Stored("plain", scales="weight_scale_inv", block=block)
        rule = Rule(Scheme("fp8", block[1]), stored)
    else:
        schemes = ("dynamic", "static")
        if given.get("activation_scheme") not in schemes:
            raise ModelConfigError(
                f"activation_scheme must be one of {', '.join(schemes)}, got "
                f"{given.get('activation_scheme')!r}"
            )
        is_static = given["activation_scheme"] == "static"
        scheme = Scheme("fp8", activation="fp8", has_input_scale=is_static)
        stored = Stored("plain")
        if "weight_block_size" in given:  # null: transformers, with other names than AutoFP8
            stored = Stored("plain", "weight_scale_inv", input_scale="activation_scale")
        rule = Rule(scheme, stored)
    return QuantizationConfig((((), rule),), (*ignored, "lm_head"))


def _awq(given: Mapping[str, Any]) -> QuantizationConfig:
    _check(given, "awq", version="gemm")
    bits = given.get("bits", given.get("w_bit"))
    if bits != 4:
        raise ModelConfigError(f"awq is supported with 4 bits, got {bits!r}")
    group = _group_or_all(given, "group_size" if "group_size" in given else "q_group_size")
    has_zeros = given.get("zero_point", True)
    rule = Rule(Scheme("int4", group, has_zeros), Stored("awq", "scales"))
    return QuantizationConfig(
        (((), rule),), (*_names(given, "modules_to_not_convert"), "lm_head", "mlp.gate")
    )


def _gptq(given: Mapping[str, Any]) -> QuantizationConfig:
    if given.get("bits") != 4:
        raise ModelConfigError(f"gptq is supported with 4 bits, got {given.get('bits')!r}")
    if given.get("lm_head"):
        raise ModelConfigError("a quantized lm_head is not supported")
    layout = given.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise ModelConfigError(f"checkpoint_format must be gptq or gptq_v2, got {layout!r}")
    group = _group_or_all(given, "group_size")
    has_order = bool(given.get("desc_act", False)) and group is not None
    # Symmetric files store zero points, too: all are 8, which the reader checks.
    scheme = Scheme("int4", group, not given.get("sym", True), has_order)
    stored = Stored("gptq", "scales", zero_points_less_one=layout == "gptq")
    rules = _gptq_rules(given, Rule(scheme, stored))
    return QuantizationConfig(rules, (*_names(given, "modules_to_not_convert"), "lm_head"))


def _gptq_rules(
    given: Mapping[str, Any], rule: Rule
) -> tuple[tuple[tuple[str, ...], Rule | None], ...]:
    """Apply `rule` to all modules except those excluded by `dynamic` or by the list of modules.

    A key of `dynamic` is a regular expression of names: after "-:", of modules to leave as floats;
    after "+:" or nothing, of modules to quantize. The first match applies.
    """
    listed: Any = given.get("modules_in_block_to_quantize") or []
    if isinstance(listed, list):  # names, or lists of names
        listed = [name for own in listed for name in (own if isinstance(own, list) else [own])]
    names = _names({"modules_in_block_to_quantize": listed}, "modules_in_block_to_quantize")
    patterns = tuple(dict.fromkeys(map(of_first_expert, names)))
    dynamic: Any = given.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ModelConfigError(f"dynamic of gptq must be an object, got {dynamic!r}")
    rules: list[tuple[tuple[str, ...], Rule | None]] = []
    for key, settings in dynamic.items():
        is_left_out = key.startswith("-:")
        if settings and not is_left_out:
            raise ModelConfigError(
                f"settings of gptq by module are not supported: dynamic of {key!r} must be empty, "
                f"got {settings!r}"
            )
        expression = "re:" + (key[2:] if key[:2] in ("-:", "+:") else key)
        rules.append((_names({"dynamic": [expression]}, "dynamic"), None if is_left_out else rule))
    return (*rules, (patterns, rule))


def _mxfp4(given: Mapping[str, Any]) -> QuantizationConfig:
    rule = Rule(Scheme("mxfp4", MXFP4_GROUP), Stored("mxfp4"))
    return QuantizationConfig(((("mlp.experts",), rule),), _names(given, "modules_to_not_convert"))


def _modelopt(given: Mapping[str, Any]) -> QuantizationConfig:
    """Read the settings of NVIDIA's Model Optimizer. In `hf_quant_config.json` they are below
    `quantization` and have other names than in config.json."""
    own = given.get("quantization", given)
    if not isinstance(own, dict):
        raise ModelConfigError(f"quantization of modelopt must be an object, got {own!r}")
    algorithm = str(own.get("quant_algo")).upper()
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise ModelConfigError(
            "quant_algo of modelopt must be FP8 or FP8_PER_CHANNEL_PER_TOKEN, got "
            f"{own.get('quant_algo')!r}"
        )
    cache = own.get("kv_cache_quant_algo", own.get("kv_cache_scheme"))
    if isinstance(cache, dict):
        _check(cache, "kv_cache_scheme", num_bits=8, type="float")
    elif cache not in (None, "FP8"):
        raise ModelConfigError(f"kv_cache_quant_algo of modelopt must be FP8, got {cache!r}")
    scheme = Scheme("fp8", activation="fp8", has_input_scale=algorithm == "FP8")
    wildcards = (*_names(own, "exclude_modules"), *_names(own, "ignore"))
    ignored = [f"re:{fnmatch.translate(name)}" if "*" in name else name for name in wildcards]
    rule = Rule(scheme, Stored("plain"))
    return QuantizationConfig((((), rule),), (*ignored, "lm_head"), bool(cache))


def _check(given: Any, owner: str, **allowed: Any) -> None:
    if not isinstance(given, dict):
        raise ModelConfigError(f"{owner} must be an object, got {given!r}")
    for name, value in allowed.items():
        found = given.get(name, value)
        if isinstance(found, str):
            found = found.lower()
        if found != value:
            raise ModelConfigError(f"{name} of {owner} must be {value!r}, got {found!r}")


def _names(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = given.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ModelConfigError(f"{name} must be a list of names, got {value!r}")
    for pattern in value:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ModelConfigError(f"{name}: {pattern!r} is no pattern: {error}") from error
    return tuple(value)


def _size(given: Mapping[str, Any], name: str) -> int:
    value: Any = given.get(name)
    if not is_int(value) or value < 1:
        raise ModelConfigError(f"{name} must be a positive integer, got {value!r}")
    return int(value)


def _group_or_all(given: Mapping[str, Any], name: str) -> int | None:
    """Return a group size; None for -1, one group of all inputs."""
    return None if given.get(name) == -1 else _size(given, name)


def _block(given: Mapping[str, Any], name: str) -> tuple[int, int]:
    value = given.get(name)
    if not isinstance(value, list) or len(value) != 2 or not all(map(is_int, value)):
        raise ModelConfigError(f"{name} must be two positive integers, got {value!r}")
    if min(value) < 1:
        raise ModelConfigError(f"{name} must be two positive integers, got {value!r}")
    return value[0], value[1]

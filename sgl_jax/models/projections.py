"""Linear layers of a model, quantized if its checkpoint has them so."""

import math

from sgl_jax.layers.linear import Linear, Split
from sgl_jax.layers.quantized_matrix import Quantized
from sgl_jax.layers.sources import Dequantized, Source
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config_fields import ModelConfigError
from sgl_jax.models.layer_specs import LayerSpec
from sgl_jax.models.quantization import Rule


def linear(
    spec: LayerSpec,
    options: BuildOptions,
    weight: Source,
    split: Split = "neither",
    bias: Source | None = None,
) -> Linear:
    """Declare a layer's linear map; tensor names of `weight` are relative to the layer.

    Raises ModelConfigError, which names them, if tensors of one matrix have different rules.
    """
    quantized = quantization_of(spec, options, weight)
    scatters = options.sequence_parallel
    return Linear(weight, options.dtype, split, bias, quantized, scatters=scatters)


def as_floats(spec: LayerSpec, weight: Source) -> Source:
    """Return `weight` as floats, for a matrix that no quantized product uses.

    Raises ModelConfigError for a scheme with numbers that are not values times scales.
    """
    rule = _rule(spec, weight)
    if rule is None or rule.stored.packing == "float":
        return weight
    scheme = rule.scheme
    if scheme.has_zero_points or scheme.has_input_order:
        module = next(iter(weight.tensors())).name.removesuffix(".weight")
        raise ModelConfigError(f"{module} is quantized as {scheme.name}, which is not supported")
    inputs = weight.shape[weight.input_axis]
    return Dequantized(weight, scheme.group_size and math.gcd(scheme.group_size, inputs))


def quantization_of(spec: LayerSpec, options: BuildOptions, weight: Source) -> Quantized | None:
    """Return the scheme and product of a layer's matrix; None for floats.

    Raises ModelConfigError, which names them, if tensors of one matrix have different rules.
    """
    rule = _rule(spec, weight)
    if rule is None:
        return None
    return Quantized(rule.scheme, options.kernels.multiply_quantized, options.tp_size)


def _rule(spec: LayerSpec, weight: Source) -> Rule | None:
    modules = [key.name.removesuffix(".weight") for key in weight.tensors()]
    first, *others = map(spec.rules.of, modules)
    for module, rule in zip(modules[1:], others, strict=True):
        if rule != first:
            schemes = (own.scheme.name if own else "floats" for own in (first, rule))
            raise ModelConfigError(
                f"{modules[0]} and {module} make one matrix and must be quantized alike; they are "
                + " and ".join(schemes)
            )
    return first

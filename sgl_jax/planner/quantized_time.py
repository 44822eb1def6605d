"""The time of the kernels that multiply with quantized matrices.

Products that XLA computes are part of the compiler's cycles.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sgl_jax.kernels.quantized_matmul.tpu import VALUES_NAME, kernel_of
from sgl_jax.planner.quantized_products import ExpertFormat, QuantizedProduct
from sgl_jax.planner.step_work import KernelTime
from sgl_jax.planner.topology import Chip

_MI = 2**20


class ProductBundles(NamedTuple):
    """Instructions per 2**20 values of a matrix, by format."""

    per_token: float  # product of dequantized values
    per_token_as_values: Mapping[str, float]  # product of quantized values
    activations: float  # to quantize 2**10 activations
    conversion: Mapping[str, int]  # to dequantize with scales
    unscaled: Mapping[str, int]  # to dequantize without scales (experts: the result is scaled)


# Counted by `python -m benchmarks.kernels.quantized_cost`.
PRODUCT_BUNDLES: Mapping[str, ProductBundles] = MappingProxyType(
    {
        "TPU v5 lite": ProductBundles(
            11.3,
            {"int8": 6.74, "fp8": 13.1},
            3.04,
            {"int8": 1014, "int4": 1047, "fp8": 2310, "mxfp4": 5246},
            {"int8": 41, "fp8": 1126},
        ),
        "TPU v6 lite": ProductBundles(
            4.94,
            {"int8": 2.36, "fp8": 4.65},
            2.84,
            {"int8": 403, "int4": 398, "fp8": 1910, "mxfp4": 1475},
            {"int8": 0, "fp8": 1468},
        ),
        "TPU v5": ProductBundles(
            11.3,
            {"int8": 6.77, "fp8": 13.2},
            3.09,
            {"int8": 1042, "int4": 1075, "fp8": 2337, "mxfp4": 5245},
            {"int8": 42, "fp8": 1127},
        ),
        "TPU7x": ProductBundles(
            2.65,
            {"int8": 2.67, "fp8": 1.15},
            1.87,
            {"int8": 533, "int4": 524, "fp8": 533, "mxfp4": 1514},
            {"int8": 0, "fp8": 0},
        ),
    }
)


def conversion_bundles(experts: ExpertFormat | None, chip: Chip) -> int:
    """Return the instructions to dequantize 2**20 values of experts; 0 for None (floats)."""
    if experts is None:
        return 0
    own = PRODUCT_BUNDLES[chip.device_kind]
    return (own.unscaled if experts.scales_outputs else own.conversion)[experts.weight]


def quantized_time(
    products: tuple[QuantizedProduct, ...], num_tokens: int, chip: Chip
) -> KernelTime:
    """Return the time of the kernels in a step of `num_tokens`, including padding."""
    num_bytes = seconds = 0.0
    for own in products:
        if kernel_of(own.scheme, num_tokens, own.inputs, own.groups) is not None:
            flops = 2.0 * num_tokens * own.inputs * own.outputs
            least = chip.matrix_seconds(flops, own.scheme.activation)
            num_bytes += own.num_layers * own.num_bytes
            seconds += own.num_layers * max(_cycles(own, num_tokens, chip) / chip.clock_hz, least)
    return KernelTime(num_bytes / chip.hbm_bytes_per_s, seconds, feeds_mxu=True)


def _cycles(own: QuantizedProduct, num_tokens: int, chip: Chip) -> float:
    bundles = PRODUCT_BUNDLES[chip.device_kind]
    values = own.inputs * own.outputs / _MI
    if kernel_of(own.scheme, num_tokens, own.inputs, own.groups) == VALUES_NAME:
        quantized = 0 if own.shares_activations else num_tokens * own.inputs / 2**10
        multiplied = values * num_tokens * bundles.per_token_as_values[own.scheme.weight]
        return multiplied + quantized * bundles.activations
    return values * (bundles.conversion[own.scheme.weight] + num_tokens * bundles.per_token)

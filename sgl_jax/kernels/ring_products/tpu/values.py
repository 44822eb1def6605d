"""The kernel that quantizes normalised hidden states."""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.core.quantization import ActivationFormat
from sgl_jax.kernels.quantized_matmul.numbers import value_dtype
from sgl_jax.kernels.quantized_matmul.tpu import QUANTIZE_NAME, activation_rows
from sgl_jax.kernels.ring_products.normalised_values import quantize_normalised
from sgl_jax.kernels.tpu_chip import VMEM_LIMIT_BYTES


def quantize_normalised_rows(
    x: jax.Array,
    factors: jax.Array,
    by_row: jax.Array,
    scale: jax.Array,
    activation: ActivationFormat,
) -> jax.Array:
    """See `QuantizeNormalised`: XLA packs values slowly."""
    num_tokens, columns = x.shape
    rows = activation_rows(num_tokens, columns)

    def kernel(x: Any, factors: Any, by_row: Any, scale: Any, out: Any) -> None:
        out[...] = quantize_normalised(x[...], factors[...], by_row[...], scale[...], activation)

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, width), lambda n: (n, 0))

    values: jax.Array = pl.pallas_call(
        kernel,
        name=QUANTIZE_NAME,
        out_shape=jax.ShapeDtypeStruct(x.shape, value_dtype(activation)),
        grid=(pl.cdiv(num_tokens, rows),),
        in_specs=[
            of_rows(columns),
            pl.BlockSpec((1, columns), lambda n: (0, 0)),
            of_rows(1),
            of_rows(1),
        ],
        out_specs=of_rows(columns),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
    )(x, factors, by_row, scale)
    return values

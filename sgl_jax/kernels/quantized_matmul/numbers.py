"""Quantized matrices: their arrays, their product, and conversion to numbers and back.

The functions are traced, and run on all platforms.

MXFP4 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A value holds a magnitude's index in that
list, 0 to 7, with the number's sign, as int4. A few operations that every vector unit has convert
it to a number, whereas a conversion from 4-bit floats needs a chip that supports them. A scale is a
power of two, stored as its exponent plus 127: the exponent bits of the float.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.core.layer_configs import GREATEST, ActivationFormat, Scheme, WeightFormat

_VALUE_DTYPES: dict[str, DTypeLike] = {
    "int8": jnp.int8,
    "int4": jnp.int4,
    "mxfp4": jnp.int4,
    "fp8": jnp.float8_e4m3fn,
}


def value_dtype(weight: WeightFormat | ActivationFormat) -> jnp.dtype:
    return jnp.dtype(_VALUE_DTYPES[weight])


def sums_dtype(dtype: DTypeLike) -> jnp.dtype:
    return jnp.dtype(jnp.int32 if dtype == jnp.int8 else jnp.float32)


def scale_dtype(weight: WeightFormat, dtype: DTypeLike, *, in_groups: bool) -> jnp.dtype:
    if weight == "mxfp4":
        return jnp.dtype(jnp.uint8)
    return jnp.dtype(dtype if in_groups else jnp.float32)


def as_numbers(values: jax.Array, weight: WeightFormat, dtype: DTypeLike) -> jax.Array:
    """Convert stored values to numbers of `dtype`, without scales, and doubled for MXFP4.

    The numbers of each format are exact in bfloat16.
    """
    numbers = values.astype(dtype)
    if weight != "mxfp4":
        return numbers
    # 0 to 7 become 0, 1, 2, 3, 4, 6, 8 and 12, and their negatives the negatives.
    return 4 * numbers - jnp.clip(numbers, -4, 4) - 2 * jnp.clip(numbers, -6, 6)


def as_scales(scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Convert stored scales to factors of `as_numbers`; MXFP4's least scale, 2**-127, becomes 0."""
    if scales.dtype != jnp.uint8:
        return scales.astype(dtype)
    wide = scales.astype(jnp.uint32) << 23
    return (lax.bitcast_convert_type(wide, jnp.float32) * 0.5).astype(dtype)


def dequantized(
    values: jax.Array,
    scales: jax.Array,
    zero_points: jax.Array | None,
    weight: WeightFormat,
    dtype: DTypeLike,
) -> jax.Array:
    """Convert quantized matrices to numbers.

    Args:
        values: [..., in, out].
        scales: [..., groups, out], each for in / groups adjacent inputs.
        zero_points: the same shape as scales; None if all are 0.
        weight: the format.
        dtype: dtype of the result, [..., in, out].
    """
    *outer, groups, outputs = scales.shape
    by_group = values.reshape(*outer, groups, -1, outputs)
    numbers = as_numbers(by_group, weight, dtype)
    if zero_points is not None:
        numbers = numbers - zero_points[..., None, :].astype(dtype)
    numbers = numbers * as_scales(scales, dtype)[..., None, :]
    return numbers.reshape(values.shape)


def quantize_activations(
    x: jax.Array, activation: ActivationFormat, scale: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Quantize activations [T, in] to values [T, in], and scales float32 [T, 1] or [1].

    Each token's scale fits its greatest magnitude, unless `scale` float32 [1] is given.
    """
    greatest, wide = GREATEST[activation], x.astype(jnp.float32)
    if scale is None:
        scale = jnp.max(jnp.abs(wide), axis=1, keepdims=True) / greatest
        scale = jnp.where(scale == 0, 1, scale)
    scaled = jnp.clip(wide / scale, -greatest, greatest)
    if activation == "int8":
        scaled = jnp.round(scaled)
    return scaled.astype(value_dtype(activation)), scale


def stored_scales(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Repeat `scale`, float32 [1], for each token of x [T, in]: [T, 1], NaN for non-finite tokens.

    The 8-bit values of such a token may not show this.
    """
    is_finite = jnp.all(jnp.isfinite(x), axis=1, keepdims=True)
    return jnp.where(is_finite, scale, jnp.nan)


class QuantizedArrays(NamedTuple):
    """One chip's part of the arrays of matrices, stacked by layer."""

    values: jax.Array  # [layers, in, out]
    scales: jax.Array  # [layers, groups, out]
    zero_points: jax.Array | None  # same shape as scales
    input_scale: jax.Array | None  # float32 [1], of the current layer's activations

    def of_layer(self, layer: jax.Array) -> "QuantizedArrays":
        """Return one layer's arrays, without the first axis."""
        stacks = self._replace(input_scale=None)
        own = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), stacks)
        of_layer: QuantizedArrays = own._replace(input_scale=self.input_scale)
        return of_layer


class QuantizedMatmul(Protocol):
    """Multiply activations with the current layer's matrix."""

    def __call__(
        self, x: jax.Array, matrices: QuantizedArrays, layer: jax.Array, scheme: Scheme
    ) -> jax.Array:
        """Multiply with the shapes of one chip.

        Args:
            x: [T, in].
            matrices: the matrices of all layers.
            layer: int32 [], the layer's index in the matrices.
            scheme: the matrix's format.

        Returns:
            [T, out] in the dtype of x; summed in float32, or in int32 for products of int8.
        """
        ...

"""Products over a ring as XLA makes them: a whole exchange before or after a whole product."""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.quantization import ActivationFormat
from sgl_jax.kernels.quantized_matmul.numbers import quantize_activations, sums_dtype
from sgl_jax.kernels.ring_products.matrices import Finish, RingMatrix
from sgl_jax.kernels.ring_products.normalised_values import normalised_values


def xla_gather_multiply(
    x: jax.Array,
    norm: jax.Array,
    eps: float,
    matrices: tuple[RingMatrix, ...],
    layer: jax.Array,
    finish: Finish,
    axis: str,
    activation: ActivationFormat | None = None,
) -> jax.Array:
    """See `interface.GatherMultiply`."""
    by_row = None
    if activation is None:
        wide = lax.all_gather(x, axis, axis=1, tiled=True).astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + eps)
        normed = (wide * scale * norm).astype(x.dtype)
    else:
        values, by_row = normalised_values(x, norm, eps, axis, activation)
        normed = lax.all_gather(values, axis, axis=1, tiled=True)
    return finish(*(_product(normed, by_row, own, layer) for own in matrices)).astype(x.dtype)


def xla_multiply_scatter(
    x: jax.Array,
    matrix: RingMatrix,
    layer: jax.Array,
    residual: jax.Array,
    axis: str,
    activation: ActivationFormat | None = None,
) -> jax.Array:
    """See `interface.MultiplyScatter`."""
    by_row = None
    if activation is not None:
        x, by_row = quantize_activations(x, activation, None)
    part = _product(x, by_row, matrix, layer).astype(residual.dtype)
    own: jax.Array = lax.psum_scatter(part, axis, scatter_dimension=1, tiled=True)
    return residual + own


def _product(
    x: jax.Array, by_row: jax.Array | None, matrix: RingMatrix, layer: jax.Array
) -> jax.Array:
    """float32 [T, out]; `by_row` has the scales [T, 1] of x if it is quantized."""
    values = lax.dynamic_index_in_dim(matrix.values, layer, keepdims=False)
    if by_row is None:
        values = values.astype(x.dtype)
    sums = jnp.matmul(x, values, preferred_element_type=sums_dtype(x.dtype)).astype(jnp.float32)
    if by_row is not None:
        sums *= by_row
    if matrix.scales is None:
        return sums
    return sums * lax.dynamic_index_in_dim(matrix.scales, layer, keepdims=False)

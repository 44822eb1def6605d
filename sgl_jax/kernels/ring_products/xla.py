"""Products over a ring as XLA makes them: a whole exchange before or after a whole product."""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.ring_products.matrices import Finish, RingMatrix


def xla_gather_multiply(
    x: jax.Array,
    norm: jax.Array,
    eps: float,
    matrices: tuple[RingMatrix, ...],
    layer: jax.Array,
    finish: Finish,
    axis: str,
) -> jax.Array:
    """See `interface.GatherMultiply`."""
    wide = lax.all_gather(x, axis, axis=1, tiled=True).astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + eps)
    normed = (wide * scale * norm).astype(x.dtype)
    return finish(*(_product(normed, own, layer) for own in matrices)).astype(x.dtype)


def xla_multiply_scatter(
    x: jax.Array, matrix: RingMatrix, layer: jax.Array, residual: jax.Array, axis: str
) -> jax.Array:
    """See `interface.MultiplyScatter`."""
    part = _product(x, matrix, layer).astype(x.dtype)
    own: jax.Array = lax.psum_scatter(part, axis, scatter_dimension=1, tiled=True)
    return residual + own


def _product(x: jax.Array, matrix: RingMatrix, layer: jax.Array) -> jax.Array:
    """float32 [T, out]"""
    values = lax.dynamic_index_in_dim(matrix.values, layer, keepdims=False).astype(x.dtype)
    sums = jnp.matmul(x, values, preferred_element_type=jnp.float32)
    if matrix.scales is None:
        return sums
    return sums * lax.dynamic_index_in_dim(matrix.scales, layer, keepdims=False)

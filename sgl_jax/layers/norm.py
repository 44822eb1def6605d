"""Normalisation of vectors."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.kernels.rms_norm import rms_normalised
from sgl_jax.kernels.row_blocks import row_wise
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, sum_over_tensor
from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.sources import Source


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, see `rms_normalised`."""

    def __init__(
        self, weight: Source, eps: float, dtype: DTypeLike, *, from_one: bool = False
    ) -> None:
        self.weight = parameter(weight, dtype, initial="zeros" if from_one else "ones")
        self.eps = eps
        self.from_one = from_one

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise x [..., size]; the result has x's dtype."""
        return rms_normalised(x, self.weight[...], self.eps, self.from_one)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / deviation(x) * weight + bias over the last axis (arXiv 1607.06450)."""

    def __init__(self, weight: Source, bias: Source, eps: float, dtype: DTypeLike) -> None:
        self.weight = parameter(weight, dtype, initial="ones")
        self.bias = parameter(bias, dtype, initial="zeros")
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise x [T, size]; the result has x's dtype."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        scaled = centred * lax.rsqrt(variance + self.eps)
        result: jax.Array = (scaled * self.weight[...] + self.bias[...]).astype(x.dtype)
        return result


class AllHeadsNorm(nnx.Module):
    """x / rms(x) * weight over all heads of all chips of a rank, for queries or for keys.

    Copies of KV heads do not change it: each head has the same number of copies.
    """

    def __init__(self, weight: Source, eps: float, dtype: DTypeLike) -> None:
        """Declare the norm; `weight` is [heads * head_dim], split by heads."""
        self.weight = parameter(weight, dtype, TENSOR_AXIS, initial="ones")
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise x [T, heads, head_dim]; the result has x's dtype."""
        weight = self.weight[...].reshape(x.shape[1:])
        size = x.shape[1] * x.shape[2] * lax.axis_size(TENSOR_AXIS)

        def squares(x: jax.Array) -> jax.Array:
            wide = x.astype(jnp.float32)
            return jnp.sum(wide * wide, axis=(1, 2), keepdims=True)

        def scaled(x: jax.Array, total: jax.Array) -> jax.Array:
            wide = x.astype(jnp.float32) * lax.rsqrt(total / size + self.eps)
            return wide.astype(x.dtype) * weight

        result: jax.Array = row_wise(scaled, x, sum_over_tensor(row_wise(squares, x)))
        return result

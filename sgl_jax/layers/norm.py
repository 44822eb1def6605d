"""Root mean square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.sources import Source


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, weight: Source, eps: float, dtype: DTypeLike) -> None:
        self.weight = parameter(weight, dtype, initial="ones")
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise x [..., size]; the result has x's dtype."""
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale).astype(x.dtype) * self.weight[...]

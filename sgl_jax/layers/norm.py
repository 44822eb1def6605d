"""Root mean square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.sources import Source


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, computed in float32 (arXiv 1910.07467).

    With `from_one` the factor is 1 + weight, and the product is rounded once, as Gemma has it.
    """

    def __init__(
        self, weight: Source, eps: float, dtype: DTypeLike, *, from_one: bool = False
    ) -> None:
        self.weight = parameter(weight, dtype, initial="zeros" if from_one else "ones")
        self.eps = eps
        self.from_one = from_one

    @property
    def factors(self) -> jax.Array:
        """float32 [size], by which x / rms(x) is multiplied."""
        weight = self.weight[...].astype(jnp.float32)
        return 1.0 + weight if self.from_one else weight

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise x [..., size]; the result has x's dtype."""
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.from_one:
            return (wide * scale * self.factors).astype(x.dtype)
        return (wide * scale).astype(x.dtype) * self.weight[...]

"""Root mean square normalisation."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from sgl_jax.kernels.rms_norm import rms_normalised
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

"""Root mean square normalisation (arXiv 1910.07467) in XLA, for layers and for kernels."""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.row_blocks import row_wise


def rms_normalised(x: jax.Array, weight: jax.Array, eps: float, from_one: bool) -> jax.Array:
    """Return x [..., size] / rms(x) * weight [size] in x's dtype, computed in float32.

    With `from_one`, the factor is 1 + weight, and the product is rounded once, as in Gemma.
    """

    def normalised(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        if from_one:
            return (wide * scale * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
        return (wide * scale).astype(x.dtype) * weight

    result: jax.Array = row_wise(normalised, x)
    return result

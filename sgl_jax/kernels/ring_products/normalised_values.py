"""Hidden states that lie on all chips by columns, normalised and quantized."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.quantization import ActivationFormat
from sgl_jax.kernels.quantized_matmul.numbers import activation_scale, quantize_activations

# The values [T, columns] of x [T, columns], times factors float32 [1, columns] and by_row float32
# [T, 1], rounded to the type of x, with a scale float32 [T, 1] for each row.
QuantizeNormalised = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, ActivationFormat], jax.Array
]


def quantize_normalised(
    x: jax.Array,
    factors: jax.Array,
    by_row: jax.Array,
    scale: jax.Array,
    activation: ActivationFormat,
) -> jax.Array:
    """See `QuantizeNormalised`."""
    normed = (x.astype(jnp.float32) * by_row * factors).astype(x.dtype)
    return quantize_activations(normed, activation, scale)[0]


def normalised_values(
    x: jax.Array,
    norm: jax.Array,
    eps: float,
    axis: str,
    activation: ActivationFormat,
    quantize: QuantizeNormalised = quantize_normalised,
) -> tuple[jax.Array, jax.Array]:
    """This chip's columns of the normalised x as values, and each token's scale, on every chip.

    The scale is of all columns of a token: chips exchange their sums of squares and greatest
    magnitudes, which is little beside the columns.

    Args:
        x: [T, hidden / chips], this chip's columns.
        norm: float32 [hidden], the factors of all columns.
        eps: added to the mean of squares.
        axis: the mesh axis of the chips.
        activation: the format.
        quantize: the platform's implementation.

    Returns:
        Values [T, hidden / chips], and float32 [T, 1].
    """
    columns, wide = x.shape[1], x.astype(jnp.float32)
    factors = lax.dynamic_slice_in_dim(norm, lax.axis_index(axis) * columns, columns)[None]
    squares = jnp.sum(wide * wide, axis=1)
    greatest = jnp.max(jnp.abs(wide * factors), axis=1)
    of_chips = lax.all_gather(jnp.stack((squares, greatest)), axis)
    by_row = lax.rsqrt(jnp.sum(of_chips[:, 0], axis=0) / norm.size + eps)[:, None]
    # Rounded to the type of x, like the numbers themselves.
    magnitude = (jnp.max(of_chips[:, 1], axis=0)[:, None] * by_row).astype(x.dtype)
    scale = activation_scale(magnitude.astype(jnp.float32), activation)
    return quantize(x, factors, by_row, scale, activation), scale

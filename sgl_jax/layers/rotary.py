"""Rotary position embedding (arXiv 2104.09864), in the half-split form of Hugging Face models.

Cosines and sines are computed once per step and shared by all layers.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray


class RopeScaling(NamedTuple):
    """How Llama 3 stretches low frequencies for contexts longer than it was pre-trained on."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class Rotation(NamedTuple):
    """Cosine and sine of each token's angles, float32 [T, 1, head_dim / 2]."""

    cos: jax.Array
    sin: jax.Array


def inverse_frequencies(
    head_dim: int, theta: float, linear_factor: float = 1.0, llama3: RopeScaling | None = None
) -> NDArray[np.float32]:
    """Angle per position of each pair of dimensions, [head_dim / 2].

    `linear_factor` divides all of them. `llama3` divides those whose wavelength exceeds
    original / low_freq_factor by `factor`, leaves those below original / high_freq_factor, and
    blends in between.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    frequencies = (1.0 / theta**exponents).astype(np.float64) / linear_factor
    if llama3 is not None:
        turns = llama3.original_max_positions * frequencies / (2 * math.pi)
        blend = (turns - llama3.low_freq_factor) / (
            llama3.high_freq_factor - llama3.low_freq_factor
        )
        blend = np.clip(blend, 0.0, 1.0)
        frequencies = frequencies * (blend + (1.0 - blend) / llama3.factor)
    return frequencies.astype(np.float32)


def rotation(positions: jax.Array, frequencies: NDArray[np.float32]) -> Rotation:
    """The rotation of tokens at `positions`, int32 [T]."""
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
    """Rotate x [T, heads, head_dim]: dimension i is paired with i + head_dim / 2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * by.cos - second * by.sin, second * by.cos + first * by.sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)

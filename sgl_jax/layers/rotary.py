"""Rotary position embedding (arXiv 2104.09864), in the half-split form of Hugging Face models.

Cosines and sines are computed once per step and shared by all layers.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray


class Rotation(NamedTuple):
    """Cosine and sine of each token's angles, float32 [T, 1, head_dim / 2]."""

    cos: jax.Array
    sin: jax.Array


def inverse_frequencies(
    num_dims: int,
    theta: float,
    kind: str = "default",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 8192,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> NDArray[np.float32]:
    """Angle per position of each pair of the `num_dims` dimensions that are turned.

    "linear" divides all of them by `factor`. "llama3" divides frequencies of wavelengths above
    original / low_freq_factor by `factor`, leaves wavelengths below original / high_freq_factor,
    and blends in between: for contexts longer than Llama 3 was pre-trained on. "yarn" (arXiv
    2309.00071) leaves pairs that turn more than `beta_fast` times in the original context, divides
    pairs that turn less than `beta_slow` times, and blends in between, linearly by dimension;
    `truncate` rounds the bounds outwards to whole dimensions.
    """
    exponents = np.arange(0, num_dims, 2, dtype=np.float32) / num_dims
    frequencies = (1.0 / theta**exponents).astype(np.float64)
    if kind == "linear":
        frequencies = frequencies / factor
    if kind == "llama3":
        turns = original_max_position_embeddings * frequencies / (2 * math.pi)
        blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        frequencies = frequencies * (blend + (1.0 - blend) / factor)
    if kind == "yarn":
        # Dimension (of the first half) whose pair turns so many times in the original context.
        first, last = (
            num_dims
            * math.log(original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (beta_fast, beta_slow)
        )
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, num_dims - 1)
        width = last - first or 0.001
        stretched = np.clip((np.arange(num_dims // 2) - first) / width, 0.0, 1.0)
        frequencies = frequencies * (1.0 - stretched + stretched / factor)
    return frequencies.astype(np.float32)


def rotation(
    positions: jax.Array,
    frequencies: NDArray[np.float32],
    factor: float = 1.0,
    num_pairs: int | None = None,
) -> Rotation:
    """The rotation of tokens at `positions`, int32 [T], which also multiplies them by `factor`.

    The first of `num_pairs` pairs of dimensions have frequencies; the others stay unchanged.
    """
    num_still = 0 if num_pairs is None else num_pairs - len(frequencies)
    angles = positions.astype(jnp.float32)[:, None, None] * np.pad(frequencies, (0, num_still))
    factors = np.append(np.full(len(frequencies), factor), np.ones(num_still)).astype(np.float32)
    turned = jnp.cos(angles) * factors, jnp.sin(angles) * factors
    # Behind the barrier they cannot reach the loop over layers: there the TPU's compiler would
    # compute them anew in each turn.
    return Rotation(*lax.optimization_barrier(turned))


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
    """Rotate x [T, heads, head_dim]: dimension i is paired with i + head_dim / 2.

    Heads that are turned in part have their dimensions in this order (`sources.paired_order`).
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * by.cos - second * by.sin, second * by.cos + first * by.sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)

"""Rotary position embedding (arXiv 2104.09864), in the half-split form of Hugging Face models.

Cosines and sines are computed once per step and shared by all layers.
"""

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
    query_scale: jax.Array | None = None  # float32 [T, 1, 1] multiplies queries; None: 1


def rotation(
    positions: jax.Array,
    frequencies: NDArray[np.float32],
    factor: float = 1.0,
    num_pairs: int | None = None,
) -> Rotation:
    """Return the rotation of tokens at `positions`, int32 [T] or [T, pairs], scaled by `factor`.

    The first of `num_pairs` pairs of dimensions have frequencies; the rest stay unchanged.
    """
    num_still = 0 if num_pairs is None else num_pairs - len(frequencies)
    places = positions.astype(jnp.float32)
    places = places[:, None, None] if places.ndim == 1 else places[:, None]
    angles = places * np.pad(frequencies, (0, num_still))
    factors = np.append(np.full(len(frequencies), factor), np.ones(num_still)).astype(np.float32)
    turned = jnp.cos(angles) * factors, jnp.sin(angles) * factors
    # After the barrier, they cannot reach the loop over layers, where the TPU's compiler would
    # compute them again in each iteration.
    return Rotation(*lax.optimization_barrier(turned))


def query_scales(positions: jax.Array, weight: float, period: int, first: int) -> jax.Array:
    """Return 1 + weight * log(1 + (position + first) // period), float32 [T, 1, 1].

    Scores of late queries grow with the number of keys (arXiv 2501.19399). `positions` are int32
    [T].
    """
    periods = ((positions + first) // period).astype(jnp.float32)
    scales = 1.0 + weight * jnp.log1p(periods)
    result: jax.Array = lax.optimization_barrier(scales[:, None, None])  # as in `rotation`
    return result


def scale_queries(q: jax.Array, by: Rotation) -> jax.Array:
    """Multiply q [T, heads, size] by its tokens' `query_scale`; the result has q's dtype."""
    return q if by.query_scale is None else (q * by.query_scale).astype(q.dtype)


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
    """Rotate x [T, heads, head_dim]: dimension i is paired with i + head_dim / 2.

    Partly rotated heads have their dimensions in this order (`head_sources.paired_order`).
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * by.cos - second * by.sin, second * by.cos + first * by.sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)

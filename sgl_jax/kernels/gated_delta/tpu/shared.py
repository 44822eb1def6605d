"""Common parts of the kernels of gated delta nets."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

EPSILON = 1e-6  # of the lengths of keys and queries


def unit(x: jax.Array) -> jax.Array:
    """float32 of x [n, 128], each row scaled to length 1."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.sum(wide * wide, axis=1, keepdims=True) + EPSILON)


def row_and_column(size: int) -> tuple[jax.Array, jax.Array]:
    """int32 [size, size], the number of each element's row, and of its column."""
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in range(2))
    return row, column


def product(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The matrices x times y in float32, one axis of each summed over; of float32 without loss."""
    return lax.dot_general(
        x,
        y,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if y.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def start(copy: Any) -> None:
    """Start a DMA."""
    copy.start()


def wait(copy: Any) -> None:
    """Wait for a DMA."""
    copy.wait()

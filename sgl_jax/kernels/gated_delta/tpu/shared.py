"""What the kernels of gated delta nets have in common."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

EPSILON = 1e-6  # of the lengths of keys and queries


def unit(x: jax.Array) -> jax.Array:
    """float32 of x [n, 128], each row scaled to length 1."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.sum(wide * wide, axis=1, keepdims=True) + EPSILON)


def start(copy: Any) -> None:
    """Start a DMA."""
    copy.start()


def wait(copy: Any) -> None:
    """Wait for a DMA."""
    copy.wait()

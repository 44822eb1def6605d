"""How much of the KV a TPU kernel computes on at once."""

import jax.numpy as jnp


def decode_block_pages(cache_shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """Pages of a block of decode attention."""
    return max(1, 512 // cache_shape[3])

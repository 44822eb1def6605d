"""How a TPU lays arrays out: in tiles, which it moves and stores whole."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def tile_slots(dtype: DTypeLike) -> int:
    """Slots of one tile of the cache: 8, 16 or 32 for elements of 4, 2 or 1 bytes."""
    return 32 // jnp.dtype(dtype).itemsize

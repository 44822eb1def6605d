"""How a TPU lays arrays out, and how much of its vector memory a kernel may take."""

import jax.numpy as jnp
from jax.typing import DTypeLike

LANES = 128  # elements of a row of memory, and of a register's
VMEM_LIMIT_BYTES = 60 << 20  # of the 64 MiB or more that a chip has; the compiler's limit is less


def tile_slots(dtype: DTypeLike) -> int:
    """Rows of a tile, which is moved and stored whole: 8, 16 or 32 for 4, 2 or 1 byte elements."""
    return 32 // jnp.dtype(dtype).itemsize

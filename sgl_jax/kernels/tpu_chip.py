"""Properties of the TPU that kernels are compiled for."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

LANES = 128  # elements in a row of memory, and in a row of a register
SUBLANES = 8  # rows of a register
VMEM_LIMIT_BYTES = 60 << 20  # of a chip's 64 MiB or more; the compiler's default is less


def tile_slots(dtype: DTypeLike) -> int:
    """Return the rows of a tile, which is copied whole: 8, 16, 32 for elements of 4, 2, 1 bytes."""
    return 32 // jnp.dtype(dtype).itemsize


def device_kind() -> str:
    """Return the name of the target chip: the traced mesh's device, which may only be described."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.device_kind if described else jax.devices()[0].device_kind


def converts_float8() -> bool:
    """Return True if the chip has instructions that convert 8-bit floats."""
    return device_kind() == "TPU7x"

"""Properties of the TPU that kernels are compiled for."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

LANES = 128  # elements of a row of memory, and of a register's
SUBLANES = 8  # rows of a register
VMEM_LIMIT_BYTES = 60 << 20  # of the 64 MiB or more that a chip has; the compiler's limit is less


def most_vmem_bytes(kind: str) -> int:
    """Vector memory of a kind of chip that a kernel may use, if more is of use to it."""
    is_large = kind in ("TPU v5 lite", "TPU v6 lite")  # 128 MiB
    return 112 << 20 if is_large else VMEM_LIMIT_BYTES


def tile_slots(dtype: DTypeLike) -> int:
    """Rows of a tile, which is moved and stored whole: 8, 16 or 32 for 4, 2 or 1 byte elements."""
    return 32 // jnp.dtype(dtype).itemsize


def device_kind() -> str:
    """The chip's name: of the mesh that is traced under, which may only be described."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.device_kind if described else jax.devices()[0].device_kind


def converts_float8() -> bool:
    """True if the chip has instructions that convert 8-bit floats."""
    return device_kind() == "TPU7x"

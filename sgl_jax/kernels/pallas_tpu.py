"""Common parts of Pallas kernels for TPU: DMAs, products, the compiler's options.

Imported by kernels alone: without them, a process does not wait for the import of Pallas.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.tpu_chip import VMEM_LIMIT_BYTES

# For kernels whose DMAs go to pages or slots by their ids. These are the memory manager's: a check
# of each DMA's bounds would cost more than the DMA.
UNCHECKED = pltpu.CompilerParams(disable_bounds_checks=True, vmem_limit_bytes=VMEM_LIMIT_BYTES)


def start(copy: Any) -> None:
    copy.start()


def wait(copy: Any) -> None:
    copy.wait()


def product(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The matrices x times y in float32, one axis of each summed over; of float32 without loss."""
    return lax.dot_general(
        x,
        y,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if y.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def bfloat16_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """Numbers of bfloat16 whose sum is x, float32, to 8 bits each."""
    parts: list[jax.Array] = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts

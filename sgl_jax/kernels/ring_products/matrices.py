"""The arguments of products over a ring."""

from collections.abc import Callable
from typing import NamedTuple

import jax

# The result, float32 [T, out], of the products with each matrix, float32 [T, out].
Finish = Callable[..., jax.Array]


class RingMatrix(NamedTuple):
    """One chip's part of a matrix, stacked by layer."""

    values: jax.Array  # [layers, in, out], numbers or 8-bit values
    scales: jax.Array | None = None  # float32 [layers, 1, out] of 8-bit values

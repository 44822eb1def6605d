"""Functions of rows in blocks of one size, so that a row's result does not depend on the batch.

XLA orders the sums of a product or of an axis by the array's shape. In blocks of one shape, the
bits of a row's result depend on neither the number of rows nor the row's place among them. Programs
traced within `invariant_rows` compute all sums over a token's numbers in such blocks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

BLOCK_ROWS = 16
# XLA removes a loop of one iteration, and may then compute its block together with other code.
LEAST_BLOCKS = 2

_is_active: ContextVar[bool] = ContextVar("invariant_rows", default=False)


@contextmanager
def invariant_rows(*, active: bool = True) -> Iterator[None]:
    """Trace `row_wise` functions in blocks in this context, like `jax.default_matmul_precision`."""
    token = _is_active.set(active)
    try:
        yield
    finally:
        _is_active.reset(token)


def row_wise(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Apply a function that maps arrays [rows, ...] row by row, in blocks if rows are invariant.

    Its results are arrays [rows, ...] in any tree.
    """
    if not _is_active.get():
        return function(*arrays)
    num_rows = len(arrays[0])
    num_blocks = max(LEAST_BLOCKS, -(-num_rows // BLOCK_ROWS))
    padding = num_blocks * BLOCK_ROWS - num_rows

    def to_blocks(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, padding), *((0, 0) for _ in x.shape[1:])))
        return padded.reshape(num_blocks, BLOCK_ROWS, *x.shape[1:])

    def of_block(block: tuple[jax.Array, ...]) -> Any:
        with invariant_rows(active=False):
            return function(*block)

    def to_rows(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])[:num_rows]

    return jax.tree.map(to_rows, lax.map(of_block, tuple(map(to_blocks, arrays))))


def matmul(
    x: jax.Array, matrix: jax.Array, preferred_element_type: DTypeLike | None = None
) -> jax.Array:
    """Multiply x [rows, in] with a matrix [in, out], row-wise."""

    def product(rows: jax.Array) -> jax.Array:
        return jnp.matmul(rows, matrix, preferred_element_type=preferred_element_type)

    return row_wise(product, x)

"""Functions of rows in blocks of one size, so that a row's result does not depend on the batch.

XLA orders the sums of a product or of an axis by the array's shape. In blocks of one shape, the
bits of a row's result depend on neither the number of rows nor the row's place among them. Programs
traced within `invariant_rows` compute all sums over a token's numbers in such blocks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

BLOCK_ROWS = 16
# XLA removes a loop of one iteration, or moves code that has the same inputs in all iterations out
# of it, and may then compute a block together with other code. So the number of iterations is
# hidden from it, and blocks are parts of arrays of at least two.
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
    num_blocks = -(-num_rows // BLOCK_ROWS)
    more = max(LEAST_BLOCKS, num_blocks) * BLOCK_ROWS - num_rows
    padded = [jnp.pad(x, ((0, more), *((0, 0) for _ in x.shape[1:]))) for x in arrays]

    def of_block(number: jax.Array) -> Any:
        block = [lax.dynamic_slice_in_dim(x, number * BLOCK_ROWS, BLOCK_ROWS) for x in padded]
        with invariant_rows(active=False):
            return function(*block)

    def write(number: jax.Array, out: Any) -> Any:
        start = number * BLOCK_ROWS
        put = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return jax.tree.map(put, out, of_block(number))

    def to_fill(block: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros((num_rows + more, *block.shape[1:]), block.dtype)

    out = jax.tree.map(to_fill, jax.eval_shape(of_block, jnp.int32(0)))
    count = lax.optimization_barrier(jnp.int32(num_blocks))
    return jax.tree.map(lambda x: x[:num_rows], lax.fori_loop(0, count, write, out))


def matmul(
    x: jax.Array, matrix: jax.Array, preferred_element_type: DTypeLike | None = None
) -> jax.Array:
    """Multiply x [rows, in] with a matrix [in, out], row-wise."""

    def product(rows: jax.Array) -> jax.Array:
        return jnp.matmul(rows, matrix, preferred_element_type=preferred_element_type)

    return row_wise(product, x)

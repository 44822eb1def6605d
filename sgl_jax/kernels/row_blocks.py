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
# A TPU multiplies this many rows in about the time in which it reads the matrix.
TPU_BLOCK_ROWS = 256

# Rows of a block; 0 if rows are not computed in blocks.
_block_rows: ContextVar[int] = ContextVar("invariant_rows", default=0)
# The number of the block that is traced, int32 [].
_block: ContextVar[jax.Array | None] = ContextVar("row_block", default=None)


def block_rows_of(platform: str) -> int:
    """Return the rows of a block on "cpu", "gpu" or "tpu"."""
    return TPU_BLOCK_ROWS if platform == "tpu" else BLOCK_ROWS


@contextmanager
def invariant_rows(block_rows: int = BLOCK_ROWS) -> Iterator[None]:
    """Trace `row_wise` functions in blocks in this context, like `jax.default_matmul_precision`.

    If `block_rows` is 0, they are traced without blocks.
    """
    token = _block_rows.set(block_rows)
    try:
        yield
    finally:
        _block_rows.reset(token)


def are_rows_invariant() -> bool:
    """Return True within `invariant_rows`, outside of blocks."""
    return _block_rows.get() > 0


def bound_to_block(x: jax.Array) -> jax.Array:
    """Return x, which the compiler cannot move out of the loop if a block is traced."""
    number = _block.get()
    return x if number is None else lax.optimization_barrier((x, number))[0]


def row_wise(
    function: Callable[..., Any], *arrays: jax.Array, most_rows: int = TPU_BLOCK_ROWS
) -> Any:
    """Apply a function that maps arrays [rows, ...] row by row, in blocks if rows are invariant.

    Its results are arrays [rows, ...] in any tree. Blocks have at most `most_rows` rows.
    """
    # XLA removes a loop of one iteration, or moves code that has the same inputs in all iterations
    # out of it, and may then compute a block together with other code. So the number of iterations
    # is hidden from it, and inputs are bound to their block.
    size = min(_block_rows.get(), most_rows)
    if size == 0:
        return function(*arrays)
    num_rows = len(arrays[0])
    num_blocks = -(-num_rows // size)
    more = num_blocks * size - num_rows
    padded = [jnp.pad(x, ((0, more), *((0, 0) for _ in x.shape[1:]))) for x in arrays]

    def of_block(number: jax.Array) -> Any:
        token = _block.set(number)
        try:
            block = [lax.dynamic_slice_in_dim(x, number * size, size) for x in padded]
            with invariant_rows(0):
                return function(*map(bound_to_block, block))
        finally:
            _block.reset(token)

    def write(number: jax.Array, out: Any) -> Any:
        put = partial(lax.dynamic_update_slice_in_dim, start_index=number * size, axis=0)
        return jax.tree.map(put, out, of_block(number))

    def to_fill(block: jax.ShapeDtypeStruct) -> jax.Array:
        return lax.empty((num_rows + more, *block.shape[1:]), block.dtype)

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

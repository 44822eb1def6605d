"""Functions of rows in blocks of one size, so that a row's result does not depend on the batch.

XLA orders the sums of a product or of an axis by the array's shape. In blocks of one shape, the
bits of a row's result depend on neither the number of rows nor the row's place among them. Programs
traced within `invariant_rows` compute all sums over a token's numbers in such blocks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

BLOCK_ROWS = 16
# A TPU multiplies this many rows in about the time in which it reads the matrix.
TPU_BLOCK_ROWS = 256


class Multiply(Protocol):
    """Multiply rows with a matrix of a stack; the bits of a row's result depend on no other row."""

    def __call__(
        self,
        x: jax.Array,
        matrices: jax.Array,
        layer: jax.Array,
        *,
        transposed: bool,
        dtype: DTypeLike,
    ) -> jax.Array:
        """Multiply x [rows, in] with matrices[layer], [in, out] or, if `transposed`, [out, in]."""
        ...


class RowBlocks(NamedTuple):
    """How rows are computed if a row's bits must not depend on other rows."""

    num_rows: int = BLOCK_ROWS
    multiply: Multiply | None = None  # in place of XLA's products


# None if rows are not computed in blocks.
_blocks: ContextVar[RowBlocks | None] = ContextVar("invariant_rows", default=None)
# The number of the block that is traced, int32 [].
_block: ContextVar[jax.Array | None] = ContextVar("row_block", default=None)


def block_rows_of(backend: str) -> int:
    """Return the rows of a block with kernels of "pallas" or "xla"."""
    return TPU_BLOCK_ROWS if backend == "pallas" else BLOCK_ROWS


@contextmanager
def invariant_rows(blocks: RowBlocks | None) -> Iterator[None]:
    """Trace `row_wise` functions in blocks in this context, like `jax.default_matmul_precision`;
    with None, without blocks."""
    token = _blocks.set(blocks)
    try:
        yield
    finally:
        _blocks.reset(token)


def row_blocks() -> RowBlocks | None:
    """Return the blocks within `invariant_rows`; None elsewhere, and within a block."""
    return _blocks.get()


def row_multiply() -> Multiply | None:
    """Return the kernel that multiplies invariant rows; None if `row_wise` products of XLA do."""
    blocks = _blocks.get()
    return None if blocks is None else blocks.multiply


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
    blocks = _blocks.get()
    if blocks is None:
        return function(*arrays)
    size = min(blocks.num_rows, most_rows)
    num_rows = len(arrays[0])
    num_blocks = -(-num_rows // size)
    more = num_blocks * size - num_rows
    padded = [jnp.pad(x, ((0, more), *((0, 0) for _ in x.shape[1:]))) for x in arrays]

    def of_block(number: jax.Array) -> Any:
        token = _block.set(number)
        try:
            block = [lax.dynamic_slice_in_dim(x, number * size, size) for x in padded]
            with invariant_rows(None):
                return lax.optimization_barrier(function(*map(bound_to_block, block)))
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
    x: jax.Array, matrix: jax.Array, dtype: DTypeLike | None = None, *, transposed: bool = False
) -> jax.Array:
    """Multiply x [rows, in] with a matrix [in, out] or, if `transposed`, [out, in], row-wise."""
    if (multiply := row_multiply()) is not None:
        own, layer = dtype or x.dtype, jnp.int32(0)
        return multiply(x, matrix[None], layer, transposed=transposed, dtype=own)

    def product(rows: jax.Array) -> jax.Array:
        own = matrix.T if transposed else matrix
        return jnp.matmul(rows, own, preferred_element_type=dtype)

    result: jax.Array = row_wise(product, x)
    return result

"""Row-wise functions in blocks: the plain results, with bits that do not depend on the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.kernels.rms_norm import rms_normalised
from sgl_jax.kernels.row_blocks import BLOCK_ROWS, RowBlocks, invariant_rows, matmul, row_wise

INPUTS, OUTPUTS = 96, 40
SIZES = 1, 2, 7, BLOCK_ROWS, BLOCK_ROWS + 1, 5 * BLOCK_ROWS + 3


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def layer(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return matmul(rms_normalised(x, jnp.ones(INPUTS), 1e-6, from_one=False), matrix)


def computed(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    with invariant_rows(RowBlocks()):
        program = jax.jit(layer).lower(x, matrix).compile()
    return np.asarray(program(x, matrix))


@pytest.mark.parametrize("size", SIZES)
def test_results_are_those_of_the_plain_function(size: int) -> None:
    x, matrix = draw(size, INPUTS), draw(INPUTS, OUTPUTS)
    np.testing.assert_allclose(computed(x, matrix), layer(x, matrix), rtol=2e-5, atol=2e-5)


def test_a_rows_bits_depend_on_neither_the_number_of_rows_nor_its_place() -> None:
    rows, matrix = draw(SIZES[-1], INPUTS), draw(INPUTS, OUTPUTS)
    expected = computed(rows[:1], matrix)[0]
    for size in SIZES:
        for place in {0, size // 2, size - 1}:
            batch = rows[:size].copy()
            batch[[0, place]] = batch[[place, 0]]
            assert (computed(batch, matrix)[place] == expected).all(), (size, place)


def test_results_of_any_tree_are_cut_to_the_rows() -> None:
    def both(a: jax.Array, b: jax.Array) -> dict[str, jax.Array]:
        return {"sum": a + b[:, 0], "largest": b.max(axis=1)}

    a, b = draw(21), draw(21, 3)
    with invariant_rows(RowBlocks()):
        found = row_wise(both, a, b)
    for name, value in both(a, b).items():
        np.testing.assert_array_equal(found[name], value)


def test_a_function_within_a_block_is_not_divided_again() -> None:
    sizes = []

    def inner(x: jax.Array) -> jax.Array:
        sizes.append(len(x))
        return x

    with invariant_rows(RowBlocks()):
        row_wise(lambda x: row_wise(inner, x), draw(40, 2))
        row_wise(inner, draw(40, 2))
    row_wise(inner, draw(40, 2))
    assert (set(sizes[:-1]), sizes[-1]) == ({BLOCK_ROWS}, 40)

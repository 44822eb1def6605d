"""A norm of all heads: with invariant rows, its bits do not depend on the batch."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.kernels.row_blocks import BLOCK_ROWS, RowBlocks, invariant_rows
from sgl_jax.layers.norm import AllHeadsNorm

HEADS, HEAD_DIM = 8, 32
ROWS = np.random.default_rng(0).standard_normal((3 * BLOCK_ROWS, HEADS, HEAD_DIM), np.float32)


def normalised(x: np.ndarray) -> np.ndarray:
    own: Any = SimpleNamespace(weight=jnp.ones(HEADS * HEAD_DIM), eps=1e-6)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    norm = jax.shard_map(
        lambda x: AllHeadsNorm.__call__(own, x),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    with jax.set_mesh(mesh), invariant_rows(RowBlocks()):
        return np.asarray(jax.jit(norm)(x))


def test_a_rows_bits_do_not_depend_on_the_number_of_rows() -> None:
    expected = normalised(ROWS)
    squares = np.mean(np.square(ROWS, dtype=np.float64), axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(expected, ROWS / np.sqrt(squares + 1e-6), rtol=1e-5)
    for size in (1, 2, BLOCK_ROWS + 1):
        np.testing.assert_array_equal(normalised(ROWS[:size]), expected[:size])
        np.testing.assert_array_equal(normalised(ROWS[-size:]), expected[-size:])

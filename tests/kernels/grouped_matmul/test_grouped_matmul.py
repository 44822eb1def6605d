"""Each group of lines meets its own matrix, whatever the groups' sizes."""

import jax
import numpy as np
import pytest

from sgl_jax.kernels.grouped_matmul.interface import grouped_matmul

SIZES = {
    "an empty group between others": [5, 0, 35],
    "the first group has it all": [40, 0, 0],
    "the last group has it all": [0, 0, 40],
    "groups of whole blocks": [32, 0, 8],
    "small groups": [1, 2, 37],
}
multiply = jax.jit(grouped_matmul)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_agrees_with_float64(sizes):
    rng = np.random.default_rng(0)
    lines = rng.normal(size=(40, 16)).astype(np.float32)
    matrices = rng.normal(size=(3, 16, 8)).astype(np.float32)
    group = np.repeat(np.arange(3), sizes)
    expected = np.einsum("nk,nkm->nm", lines.astype(np.float64), matrices[group])
    actual = multiply(lines, matrices, np.array(sizes, np.int32))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)

"""Grouped products in XLA agree with float64."""

import jax
import numpy as np
import pytest

from sgl_jax.core.layer_configs import Scheme
from sgl_jax.kernels.grouped_matmul.interface import (
    GroupMatrices,
    blocked_grouped_matmul,
    ragged_grouped_matmul,
)
from tests.kernels.grouped_matmul.problems import Case, Program, build, expected, quantized_problem

SIZES = {
    "an empty group between others": (5, 0, 35),
    "the first group has it all": (40, 0, 0),
    "the last group has it all": (0, 0, 40),
    "groups of whole blocks": (32, 0, 8),
    "small groups": (1, 2, 37),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("multiply", [blocked_grouped_matmul, ragged_grouped_matmul])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_agrees_with_float64(sizes, multiply, transposed):
    program = Program(groups=3, transposed=transposed)
    problem = build(Case(program, sizes, poisoned=None, seed=0))
    problem = problem._replace(matrices=GroupMatrices(np.nan_to_num(problem.matrices.values)))
    actual = jax.jit(multiply, static_argnames="transposed")(*problem, transposed=transposed)
    np.testing.assert_allclose(actual, expected(problem, program), rtol=0, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("multiply", [blocked_grouped_matmul, ragged_grouped_matmul])
@pytest.mark.parametrize(
    "scheme",
    [Scheme("int8"), Scheme("int4", 32, has_zero_points=True), Scheme("mxfp4", 32)],
    ids=lambda own: own.name,
)
def test_quantized_matrices_agree_with_float64(scheme, multiply, transposed):
    problem, wanted = quantized_problem(scheme, transposed=transposed)
    matrices = problem.matrices
    # The format is no array.
    run = jax.jit(
        lambda lines, layer, sizes: multiply(lines, matrices, layer, sizes, transposed=transposed)
    )
    found = run(problem.lines, problem.layer, problem.group_sizes)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())

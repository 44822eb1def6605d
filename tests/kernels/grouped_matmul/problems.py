"""Grouped products: drawn, built, and judged by float64."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from sgl_jax.core.layer_configs import Scheme
from sgl_jax.kernels.grouped_matmul.interface import GroupMatrices
from tests.kernels.quantized_matmul.problems import LAYER as DRAWN_LAYER
from tests.kernels.quantized_matmul.problems import draw, numbers

LAYERS, LAYER = 3, 1


class Program(NamedTuple):
    """What a compiled program depends on."""

    lines: int = 40
    groups: int = 5
    inputs: int = 64
    outputs: int = 96
    transposed: bool = False
    dtype: Any = jnp.float32
    tile_lines: int = 16
    tile_width: int = 96


class Case(NamedTuple):
    program: Program
    sizes: tuple[int, ...]  # lines of each group
    poisoned: int | None  # a line that is full of NaN
    seed: int


@st.composite
def cases(draw, programs):
    """Groups of any sizes: none, all, and often up to the border of a tile."""
    program = draw(st.sampled_from(programs))
    tile, lines = program.tile_lines, program.lines
    borders = st.integers(0, lines // tile).map(lambda n: n * tile)
    ends = st.one_of(st.integers(0, lines), borders, st.sampled_from((0, lines)))
    number = program.groups - 1
    cuts = sorted(draw(st.lists(ends, min_size=number, max_size=number)))
    return Case(
        program,
        tuple(int(size) for size in np.diff([0, *cuts, lines])),
        draw(st.one_of(st.none(), st.integers(0, lines - 1))),
        draw(st.integers(0, 2**32 - 1)),
    )


class Problem(NamedTuple):
    """The arrays of a case. Matrices that no line needs are NaN: reading one would show."""

    lines: np.ndarray
    matrices: GroupMatrices
    layer: np.int32
    group_sizes: np.ndarray


def build(case: Case) -> Problem:
    """Draw the arrays of a case from its seed; results are about 1/2."""
    program, rng = case.program, np.random.default_rng(case.seed)
    lines = rng.normal(size=(program.lines, program.inputs))
    if case.poisoned is not None:
        lines[case.poisoned] = np.nan
    matrices = np.full((LAYERS, program.groups, program.inputs, program.outputs), np.nan)
    for group, size in enumerate(case.sizes):
        if size:
            drawn = rng.normal(size=matrices.shape[2:]) / program.inputs**0.5 / 2
            matrices[LAYER, group] = drawn
    if program.transposed:
        matrices = matrices.swapaxes(2, 3)
    sizes = np.array(case.sizes, np.int32)
    dtype = program.dtype
    own = GroupMatrices(matrices.astype(dtype))
    return Problem(lines.astype(dtype), own, np.int32(LAYER), sizes)


def expected(problem: Problem, program: Program) -> np.ndarray:
    """The result in float64."""
    matrices = np.asarray(problem.matrices.values, np.float64)[LAYER]
    if program.transposed:
        matrices = matrices.swapaxes(1, 2)
    group = np.repeat(np.arange(program.groups), problem.group_sizes)
    lines = np.asarray(problem.lines, np.float64)
    return np.stack([line @ matrices[own] for line, own in zip(lines, group, strict=True)])


def quantized_problem(scheme: Scheme, *, transposed: bool) -> tuple[Problem, np.ndarray]:
    """Lines of three groups, one of them empty, and the result in float64."""
    groups, sizes = 3, np.array([5, 0, 35], np.int32)
    drawn = [draw(scheme, inputs=64, outputs=24, seed=group) for group in range(groups)]
    lines = np.random.default_rng(9).normal(size=(40, 64)).astype(np.float32)

    def stack(name: str) -> Any:
        """[layers, groups, k, m]; values may be [layers, groups, m, k]."""
        parts = [getattr(own, name) for own in drawn]
        if parts[0] is None:
            return None
        stacked = np.stack(parts, axis=1)
        is_swapped = transposed and name == "values"
        return jnp.asarray(stacked.swapaxes(2, 3) if is_swapped else stacked)

    arrays = (stack(name) for name in ("values", "scales", "zero_points"))
    of_line = np.repeat(np.arange(groups), sizes)
    wanted = np.stack(
        [line @ numbers(scheme, drawn[own]) for line, own in zip(lines, of_line, strict=True)]
    )
    matrices = GroupMatrices(*arrays, scheme.weight)
    return Problem(lines, matrices, np.int32(DRAWN_LAYER), sizes), wanted

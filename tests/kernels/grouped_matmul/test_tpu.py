"""The TPU's grouped product, simulated on the CPU: each line meets its own group's matrix."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.core.layer_configs import Scheme
from sgl_jax.kernels.grouped_matmul import tpu
from sgl_jax.kernels.grouped_matmul.interface import GroupMatrices
from sgl_jax.kernels.grouped_matmul.tpu import Tiles
from tests.kernels.grouped_matmul.problems import (
    Case,
    Program,
    build,
    cases,
    expected,
    quantized_problem,
)
from tests.kernels.simulation import EAGER, MODES, assert_close, simulate
from tests.support.long import long, long_but

PROGRAMS = (
    Program(),
    Program(transposed=True, outputs=192, tile_width=128),  # half of the last tile is nothing
    Program(lines=64, groups=3, dtype=jnp.bfloat16),
    Program(lines=33, inputs=192, outputs=320, tile_width=128, tile_lines=8),
    Program(lines=33, groups=9, transposed=True, dtype=jnp.bfloat16, tile_width=64),
    Program(lines=3, groups=8, tile_lines=3),
)


def multiply(program, interpret):
    @jax.jit
    def run(problem):
        with force_tpu_interpret_mode(interpret):
            return tpu.tpu_grouped_matmul(
                *problem,
                transposed=program.transposed,
                tiles=Tiles(program.tile_lines, program.tile_width),
            )

    return run


compiled = lru_cache(multiply)


def check(case, run):
    problem = build(case)
    result = simulate(run, problem)
    assert result.dtype == case.program.dtype
    assert_close(result, expected(problem, case.program), case.program.dtype)


def check_in_both_modes(case):
    """Trace anew, as a fault that was just seeded needs."""
    for mode in MODES.values():
        check(case, multiply(case.program, mode))


# By default in one mode: a fixed case is tried in both.
@pytest.mark.parametrize("mode", ["lazy", *long("eager")])
@settings(max_examples=4, deadline=None)
@given(case=cases(PROGRAMS))
def test_each_line_is_multiplied_with_the_matrix_of_its_group(mode, case):
    check(case, compiled(case.program, MODES[mode]))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=150, deadline=None)
@given(case=cases(PROGRAMS))
def test_each_line_meets_its_group_however_often_it_is_tried(mode, case):
    check(case, compiled(case.program, MODES[mode]))


@pytest.mark.parametrize(
    ("transposed", "mode"),
    [
        (True, "eager"),
        *(
            pytest.param(*own, marks=pytest.mark.long)
            for own in ((False, "lazy"), (False, "eager"), (True, "lazy"))
        ),
    ],
)
@pytest.mark.parametrize(
    "scheme",
    [Scheme("int8"), Scheme("int4", 32, has_zero_points=True), Scheme("mxfp4", 32)],
    ids=lambda own: own.name,
)
def test_quantized_matrices_agree_with_float64(scheme, transposed, mode):
    """With one scale for each output, and with scales of groups of inputs."""
    problem, wanted = quantized_problem(scheme, transposed=transposed)
    weight = problem.matrices.weight

    def run(arrays):
        lines, (values, scales, zero_points, _), *rest = arrays
        own = GroupMatrices(values, scales, zero_points, weight)
        with force_tpu_interpret_mode(MODES[mode]):
            return tpu.tpu_grouped_matmul(
                lines, own, *rest, transposed=transposed, tiles=Tiles(16, 24)
            )

    arrays = problem._replace(matrices=problem.matrices._replace(weight=None))
    greatest = np.abs(wanted).max()
    found = simulate(jax.jit(run), arrays)
    assert_close(found / greatest, wanted / greatest, jnp.float32)


SIZES = {
    "empty groups at both ends and between": (0, 17, 0, 23, 0),
    "the first group has it all": (40, 0, 0, 0, 0),
    "the last group has it all": (0, 0, 0, 0, 40),
    "groups end where tiles end": (16, 0, 16, 0, 8),
    "a tile with lines of all groups": (16, 1, 2, 3, 18),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_groups_of_any_size(sizes):
    check(Case(PROGRAMS[0], sizes, poisoned=None, seed=0), compiled(PROGRAMS[0], EAGER))


def test_the_layers_of_the_default_tiles():
    """As the layer calls it: nothing is said about tiles."""
    case = Case(Program(lines=80, groups=4), (20, 0, 45, 15), poisoned=30, seed=2)
    problem = build(case)
    with force_tpu_interpret_mode(EAGER):
        result = simulate(lambda arrays: tpu.tpu_grouped_matmul(*arrays, transposed=False), problem)
    assert_close(result, expected(problem, case.program), jnp.float32)


CROSSING = Case(PROGRAMS[0], (3, 20, 0, 11, 6), poisoned=None, seed=1)


def keep_lines_of_other_groups(monkeypatch):
    monkeypatch.setattr(tpu, "_is_of_group", lambda visits, visit, shape: jnp.ones(shape, bool))


def keep_lines_before_the_group(monkeypatch):
    change_visits(monkeypatch, lambda visits: visits._replace(first=visits.first * 0))


def lose_the_last_line_of_a_group(monkeypatch):
    change_visits(monkeypatch, lambda visits: visits._replace(stop=visits.stop - 1))


def read_another_layer(monkeypatch):
    change_visits(monkeypatch, lambda visits: visits._replace(sizes=visits.sizes.at[0].add(1)))


def read_another_group(monkeypatch):
    change_visits(monkeypatch, lambda visits: visits._replace(group=visits.group + 1))


def skip_the_last_visit(monkeypatch):
    change_visits(monkeypatch, lambda visits: visits._replace(sizes=visits.sizes.at[1].add(-1)))


def go_back_after_the_last_visit(monkeypatch):
    def wrong(visits):
        beyond = np.arange(len(visits.tile)) >= visits.sizes[1]
        return visits._replace(tile=jnp.where(beyond, 0, visits.tile))

    change_visits(monkeypatch, wrong)


def visit_tiles_in_another_order(monkeypatch):
    """The visits to a tile no longer follow each other."""

    def wrong(visits):
        order = jnp.argsort(jnp.arange(len(visits.tile)) % 2)
        order = jnp.where(jnp.arange(len(order)) < visits.sizes[1], order, order[-1])
        return visits._replace(
            **{name: getattr(visits, name)[order] for name in ("group", "tile", "first", "stop")}
        )

    change_visits(monkeypatch, wrong)


def change_visits(monkeypatch, change):
    plan = tpu._plan_visits
    monkeypatch.setattr(tpu, "_plan_visits", lambda *args: change(plan(*args)))


FAULTS = (
    keep_lines_of_other_groups,
    keep_lines_before_the_group,
    lose_the_last_line_of_a_group,
    read_another_layer,
    read_another_group,
    skip_the_last_visit,
    go_back_after_the_last_visit,
    visit_tiles_in_another_order,
)


def test_without_a_fault_the_case_that_they_are_seeded_into_passes():
    check_in_both_modes(CROSSING)


# Each traces and compiles the kernel anew.
@pytest.mark.parametrize(
    "fault",
    long_but(FAULTS, lose_the_last_line_of_a_group),
)
def test_a_seeded_fault_is_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_in_both_modes(CROSSING)

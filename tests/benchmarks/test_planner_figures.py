"""The planner's expected rates are those that half of the published figures give."""

import math

from benchmarks.planner.__main__ import fitted, halves, mean_error, table
from benchmarks.planner.published import PUBLISHED
from sgl_jax.planner.load import Reach


def test_every_second_figure_by_name_is_held_out():
    fit, held = halves()
    names = sorted(own.name for own in PUBLISHED)
    assert len(set(names)) == len(names)
    assert len(fit) + len(held) >= 20
    assert {row.published.name for row in fit} <= set(names[::2])
    assert {row.published.name for row in held} <= set(names[1::2])


def test_the_planner_has_the_rates_that_fit_best():
    fit, _ = halves()
    assert fitted(fit) == Reach()
    slower = Reach()._replace(program=Reach().program - 0.04)
    assert mean_error(fit, Reach()) < mean_error(fit, slower)


def test_the_table_has_a_line_for_each_figure_and_counts_those_within_a_quarter():
    fit, held = halves()
    lines = list(table(fit, held, Reach()))
    assert len([line for line in lines if "| fitted |" in line]) == len(fit)
    assert len([line for line in lines if "| held out |" in line]) == len(held)
    close = sum(abs(row.ratio(Reach()) - 1) <= 0.25 for row in held)
    error = math.exp(mean_error(held, Reach()))
    assert lines[-1] == (
        f"held out, expected: {close} of {len(held)} within 25 %, mean factor {error:.2f}"
    )


def test_a_figure_without_steps_is_left_out(monkeypatch):
    other = PUBLISHED[3]._replace(clients=3)
    monkeypatch.setattr("benchmarks.planner.__main__.PUBLISHED", (other, PUBLISHED[3]))
    fit, held = halves()
    assert [row.published for row in (*fit, *held)] == [PUBLISHED[3]]

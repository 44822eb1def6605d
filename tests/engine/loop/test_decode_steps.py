"""The number of decode steps of a launch: by the time of a step, once the programs are there."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.step_plan import RankPlan, StepPlan
from sgl_jax.engine.loop.decode_steps import DecodeStepChoice
from sgl_jax.engine.loop.step_pipeline import StepPipeline
from sgl_jax.scheduler.events import DecodeSteps, PlanStep


def plan(num_steps: int = 1, num_prefill: int = 0) -> StepPlan:
    ones = np.ones(2 + num_prefill, np.int32)
    rank = RankPlan(ones, ones, ones, ones > 0, 1, 2, ones > 1)
    if num_steps > 1:
        rank = rank._replace(num_steps=ones * np.array([1, num_steps], np.int32))
    return StepPlan(0, (rank,), has_steps=num_steps > 1)


class Times:
    """A choice whose results are read when the test says."""

    def __init__(self, setting: str = "auto", most: int = 16) -> None:
        self.now_s = 0.0
        self.choice = DecodeStepChoice(setting, most, clock=lambda: self.now_s)

    def read(self, seconds: float, plan: StepPlan, *, follows: bool = True) -> int:
        self.now_s += seconds
        self.choice.note_result(plan, follows=follows)
        return self.choice.num_steps


@pytest.mark.parametrize(
    ("step_ms", "expected"), [(0.1, 16), (0.6, 16), (1.2, 8), (2.4, 4), (4.9, 2), (5.1, 1), (40, 1)]
)
def test_two_launches_take_20_ms_at_most(step_ms: float, expected: int) -> None:
    times = Times()
    times.read(1.0, plan())
    assert times.read(step_ms / 1e3, plan()) == expected
    assert expected == 1 or 2 * expected * step_ms <= 20


def test_before_a_step_is_measured_a_launch_has_one() -> None:
    times = Times()
    assert times.choice.num_steps == 1
    assert times.read(0.001, plan()) == 1


def test_the_time_of_a_launch_is_that_of_its_longest_row() -> None:
    times = Times()
    times.read(1.0, plan())
    assert times.read(8 * 0.001, plan(num_steps=8)) == 8


def test_prompts_and_pauses_of_the_device_are_not_measured() -> None:
    times = Times()
    times.read(1.0, plan())
    assert times.read(0.5, plan(num_prefill=1)) == 1
    assert times.read(0.001, plan(), follows=False) == 8
    assert times.read(9.0, plan()) == 8


def test_a_slow_step_among_many_changes_little_and_a_slower_device_does() -> None:
    times = Times()
    times.read(1.0, plan())
    for _ in range(5):
        assert times.read(0.001, plan()) == 8
    assert times.read(0.008, plan()) == 4
    for _ in range(60):
        times.read(0.008, plan())
    assert times.choice.num_steps == 1


def test_a_number_stays() -> None:
    times = Times("4", most=4)
    times.read(1.0, plan())
    assert times.read(9.0, plan()) == 4


def test_the_scheduler_is_told_once_the_programs_are_compiled() -> None:
    told: list[Any] = []
    scheduler: Any = SimpleNamespace(is_resting=False, handle=told.append)
    executor: Any = SimpleNamespace(has_decode_steps=False)
    nothing: Any = None
    choice = DecodeStepChoice("4", 4)
    pipeline = StepPipeline(
        scheduler, executor, nothing, nothing, nothing, nothing, choice, depth=1
    )
    pipeline.run_next()
    assert told == [PlanStep()]
    executor.has_decode_steps = True
    pipeline.run_next()
    pipeline.run_next()
    assert told == [PlanStep(), DecodeSteps(4), PlanStep(), PlanStep()]

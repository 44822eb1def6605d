"""Plans of several decode steps wait for their programs, which no server waits for."""

from typing import Any

import pytest

from sgl_jax.core.progress import Progress
from sgl_jax.executor.buckets import Bucket, Buckets
from sgl_jax.executor.compile_stages import CompileStages
from sgl_jax.executor.compile_watch import CompileWatch
from tests.support.waiting import until

DECODE = (Bucket(2, 2), Bucket(8, 8))
BUCKETS = Buckets(8, 32, 0, (*DECODE, Bucket(8, 40)))


class NoPrograms:
    """Notes what is compiled."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, Bucket]] = []
        self.failing: set[Bucket] = set()

    def compile_all(self, buckets: tuple[Bucket, ...], progress: Progress, more: Any) -> None:
        self.compiled += [("step", bucket) for bucket in buckets]
        for make in more:
            make()

    def step(self, bucket: Bucket) -> None:
        self.compiled.append(("step", bucket))

    def halves(self, bucket: Bucket) -> None:
        self.compiled.append(("halves", bucket))

    def decode_steps(self, bucket: Bucket) -> None:
        if bucket in self.failing:
            raise RuntimeError("the compiler gives up")
        self.compiled.append(("several", bucket))


def stages(warmup: str, *, has_decode_steps: bool = True) -> tuple[CompileStages, NoPrograms]:
    programs: Any = NoPrograms()
    return (
        CompileStages(
            programs,
            BUCKETS,
            warmup,
            CompileWatch(),
            Progress(),
            has_decode_steps=has_decode_steps,
        ),
        programs,
    )


def test_staged_they_follow_all_that_a_step_may_need() -> None:
    own, programs = stages("staged")
    own.compile_first()
    assert not own.has_decode_steps
    assert programs.compiled == [("step", Bucket(8, 8)), ("step", Bucket(8, 40))]
    own.start_background()
    until(lambda: own.is_done, "the compilation ends")
    assert own.has_decode_steps
    kinds = [kind for kind, _ in programs.compiled[2:]]
    assert kinds == ["step", "halves", "halves", "several", "several", "halves"]
    assert {bucket for kind, bucket in programs.compiled if kind == "several"} == {*DECODE}


def test_one_that_fails_keeps_plans_at_one_step(caplog: pytest.LogCaptureFixture) -> None:
    own, programs = stages("staged")
    programs.failing = {DECODE[0]}
    own.compile_first()
    own.start_background()
    until(lambda: own.is_done, "the compilation ends")
    assert not own.has_decode_steps
    assert own.background_end() == ""
    assert "failed to compile" in caplog.text


def test_the_first_stage_may_begin_before_anyone_waits_for_it() -> None:
    own, programs = stages("staged")
    own.begin()
    until(lambda: len(programs.compiled) == 2, "the first stage ends")
    assert own.compile_first() == BUCKETS.first
    assert programs.compiled == [("step", Bucket(8, 8)), ("step", Bucket(8, 40))]


def test_an_error_of_the_first_stage_reaches_who_waits_for_it() -> None:
    own, programs = stages("all")
    programs.failing = {DECODE[0]}
    own.begin()
    with pytest.raises(RuntimeError, match="gives up"):
        own.compile_first()


def test_without_warm_up_nothing_begins() -> None:
    own, programs = stages("none")
    own.begin()
    assert own.is_done
    assert programs.compiled == []


@pytest.mark.parametrize("has_decode_steps", [False, True])
def test_with_all_they_are_there_at_the_start(has_decode_steps: bool) -> None:
    own, programs = stages("all", has_decode_steps=has_decode_steps)
    own.compile_first()
    several = [bucket for kind, bucket in programs.compiled if kind == "several"]
    assert several == (list(DECODE) if has_decode_steps else [])
    assert own.has_decode_steps

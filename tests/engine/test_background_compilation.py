"""Structured output whose programs are compiled beside the loop: others run on meanwhile.

The real engine loop, scheduler and executor. The compiler of the thread beside the loop is held up
until the test lets it go on, so what takes a minute elsewhere takes as long as it must here.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.messages import AbortRequest, FrontMessage, GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import StepPlan
from sgl_jax.engine.loop.core import EngineCore
from sgl_jax.executor.buckets import Bucket
from sgl_jax.executor.layout import LaunchedStep
from sgl_jax.executor.programs import Programs
from sgl_jax.replay.__main__ import main as replay
from tests.engine.scripted_channel import ScriptedChannel
from tests.support.waiting import TIMEOUT_S, until

DEMO = str(Path(__file__).parents[2] / "models" / "demo")
SLOW_S = 10 * TIMEOUT_S


def on_compile_thread(act: Callable[[], object]) -> Callable[[Programs, Bucket], Any]:
    """`Programs.halves`, before which the thread beside the loop does something."""
    compiled = Programs.halves

    def halves(programs: Programs, bucket: Bucket) -> Any:
        if threading.current_thread().name.startswith("compile"):
            act()
        return compiled(programs, bucket)

    return halves


class Held:
    """The compiler beside the loop: it begins once `may_run` is set, and fails if that says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_run = threading.Event()
        self.problem: Exception | None = None
        monkeypatch.setattr(Programs, "halves", on_compile_thread(self._wait))

    def _wait(self) -> None:
        assert self.may_run.wait(SLOW_S)
        if self.problem is not None:
            raise self.problem


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.may_run.set()


@pytest.fixture
def make_core() -> Iterator[Callable[..., EngineCore]]:
    cores: list[EngineCore] = []

    def make(**settings: Any) -> EngineCore:
        args: dict[str, Any] = {
            "model_path": DEMO,
            "device": "cpu",
            "context_length": 128,
            "max_total_tokens": 512,
            "max_running_requests": 2,
            "chunked_prefill_size": 2,  # few shapes
            "check_memory": "busy",
            "warmup": "plain",
        }
        cores.append(EngineCore(ServerArgs(**args | settings)))
        return cores[-1]

    yield make
    for core in cores:
        core._close()


def plain(rid: str) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid=rid, input_ids=[5, 6, 7], sampling=sampling)


def structured(rid: str) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=20, temperature=0.0, regex="[0-9]{3}")
    return GenerateRequest(rid=rid, input_ids=[5, 6, 7], sampling=sampling)


def turns_until(condition: Callable[[], object], what: str) -> Iterator[list[FrontMessage]]:
    """Empty polls, until it holds."""
    deadline = time.monotonic() + SLOW_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)
        yield []


def run(core: EngineCore, script: Iterator[list[FrontMessage]]) -> ScriptedChannel:
    """Serve the script, shut down; nothing may be left."""
    channel = ScriptedChannel(script)
    core.run(channel, close=False)
    core.scheduler.audit()
    for view in core.scheduler.memory_views():
        assert view.leased_pages == 0
        assert view.free_rows == view.total_rows
    return channel


def only_structured_is_left(core: EngineCore) -> bool:
    scheduler = core.scheduler
    return scheduler.num_running == 0 and scheduler.num_waiting == 1


@pytest.mark.long
def test_others_run_while_programs_are_compiled_and_then_all_do(
    make_core: Callable[..., EngineCore], compiler: Held, tmp_path: Path
) -> None:
    recording = tmp_path / "engine.events"
    core = make_core(record_events=str(recording))

    def script() -> Iterator[list[FrontMessage]]:
        yield [structured("x"), plain("a"), plain("b")]
        yield from turns_until(lambda: only_structured_is_left(core), "others end")
        assert core.state()["waiting_for"]["program"] == 1
        size = recording.stat().st_size
        yield from ([] for _ in range(20))
        assert recording.stat().st_size == size  # an engine at rest records nothing
        compiler.may_run.set()
        yield from turns_until(lambda: core.scheduler.is_idle, "the structured one ends")
        yield [structured("y"), plain("c")]
        yield from turns_until(lambda: core.scheduler.is_idle, "all end")

    channel = run(core, script())
    tokens, ends = channel.tokens(), channel.ends()
    assert tokens["a"] == tokens["b"] == tokens["c"]
    assert len(tokens["a"]) == 20
    assert tokens["x"] == tokens["y"]
    assert {ends[rid].type for rid in "xy"} == {"stop"}
    counters = core.state()["counters"]
    num_shapes = len(core.executor._stages.buckets.all)
    assert counters["compiles_at_start"] > num_shapes
    assert counters["compiles_in_background"] == 2 * num_shapes
    assert counters["compiles_after_ready"] == 0
    assert replay([str(recording), "--check-memory", "busy"]) == 0


def test_a_compilation_that_fails_ends_those_that_wait_and_no_others(
    make_core: Callable[..., EngineCore], compiler: Held
) -> None:
    core = make_core()
    compiler.problem = MemoryError("no room for the program")

    def script() -> Iterator[list[FrontMessage]]:
        yield [structured("x"), plain("a")]
        yield from turns_until(lambda: core.scheduler.num_running, "the other starts")
        compiler.may_run.set()
        yield from turns_until(lambda: core.scheduler.is_idle, "all end")
        yield [structured("y"), plain("b")]
        yield from turns_until(lambda: core.scheduler.is_idle, "all end")

    channel = run(core, script())
    for rid in "xy":
        end = channel.ends()[rid]
        assert end.status_code == 500
        assert re.search("structured output .*MemoryError: no room for the program", end.message)
    assert channel.tokens()["a"] == channel.tokens()["b"]


def test_those_that_wait_can_be_aborted_and_are_at_a_shutdown(
    make_core: Callable[..., EngineCore], compiler: Held
) -> None:
    core = make_core()

    def script() -> Iterator[list[FrontMessage]]:
        yield [structured("x"), structured("y")]
        yield [AbortRequest(rid="x")]
        yield from turns_until(lambda: only_structured_is_left(core), "one is aborted")

    ends = run(core, script()).ends()
    assert {ends[rid].type for rid in "xy"} == {"abort"}
    assert ends["y"].message == "the engine was shut down"


@pytest.mark.long
def test_two_programs_serve_all_until_the_others_are_compiled(
    make_core: Callable[..., EngineCore], compiler: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Programs.step

    def step(programs: Programs, bucket: Bucket) -> Any:
        if threading.current_thread().name == "compile":
            assert compiler.may_run.wait(SLOW_S)
        return compiled(programs, bucket)

    monkeypatch.setattr(Programs, "step", step)
    core = make_core(warmup="staged", max_running_requests=4)
    executor = core.executor
    launched: list[Bucket] = []
    run_step = executor._run

    def noted(bucket: Bucket, plan: StepPlan) -> LaunchedStep:
        launched.append(bucket)
        return run_step(bucket, plan)

    monkeypatch.setattr(executor, "_run", noted)

    def script() -> Iterator[list[FrontMessage]]:
        yield [structured("x"), plain("a")]
        yield from turns_until(lambda: only_structured_is_left(core), "the other ends")
        assert {Bucket(4, 4)} <= set(launched) <= {Bucket(4, 4), Bucket(4, 6)}
        assert core.state()["waiting_for"]["program"] == 1
        compiler.may_run.set()
        yield from turns_until(lambda: core.scheduler.is_idle, "the structured one ends")
        yield from turns_until(lambda: executor._stages.is_done, "all are compiled")
        launched.clear()
        yield [structured("y"), plain("b")]
        yield from turns_until(lambda: core.scheduler.is_idle, "all end")

    channel = run(core, script())
    tokens = channel.tokens()
    assert tokens["a"] == tokens["b"]
    assert tokens["x"] == tokens["y"]
    assert Bucket(2, 2) in launched
    counters = core.state()["counters"]
    assert counters["compiles_in_background"] == 3 * len(executor._stages.buckets.all) - 2
    assert counters["compiles_after_ready"] == 0


def test_a_step_whose_program_fails_to_compile_runs_padded(
    make_core: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def fail_if_small(programs: Programs, bucket: Bucket) -> Any:
            if bucket == Bucket(2, 2):
                raise MemoryError("no room for the program")
            return compiled(programs, bucket)

        return fail_if_small

    for name in ("step", "halves"):
        monkeypatch.setattr(Programs, name, failing(getattr(Programs, name)))
    core = make_core(warmup="staged", max_running_requests=4)
    until(lambda: core.executor._stages.is_done, "the rest is compiled", SLOW_S)

    def script() -> Iterator[list[FrontMessage]]:
        yield [structured("x"), plain("a")]
        yield from turns_until(lambda: core.scheduler.is_idle, "all end")

    ends = run(core, script()).ends()
    assert {end.type for end in ends.values()} == {"stop", "length"}


@pytest.mark.long
def test_a_warm_up_of_all_compiles_everything_before_ready(
    make_core: Callable[..., EngineCore],
) -> None:
    core = make_core(warmup="all")

    def script() -> Iterator[list[FrontMessage]]:
        yield [structured("x"), plain("a")]
        yield from turns_until(lambda: core.scheduler.is_idle, "all end")

    assert run(core, script()).ends()["x"].type == "stop"
    counters = core.state()["counters"]
    assert counters["compiles_at_start"] > 3 * len(core.executor._stages.buckets.all)
    assert counters["compiles_in_background"] == counters["compiles_after_ready"] == 0

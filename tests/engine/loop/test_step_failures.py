"""Steps that fail are counted; after too many in a row the engine ends, and one step shows that it
works again."""

from collections.abc import Iterator

import pytest

from sgl_jax.core.engine_messages import EngineInfo
from sgl_jax.core.errors import StepsFailedError
from sgl_jax.core.messages import FrontMessage, GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.weight_messages import ReleaseMemory, ResumeMemory
from sgl_jax.engine.loop import step_log, step_pipeline
from sgl_jax.engine.loop.step_log import StepFailures
from sgl_jax.scheduler.events import GrammarReady
from tests.engine.scripted_channel import ScriptedChannel
from tests.engine.test_faults import Rig
from tests.support.faults import EVERY

MAX_FAILURES = 5


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("model"), max_step_failures=MAX_FAILURES)
    yield rig
    rig.core.executor.close()


def request(rid: str) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid=rid, input_ids=[3, 4, 5], sampling=sampling)


def failures_told(channel: ScriptedChannel) -> list[int]:
    return [each.info["failed_steps"] for each in channel.sent if isinstance(each, EngineInfo)]


@pytest.mark.parametrize("kind", ["failing_launches", "failing_results"])
def test_failures_in_a_row_end_the_engine_after_every_request_has_its_answer(
    rig: Rig, kind: str
) -> None:
    rids = [f"{kind}{number}" for number in range(MAX_FAILURES)]

    def script() -> Iterator[list[FrontMessage]]:
        for rid in rids:
            yield from rig.until_idle([request(rid), request(f"{rid}-too")])

    before = rig.core.state()["counters"]["step_failures"]
    channel = ScriptedChannel(script())
    setattr(rig.executor, kind, EVERY)
    rig.core._is_shutting_down = False
    try:
        with pytest.raises(StepsFailedError, match="--max-step-failures"):
            rig.core.run(channel, close=False)
    finally:
        rig.executor.disarm()
        rig.core._failures.num_consecutive = 0  # as in the engine that takes its place
    assert {end.status_code for end in channel.ends().values()} == {500}
    assert set(channel.ends()) == {*rids, *(f"{rid}-too" for rid in rids)}
    assert failures_told(channel) == list(range(1, MAX_FAILURES + 1))
    assert rig.core.state()["counters"]["step_failures"] == before + MAX_FAILURES
    works = rig.run(rig.until_idle([request("works")]))
    assert works.ends()["works"].type == "length"
    assert failures_told(works) == []


def test_failed_draws_count_as_failed_steps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(message: GenerateRequest) -> None:
        if message.sampling.grammar is not None:
            rig.core.scheduler.handle(GrammarReady(message.rid))

    monkeypatch.setattr(rig.core._grammars, "begin", begin)
    monkeypatch.setattr(step_pipeline, "step_masks", lambda *_: [])
    sampling = SamplingParams(max_new_tokens=2, temperature=0.0, regex="[0-9]+")
    message = GenerateRequest(rid="masked", input_ids=[3, 4], sampling=sampling)

    def script() -> Iterator[list[FrontMessage]]:
        yield from rig.until_idle([message])
        rig.executor.disarm()
        yield from rig.until_idle([request("after")])

    rig.executor.failing_draws = True
    channel = rig.run(script())
    assert channel.ends()["masked"].status_code == 500
    assert channel.ends()["after"].type == "length"
    assert failures_told(channel) == [1, 0]


def test_without_requests_a_step_of_the_engine_shows_that_the_device_works_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a load balancer that reads /health would never send the request that shows it."""
    monkeypatch.setattr(step_log, "PROBE_INTERVAL_S", 0.0)

    def script() -> Iterator[list[FrontMessage]]:
        rig.executor.failing_launches = {rig.executor.num_launched + i for i in range(3)}
        yield from rig.until_idle([request("lost")])
        for _ in range(4):  # two probes fail, and one succeeds
            yield []
        assert rig.core._failures.num_consecutive == 0
        num_launched = rig.executor.num_launched
        yield []
        assert rig.executor.num_launched == num_launched
        yield from rig.until_idle([request("next")])

    channel = rig.run(script())
    assert failures_told(channel) == [1, 2, 3, 0]
    assert channel.ends()["next"].type == "length"


def test_no_step_shows_that_the_device_works_while_its_memory_is_released(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log, "PROBE_INTERVAL_S", 1000.0)

    def script() -> Iterator[list[FrontMessage]]:
        rig.executor.failing_launches = {rig.executor.num_launched}
        yield from rig.until_idle([request("failed")])
        yield [ReleaseMemory(rid="release", tags=["kv_cache"])]
        monkeypatch.setattr(step_log, "PROBE_INTERVAL_S", 0.0)
        num_launched = rig.executor.num_launched
        for _ in range(MAX_FAILURES):
            yield []
        assert rig.executor.num_launched == num_launched
        yield from rig.until_idle([ResumeMemory(rid="resume"), request("after")])

    channel = rig.run(script())
    assert channel.ends()["after"].type == "length"
    assert max(failures_told(channel)) == 1


def test_a_probe_comes_a_while_after_the_last_failure() -> None:
    now_s = [0.0]
    told: list[int] = []
    failures = StepFailures(2, told.append, lambda: now_s[0])
    assert not failures.is_probe_due
    failures.note_failure()
    now_s[0] = 4.9
    assert not failures.is_probe_due
    now_s[0] = 5.0
    assert failures.is_probe_due
    failures.check()
    failures.note_failure()
    with pytest.raises(StepsFailedError, match="the last 2 steps"):
        failures.check()
    failures.note_success()
    failures.check()
    assert told == [1, 2, 0]
    assert failures.num_failed == 2

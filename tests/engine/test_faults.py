"""A device that fails or lags, an engine ended in the middle: nothing leaks, what follows is right.

The real engine loop, scheduler and executor, on a small model with random weights.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_jax.core.engine_messages import Reply
from sgl_jax.core.messages import (
    FrontMessage,
    GenerateRequest,
    ListSessions,
    OpenSession,
    SessionTurn,
)
from sgl_jax.core.progress import Progress
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.loop import core as core_module
from sgl_jax.engine.loop.core import EngineCore
from sgl_jax.replay.__main__ import main as replay
from sgl_jax.scheduler.events import Flush, Tick
from sgl_jax.scheduler.record.event_log import EventReader
from tests.engine.scripted_channel import ScriptedChannel
from tests.support.faults import FaultyExecutor

MAX_TURNS = 400
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


class Rig:
    """An engine core that runs scripts, one after the other, with faults as set."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        self.core = EngineCore(
            ServerArgs(
                model_path=str(folder),
                load_format="dummy",
                device="cpu",
                context_length=128,
                max_total_tokens=512,
                max_running_requests=4,
                chunked_prefill_size=16,
                warmup="none",
                check_memory="busy",
                **settings,
            )
        )
        self.executor = FaultyExecutor(self.core.executor)
        self.core.executor = self.core.steps._executor = self.executor

    def run(self, script: Iterator[list[FrontMessage]]) -> ScriptedChannel:
        """Serve the script's messages, then shut down; the ledger must balance."""
        channel = ScriptedChannel(script)
        self.core._is_shutting_down = False
        self.core.run(channel, close=False)
        self.core.scheduler.audit()
        for view in self.core.scheduler.memory_views():
            assert view.leased_pages == 0
            assert view.free_rows == view.total_rows
        return channel

    def until_idle(self, messages: list[FrontMessage]) -> Iterator[list[FrontMessage]]:
        """Send `messages`, then wait for all of them."""
        yield messages
        for _ in range(MAX_TURNS):
            yield []
            if self.core.scheduler.is_idle:
                return
        raise AssertionError(f"not idle after {MAX_TURNS} turns")


def requests(prefix: str) -> list[FrontMessage]:
    sampling = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    return [
        GenerateRequest(rid=f"{prefix}{i}", input_ids=[3 + i] * (10 * i + 1), sampling=sampling)
        for i in range(6)
    ]


def outputs(channel: ScriptedChannel, prefix: str) -> list[list[int]]:
    tokens = channel.tokens()
    return [tokens[f"{prefix}{i}"] for i in range(6)]


def still_running(channel: ScriptedChannel, prefix: str, expected: list[list[int]]) -> list[int]:
    """Requests that did not finish, at least one; drafts may have brought others to their end."""
    finished = {i for i in range(6) if channel.ends()[f"{prefix}{i}"].type == "length"}
    for i in finished:
        assert outputs(channel, prefix)[i] == expected[i]
    assert len(finished) < 6
    return [i for i in range(6) if i not in finished]


WAYS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no-overlap": {"disable_overlap_schedule": True},
    "drafts": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3},
    "drafts, retracts": {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 3,
        "test_retract": True,
    },
}


# By default test_step_failures has failures without drafts and retracts.
BY_DEFAULT = "drafts, retracts"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(own, id=name, marks=() if name == BY_DEFAULT else pytest.mark.long)
        for name, own in WAYS.items()
    ],
)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("model")
    rig = Rig(folder, **request.param)
    yield rig
    rig.core.executor.close()


@pytest.fixture(scope="module")
def expected(rig: Rig) -> list[list[int]]:
    channel = rig.run(rig.until_idle(requests("calm")))
    assert {len(tokens) for tokens in outputs(channel, "calm")} == {12}
    return outputs(channel, "calm")


@pytest.mark.parametrize("step", [0, 1, 4, 9])
@pytest.mark.parametrize("kind", ["launch", "result"])
def test_a_failed_step_ends_its_requests_with_500_and_the_next_are_right(
    rig: Rig, expected: list[list[int]], kind: str, step: int
) -> None:
    def script() -> Iterator[list[FrontMessage]]:
        yield from rig.until_idle(requests("lost"))
        assert executor.num_failed == 1
        assert all(view.cached_pages == 0 for view in rig.core.scheduler.memory_views())
        yield from rig.until_idle(requests("next"))

    executor = rig.executor
    if kind == "launch":
        executor.failing_launches = {executor.num_launched + step}
    else:
        executor.failing_results = {executor.num_read + step}
    try:
        channel = rig.run(script())
    finally:
        executor.disarm()
    ends = channel.ends()
    lost = still_running(channel, "lost", expected)
    for i in lost:
        assert ends[f"lost{i}"].status_code == 500
        assert f"{kind} " in ends[f"lost{i}"].message
    assert {ends[f"next{i}"].type for i in range(6)} == {"length"}
    assert outputs(channel, "next") == expected


def test_results_that_come_late_are_the_same_results(
    rig: Rig, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.executor, "delay_s", 0.01)
    assert outputs(rig.run(rig.until_idle(requests("late"))), "late") == expected


@pytest.mark.parametrize("turns", range(5))
def test_a_shutdown_amid_prefill_releases_every_lease(
    rig: Rig, expected: list[list[int]], turns: int
) -> None:
    def script() -> Iterator[list[FrontMessage]]:
        yield requests("cut")
        yield from ([] for _ in range(turns))

    channel = rig.run(script())
    cut = still_running(channel, "cut", expected)
    assert {channel.ends()[f"cut{i}"].message for i in cut} == {"the engine was shut down"}
    # Steps in flight were never read: the device starts afresh, as for another engine.
    rig.executor.reset()
    assert rig.core.scheduler.handle(Flush())
    assert outputs(rig.run(rig.until_idle(requests("after"))), "after") == expected


def test_what_an_engine_recorded_is_decided_alike_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts, forced retracts, a failed step, and requests that take too long."""
    now_s = [1000.0]
    clock = SimpleNamespace(
        monotonic=lambda: now_s[0], thread_time=time.thread_time, sleep=time.sleep
    )
    monkeypatch.setattr(core_module, "time", clock)
    path = tmp_path / "engine.events"
    rig = Rig(
        tmp_path,
        record_events=str(path),
        request_timeout=30.0,
        **WAYS["drafts, retracts"],  # whose programs are in the compilation cache
    )

    def script() -> Iterator[list[FrontMessage]]:
        yield from rig.until_idle(requests("a"))
        rig.executor.failing_results = {rig.executor.num_read + 3}
        yield from rig.until_idle(requests("b"))
        yield requests("c")
        now_s[0] += 31
        yield []

    ends = rig.run(script()).ends()
    rig.core._close()
    assert {ends[f"a{i}"].type for i in range(6)} == {"length"}
    assert {ends[f"b{i}"].status_code for i in range(6)} == {500}
    assert {ends[f"c{i}"].status_code for i in range(6)} == {504}
    assert rig.core.scheduler.counters()["requests_force_retracted"] > 0
    assert replay([str(path), "--check-memory", "busy"]) == 0
    assert "18 requests" in capsys.readouterr().out


def test_an_engine_at_rest_records_nothing_until_a_session_has_idled_for_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    clock = SimpleNamespace(
        monotonic=lambda: now_s[0], thread_time=time.thread_time, sleep=time.sleep
    )
    monkeypatch.setattr(core_module, "time", clock)
    path = tmp_path / "engine.events"
    rig = Rig(tmp_path, record_events=str(path))
    turn = SessionTurn(id="s")
    sampling = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)

    def rest(seconds: int) -> Iterator[list[FrontMessage]]:
        for _ in range(5 * seconds):
            now_s[0] += 0.2
            yield []

    def script() -> Iterator[list[FrontMessage]]:
        yield [OpenSession(rid="q", session_id="s", streaming=True, timeout_s=60.0)]
        turns = (
            GenerateRequest(rid=f"{i}", input_ids=[5], sampling=sampling, session=turn)
            for i in range(2)
        )
        yield from rig.until_idle([next(turns)])
        yield from rest(1)
        size = path.stat().st_size
        yield from rest(40)
        assert path.stat().st_size == size
        yield [ListSessions(rid="listed")]
        yield from rig.until_idle([next(turns)])
        yield from rest(59)
        assert rig.core.scheduler.num_sessions == 1
        yield from rest(3)
        assert rig.core.scheduler.num_sessions == 0

    channel = rig.run(script())
    rig.core._close()
    replies = {reply.rid: reply for reply in channel.sent if isinstance(reply, Reply)}
    (entry,) = replies["listed"].data["sessions"]
    assert entry["idle_s"] == pytest.approx(41.0, abs=0.3)
    with path.open("rb") as file:
        num_ticks = sum(isinstance(event, Tick) for event in EventReader(file))
    assert num_ticks < 12
    assert replay([str(path), "--check-memory", "busy"]) == 0


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path, record_events="/dev/full")
    channel = rig.run(rig.until_idle(requests("a")))
    assert {channel.ends()[f"a{i}"].type for i in range(6)} == {"length"}
    rig.core._close()
    assert caplog.text.count("events are recorded no longer") == 1
    assert not hasattr(rig.core.executor, "_state")  # it has freed the device's memory


def test_a_recording_that_cannot_be_made_is_known_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(args: ServerArgs, progress: Progress) -> Callable[..., None]:
        pytest.fail("the model was loaded")

    monkeypatch.setattr("sgl_jax.engine.loop.core.ModelExecutor", load)
    with pytest.raises(FileNotFoundError, match="no-such-folder"):
        Rig(tmp_path, record_events=str(tmp_path / "no-such-folder" / "file"))

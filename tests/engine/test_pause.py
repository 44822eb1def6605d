"""Pauses and other settings on a real model: every token is as without them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_jax.core.engine_messages import EngineInfo, Reply
from sgl_jax.core.messages import (
    CALL_OF,
    AbortRequest,
    CallMessage,
    CancelCall,
    CloseSession,
    ContinueGeneration,
    FlushCache,
    ForkSession,
    FrontMessage,
    OpenSession,
    PauseGeneration,
    PauseMode,
    SetInternalState,
)
from sgl_jax.replay.__main__ import main as replay
from sgl_jax.scheduler.events import Resume
from tests.engine.scripted_channel import ScriptedChannel
from tests.engine.test_faults import Rig, outputs, requests

PAUSED_TURNS = 5


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recording") / "engine.events"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, recording: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("model"), dp_size=2, record_events=str(recording))
    yield rig
    rig.core._close()
    assert replay([str(recording), "--check-memory", "busy"]) == 0


@pytest.fixture(scope="module")
def expected(rig: Rig) -> list[list[int]]:
    return outputs(rig.run(rig.until_idle(requests("calm"))), "calm")


def paused(
    rig: Rig, channel_turns: int, mode: PauseMode, meanwhile: list[FrontMessage]
) -> Iterator[list[FrontMessage]]:
    """Requests that are paused after some turns, and continued after some more."""
    yield requests("a")
    yield from ([] for _ in range(channel_turns))
    yield [PauseGeneration(rid="pause", mode=mode)]
    num_steps = rig.core.scheduler.counters()["steps_planned"]
    yield meanwhile
    for _ in range(PAUSED_TURNS):
        yield []
    assert rig.core.scheduler.counters()["steps_planned"] == num_steps
    assert rig.core._is_audited
    yield from rig.until_idle([ContinueGeneration(rid="continue")])


def replies(channel: ScriptedChannel) -> dict[str, Reply]:
    return {reply.rid: reply for reply in channel.sent if isinstance(reply, Reply)}


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("turns", [0, 1, 6])
def test_tokens_are_the_same_as_without_a_pause(
    rig: Rig, expected: list[list[int]], mode: PauseMode, turns: int
) -> None:
    channel = rig.run(paused(rig, turns, mode, [FlushCache(rid="flush")]))
    assert outputs(channel, "a") == expected
    told = replies(channel)
    assert told["pause"].data["is_paused"]
    assert told["pause"].data["num_running"] + told["pause"].data["num_waiting"] == 6
    assert not told["continue"].data["is_paused"]
    assert (told["pause"].data["num_running"] > 0) == (mode == "in_place")
    assert told["flush"].ok
    changes = [m.info["is_paused"] for m in channel.sent if isinstance(m, EngineInfo)]
    assert changes == [True, False]


def test_an_abort_ends_all_and_what_comes_meanwhile_waits(
    rig: Rig, expected: list[list[int]]
) -> None:
    channel = rig.run(paused(rig, 4, "abort", requests("late")))
    assert {channel.ends()[f"a{i}"].type for i in range(6)} == {"abort"}
    for tokens, whole in zip(outputs(channel, "a"), expected, strict=True):
        assert tokens == whole[: len(tokens)]
    assert outputs(channel, "late") == expected


def test_clients_may_leave_during_a_pause(rig: Rig, expected: list[list[int]]) -> None:
    channel = rig.run(paused(rig, 4, "in_place", [AbortRequest(rid="a0")]))
    assert channel.ends()["a0"].type == "abort"
    assert outputs(channel, "a")[1:] == expected[1:]


def test_a_paused_engine_ends_when_it_is_told_to(rig: Rig) -> None:
    def script() -> Iterator[list[FrontMessage]]:
        yield requests("cut")
        yield [PauseGeneration(rid="pause", mode="in_place")]

    channel = rig.run(script())
    rig.core.scheduler.handle(Resume())
    assert {end.message for end in channel.ends().values()} == {"the engine was shut down"}


def facts(rig: Rig) -> tuple[object, ...]:
    """All that the undone calls change."""
    sessions = sorted(each.session_id for each in rig.core.scheduler.saved_sessions())
    return (
        rig.core.scheduler.is_paused,
        rig.core.scheduler.args.request_timeout,
        rig.core.args,
        rig.core.info,
        sessions,
    )


CALLS: dict[str, CallMessage] = {
    "pause": PauseGeneration(rid="late", mode="in_place"),
    "settings": SetInternalState(rid="late", server_args={"request_timeout": 60.0}),
    "open": OpenSession(rid="late", session_id="new"),
    "fork": ForkSession(rid="late", session_id="kept", new_session_id="new"),
    "continue": ContinueGeneration(rid="late"),
}


def test_each_undone_call_is_tried_here() -> None:
    undone = {call.message for call in CALL_OF.values() if call.is_undone}
    assert undone == {type(message) for message in CALLS.values()}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("when", ["not begun", "begun"])
def test_a_cancelled_call_has_no_effect(rig: Rig, name: str, when: str) -> None:
    call, cancel = CALLS[name], CancelCall(call="late")

    def script() -> Iterator[list[FrontMessage]]:
        yield [OpenSession(rid="open", session_id="kept", streaming=True)]
        if name == "continue":
            yield [PauseGeneration(rid="pause")]
        before = facts(rig)
        if when == "begun":
            yield [call]
            assert facts(rig) != before
            yield [cancel]
        else:
            yield [call, cancel]
        assert facts(rig) == before
        yield [ContinueGeneration(), CloseSession(rid="close", session_id="kept")]

    channel = rig.run(script())
    told = replies(channel)
    assert told["late"].ok == (when == "begun")
    assert told["close"].ok
    infos = [message.info for message in channel.sent if isinstance(message, EngineInfo)]
    assert infos[-1]["is_paused"] is False


def test_a_cancelled_flush_keeps_the_cache(rig: Rig) -> None:
    def cached() -> int:
        return sum(view.cached_pages for view in rig.core.scheduler.memory_views())

    def script() -> Iterator[list[FrontMessage]]:
        yield from rig.until_idle(requests("cached"))
        before = cached()
        yield [FlushCache(rid="late"), CancelCall(call="late")]
        assert cached() == before > 0

    assert not replies(rig.run(script()))["late"].ok


def test_a_later_call_stands_though_an_earlier_one_is_cancelled(rig: Rig) -> None:
    def script() -> Iterator[list[FrontMessage]]:
        yield [PauseGeneration(rid="late"), PauseGeneration(rid="again")]
        yield [CancelCall(call="late")]
        assert rig.core.scheduler.is_paused
        yield [ContinueGeneration(), OpenSession(rid="late", session_id="s")]
        yield [CloseSession(session_id="s"), OpenSession(rid="again", session_id="s")]
        yield [CancelCall(call="late"), CancelCall(call="unknown")]
        assert rig.core.scheduler.num_sessions == 1
        yield [CloseSession(session_id="s")]

    assert replies(rig.run(script()))["again"].ok


def test_settings_are_changed_all_or_none(rig: Rig, expected: list[list[int]]) -> None:
    most = rig.core.executor.sizes.max_chunk_tokens
    good = {
        "chunked_prefill_size": 4.0,
        "request_timeout": 60,
        "load_balance_method": "round_robin",
    }
    bad = {
        "page_size": ("page_size cannot be changed while the server runs; schedule_policy,", 16),
        "chunked_prefill_size": (f"chunked_prefill_size must be in [1, {most}]", most + 1),
        "request_timeout": ("request_timeout must be a number, got 'soon'", "soon"),
        "waiting_timeout": ("--waiting-timeout must be in [0.0, 1000000000.0]", -1.0),
        "schedule_policy": ("--schedule-policy must be one of fcfs, lpm", "random"),
    }

    def script() -> Iterator[list[FrontMessage]]:
        yield [SetInternalState(rid="good", server_args=good)]  # type: ignore[arg-type]
        args = rig.core.args
        yield [
            SetInternalState(rid=name, server_args={"request_timeout": 9.0} | {name: value})  # type: ignore[arg-type]
            for name, (_, value) in bad.items()
        ]
        assert rig.core.args == args
        assert rig.core.scheduler.args == args.for_scheduler()
        yield from rig.until_idle(requests("a"))

    channel = rig.run(script())
    told = replies(channel)
    assert told["good"].data["server_args"] == good
    assert rig.core.info["settings"].items() >= good.items()
    for name, (why, _) in bad.items():
        assert why in told[name].message
    assert outputs(channel, "a") == expected

"""The frontend hears of an engine that runs, and an engine whose loop stands still ends."""

import queue
import threading

import pytest

from sgl_jax.core.engine_messages import Heartbeat
from sgl_jax.core.errors import EngineStuckError
from sgl_jax.core.progress import Progress
from sgl_jax.engine.front.health import EngineHealth
from sgl_jax.engine.watchdog import Watchdog


def test_it_beats_while_nothing_feeds_it_and_ends_nothing_without_a_loop() -> None:
    beats: queue.Queue[Heartbeat] = queue.Queue()
    with Watchdog(beats.put, Progress()):
        heard = [beats.get(timeout=5) for _ in range(2)]
    assert heard == [Heartbeat(turn_s=None)] * 2


def test_a_heartbeat_has_the_phase_under_way() -> None:
    beats: queue.Queue[Heartbeat] = queue.Queue()
    progress = Progress()
    with progress.phase("loading", 10, "bytes") as phase:
        phase.advance(3)
        with Watchdog(beats.put, progress):
            heard = beats.get(timeout=5)
    health = EngineHealth(20.0)
    assert health.progress is None
    health.note(heard)
    assert health.progress == phase.report


def test_a_loop_that_stands_still_is_told_of_and_ends_the_engine_once() -> None:
    beats: queue.Queue[Heartbeat] = queue.Queue()
    stalled = threading.Event()
    with Watchdog(beats.put, Progress(), 0.2, stalled.set) as watchdog:
        for _ in range(5):
            watchdog.feed()
            assert (beats.get(timeout=5).turn_s or 0.0) < 0.2
        assert stalled.wait(5)
    turns = [beats.get_nowait().turn_s or 0.0 for _ in range(beats.qsize())]
    assert max(turns) > 0.2


def test_what_takes_long_on_purpose_ends_nothing() -> None:
    beats: queue.Queue[Heartbeat] = queue.Queue()
    stalled = threading.Event()
    with Watchdog(beats.put, Progress(), 0.2, stalled.set) as watchdog:
        with watchdog.patience():
            while (beats.get(timeout=5).turn_s or 0.0) < 0.4:
                assert not stalled.is_set()
        assert stalled.wait(5)


def test_silence_counts_from_the_last_heartbeat() -> None:
    now_s = [0.0]
    health = EngineHealth(20.0, lambda: now_s[0])
    now_s[0] = 19.0
    health.note(Heartbeat(turn_s=3.0))
    now_s[0] = 38.0
    health.check()
    assert health.turn_s == 3.0
    now_s[0] = 40.0
    assert health.stuck_since is not None
    with pytest.raises(EngineStuckError, match="silent for 21 s"):
        health.check()
    health.note(Heartbeat(turn_s=0.0))
    health.check()

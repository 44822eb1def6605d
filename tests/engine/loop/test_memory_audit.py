"""The memory of an engine that is never idle is walked in slices, at a bounded share of its
time."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.messages import FrontMessage
from sgl_jax.engine.loop import memory_audit
from sgl_jax.engine.loop.core import EngineCore
from sgl_jax.engine.loop.memory_audit import MAX_SHARE, PERIOD_S, BackgroundAudit
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.pages.pool_records import FREE, TREE
from sgl_jax.mem_cache.rank_memory import RankMemory
from tests.engine.scripted_channel import ScriptedChannel
from tests.engine.test_memory_defects import make_core, requests

__all__ = ["make_core"]


class Walks:
    """Walks of `num_slices` that cost a time each; the clock moves with the work alone."""

    def __init__(self, num_slices: int, cost_s: float) -> None:
        self.num_slices, self.cost_s = num_slices, cost_s
        self.now_s = self.worked_s = 0.0
        self.ended_at: list[float] = []
        self.is_broken = False

    def begin(self) -> Iterator[None]:
        for _ in range(self.num_slices):
            self.worked_s += self.cost_s
            self.now_s += self.cost_s
            if self.is_broken:
                raise LedgerError("broken")
            yield
        self.ended_at.append(self.now_s)

    def run(self, seconds: float, step_s: float = 0.001) -> BackgroundAudit:
        audit = BackgroundAudit(self.begin, 0.0, lambda: self.worked_s)
        while self.now_s < seconds:
            self.now_s += step_s
            audit.run_if_due(self.now_s)
        assert audit.num_walks == len(self.ended_at)
        assert audit.age_s(self.now_s) == pytest.approx(self.now_s - self.ended_at[-1], abs=0.1)
        return audit


@pytest.mark.parametrize(("num_slices", "cost_s"), [(5, 1e-4), (200, 1e-3), (40, 5e-3)])
def test_each_record_is_proved_once_in_60_seconds_at_less_than_1_percent(
    num_slices: int, cost_s: float
) -> None:
    walks = Walks(num_slices, cost_s)
    walks.run(300.0)
    assert walks.worked_s <= MAX_SHARE * walks.now_s + cost_s
    starts_and_ends = zip([-PERIOD_S, *walks.ended_at], walks.ended_at, strict=False)
    assert all(end - before <= 60.0 for before, end in starts_and_ends)
    assert len(walks.ended_at) <= 300.0 / PERIOD_S + 1


def test_a_walk_that_needs_more_than_its_share_takes_longer() -> None:
    walks = Walks(2000, 1e-3)
    walks.run(1000.0)
    assert walks.worked_s <= MAX_SHARE * walks.now_s + 1e-3
    assert 2 <= len(walks.ended_at) <= 3


def test_after_a_defect_the_walk_begins_again() -> None:
    walks = Walks(3, 1e-3)
    audit = BackgroundAudit(walks.begin, 0.0, lambda: walks.worked_s)
    audit.run_if_due(0.0)
    walks.is_broken = True
    with pytest.raises(LedgerError):
        audit.run_if_due(10.0)
    walks.is_broken = False
    for now_s in range(20, 60, 10):
        audit.run_if_due(float(now_s))
    assert audit.num_walks == 1


def own_a_free_page(memory: RankMemory) -> None:
    allocator = memory.allocator
    page = allocator._free_stack[0]
    assert allocator._owner[page] == FREE
    allocator._owner[page] = TREE


def lock_a_leaf(memory: RankMemory) -> None:
    next(node for node in memory.cache.nodes() if not node.children).locks[0] += 1


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice with each turn of the loop."""
    monkeypatch.setattr(memory_audit, "MAX_SHARE", 1e9)
    monkeypatch.setattr(memory_audit, "PERIOD_S", 0.0)


def constant_load(
    core: EngineCore, corrupt: Callable[[RankMemory], None], num_turns: int
) -> Iterator[list[FrontMessage]]:
    """Requests without an end, and a defect among them."""
    numbers = count()
    for turn in range(num_turns):
        if turn == num_turns // 2:
            corrupt(core.scheduler.ranks[1].memory)
        is_short = core.scheduler.num_running < 4
        assert turn == 0 or is_short or not core.scheduler.is_idle
        yield requests(f"{next(numbers)}-", count=2) if is_short else []


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("check_memory", "corrupt"),
    [
        ("background", own_a_free_page),
        ("background", lock_a_leaf),
        ("busy", lock_a_leaf),
        ("idle", own_a_free_page),  # it is not, without a walk
    ],
)
def test_a_defect_of_an_engine_that_is_never_idle_is_reported(
    make_core: Callable[..., EngineCore],
    corrupt: Callable[[RankMemory], None],
    check_memory: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_core(check_memory, "repair")
    monkeypatch.setattr(core, "_audit", lambda: None)  # what an idle engine does
    core.run(ScriptedChannel(constant_load(core, corrupt, 120)))
    state: dict[str, Any] = core.state()
    is_walked = check_memory != "idle"
    assert state["counters"]["memory_errors"] == int(is_walked)
    assert (state["counters"]["memory_walks"] > 2) == is_walked
    if is_walked:
        assert len(list((tmp_path / "dumps").iterdir())) == 1
        core.scheduler.audit()


def test_by_default_memory_is_walked_in_the_background() -> None:
    from sgl_jax.core.server_args import ServerArgs

    assert ServerArgs(model_path="none").check_memory == "background"

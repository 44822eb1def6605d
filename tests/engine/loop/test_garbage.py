"""Cyclic garbage: the memory stack makes none, and what others make is collected between steps."""

import gc
from collections.abc import Iterator

import pytest

from benchmarks.host import serving
from sgl_jax.engine.loop import garbage
from tests.support.long import long_but


@pytest.fixture(autouse=True)
def collection_as_before() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def make_cycles(count: int) -> None:
    for _ in range(count):
        cycle: list[object] = []
        cycle.append(cycle)


@pytest.mark.parametrize(
    "name", long_but(sorted(serving.LOADS), "limited by pages", "limited by prompt tokens")
)
def test_requests_and_turns_that_come_and_go_leave_no_cycles(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "NUM_SESSIONS", 40)
    monkeypatch.setattr(serving, "NUM_WAITING", 100)
    sizes = serving.LOADS[name]._replace(num_rows=17, answer_lens=(5, 20))
    load = serving.ServingLoad(sizes)
    for _ in range(10):
        load.fill_queue()
        load.step()
    garbage.schedule_collection()
    for _ in range(30):
        load.fill_queue()
        load.step()
    assert load.num_finished > 50
    assert gc.collect() == 0


def test_cycles_are_collected_between_steps_when_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "_MANY_AT_REST", 2000)
    monkeypatch.setattr(garbage, "_MANY_UNDER_LOAD", 20_000)
    garbage.schedule_collection()
    before = len(gc.get_objects())
    make_cycles(1000)
    assert not garbage.collect_if_many(True)
    make_cycles(4000)
    assert len(gc.get_objects()) > before + 4900
    assert not garbage.collect_if_many(False)
    assert garbage.collect_if_many(True)
    assert len(gc.get_objects()) < before + 1000
    make_cycles(20_000)
    assert garbage.collect_if_many(False)
    assert len(gc.get_objects()) < before + 1000

"""A step looks closely at few requests, however many are due or follow another one."""

import sys
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.admission import admission
from sgl_jax.scheduler.admission.admission import Admission
from sgl_jax.scheduler.events import Rebuild
from sgl_jax.scheduler.waiting.waiting_queue import WaitingQueue
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.scheduler.liveness import due_of
from tests.scheduler.waiting.test_waiting_queue import Queue


def test_of_many_that_become_due_at_once_few_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 wait, and the last ones have the longest cached prefix: they pass over all others."""
    sizes = make_sizes(dp_size=2, num_pages=400, num_rows=5, max_chunk_tokens=16)
    driver = Driver(sizes, SchedulerArgs(), max_skip_count=1)
    stem = [i % 47 for i in range(40)]
    for dp_rank in range(2):
        driver.submit(generate(f"stem{dp_rank}", stem, 1, dp_rank=dp_rank))
    driver.run()
    for i in range(400):
        driver.submit(generate(f"r{i}", [*stem[: i // 10], *[i % 47] * 8], 12))
    tried = 0
    inner = Admission._choose

    def choose(*args: Any) -> Any:
        nonlocal tried
        tried += 1
        return inner(*args)

    monkeypatch.setattr(Admission, "_choose", choose)
    most_due = 0
    while driver.scheduler.num_waiting:
        tried = 0
        driver.step()
        most_due = max(most_due, len(due_of(driver.scheduler._waiting)))
        assert tried <= 16
    assert most_due > 300
    driver.run()
    assert all(finish.type == "length" for finish in driver.finish.values())


def num_calls_to_try(num_prompts: int) -> int:
    """Python functions called to find what may start, where nothing may."""
    queue = Queue(dp_size=2)
    rows = [memory.open_lease(np.zeros(0, np.int32)).row for memory in queue.memories]
    for arrival in range(num_prompts):
        dp_rank = arrival % 2
        queue.waiting.delays.follow(queue.add(arrival, 32), dp_rank, rows[dp_rank], 16)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        assert queue.order() == []
    finally:
        sys.setprofile(None)
    return calls


def test_five_hundred_that_follow_a_prefix_cost_no_more_calls_than_ten() -> None:
    assert num_calls_to_try(500) == num_calls_to_try(10)


def test_counts_of_waiting_requests_need_no_visit_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(make_sizes(dp_size=2, num_pages=24, num_rows=5))
    scheduler = driver.scheduler
    most_retracted = most_pinned = 0

    def check() -> None:
        waiting = list(scheduler.waiting())
        retracted = sum(request.num_retractions > 0 for request in waiting)
        pinned = [sum(r.message.dp_rank == rank for r in waiting) for rank in range(2)]
        with monkeypatch.context() as counting:
            counting.setattr(WaitingQueue, "__iter__", None)
            assert scheduler.num_waiting_retracted == retracted
            assert [scheduler.num_waiting_for(rank) for rank in range(2)] == pinned
        nonlocal most_retracted, most_pinned
        most_retracted, most_pinned = max(most_retracted, retracted), max(most_pinned, *pinned)

    for i in range(30):
        driver.submit(generate(f"r{i}", [i] * 8, 40, dp_rank=(None, 0, 1)[i % 3]))
    for number in range(60):
        driver.step()
        if number % 10 == 5:
            driver.abort(f"r{29 - number // 10}")
        check()
    scheduler.handle(Rebuild("afresh"))
    check()
    assert scheduler.num_waiting == 0
    assert (most_retracted > 1, most_pinned > 5) == (True, True)


def test_counts_by_reason_need_no_call_for_each_request() -> None:
    """The reasons of 600 waiting requests are counted with hardly more calls than those of 30."""
    calls = []
    for count in (30, 600):
        driver = Driver(make_sizes(dp_size=2, num_pages=24, num_rows=5))
        for i in range(count):
            driver.submit(generate(f"r{i}", [i % 47] * 8, 40, dp_rank=(None, 0, 1)[i % 3]))
        for _ in range(3):
            driver.step()
        scheduler = driver.scheduler
        seen = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal seen
            seen += event == "call"

        sys.setprofile(note)
        try:
            counts = scheduler.count_waiting()
        finally:
            sys.setprofile(None)
        calls.append(seen)
        assert sum(counts.values()) == scheduler.num_waiting > count - 12
    assert calls[1] < calls[0] + 30  # a rank may be held for one of the 600


def test_those_that_follow_a_prefix_are_passed_over_once_the_last_line_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last line starts first, so fewer lines are in use when the others begin to wait."""
    monkeypatch.setattr(admission, "MAX_DEFERRED", 1)
    sizes = make_sizes(num_pages=128, max_chunk_tokens=64)
    driver = Driver(sizes, SchedulerArgs(enable_priority_scheduling=True))
    prompt = [i % 47 for i in range(80)]
    driver.submit(generate("leader", [*prompt, 1], 4, priority=1))
    driver.step()
    for i in range(3):
        driver.submit(generate(f"r{i}", [*prompt, 2 + i], 4, priority=1))
    driver.submit(generate("last", [9, 8, 7], 4, priority=2))
    driver.step()
    waiting = [request.rid for request in driver.scheduler.waiting()]
    assert waiting == ["r0", "r1", "r2"]
    driver.run()
    assert all(finish.type == "length" for finish in driver.finish.values())


@pytest.mark.parametrize("preempts", [False, True])
def test_of_many_that_fit_a_fixed_number_starts_in_each_step(
    monkeypatch: pytest.MonkeyPatch, preempts: bool
) -> None:
    """Rows that decode wait for the starts of a step. With `preempts` all rows are in use."""
    monkeypatch.setattr(admission, "MAX_STARTS", 3)
    sizes = make_sizes(dp_size=2, num_pages=64, num_rows=5, max_chunk_tokens=64)
    driver = Driver(sizes, SchedulerArgs(enable_priority_scheduling=True))
    if preempts:
        for i in range(8):
            driver.submit(generate(f"low{i}", [i, 2, 3], 40))
        for _ in range(3):
            driver.step()
        assert not driver.scheduler.num_waiting
    for i in range(8):
        driver.submit(generate(f"r{i}", [20 + i, 5, 6, 7], 40, priority=1000))
    for waiting in (5, 2, 0):
        driver.step()
        late = [each.rid for each in driver.scheduler.waiting() if each.rid.startswith("r")]
        assert len(late) == waiting
        assert all(driver.scheduler.why_waiting(rid).kind == "step" for rid in late) or preempts
    driver.run()
    assert all(finish.type == "length" for finish in driver.finish.values())

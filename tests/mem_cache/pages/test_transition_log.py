"""What the log of moves remembers, and that it forgets in time."""

import numpy as np

from sgl_jax.mem_cache.pages.page_allocator import MAX_CALLS, MAX_PAGES, TransitionLog


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_moves_come_back_in_order_with_their_owners() -> None:
    log = TransitionLog()
    log.note("take", pages(1, 2), pages(5, 6))
    log.note("give to the tree", 1, pages(5))
    log.note("free", 2, pages(6))
    found = log.of(pages(6))
    assert [(move.clock, move.action, move.pages.tolist()) for move in found] == [
        (1, "take", [6]),
        (3, "free", [6]),
    ]
    assert found[0].owners.tolist() == [2]
    assert found[1].owners == 2
    assert log.of(pages(7)) == []


def test_it_is_bounded_in_calls_and_its_clock_goes_on() -> None:
    log = TransitionLog()
    for _ in range(MAX_CALLS + 10):
        log.note("free", 1, pages(5))
    assert len(log.all()) == MAX_CALLS
    assert (log.all()[0].clock, log.all()[-1].clock) == (11, MAX_CALLS + 10)
    log.clear()
    log.note("free", 1, pages(5))
    assert [move.clock for move in log.all()] == [MAX_CALLS + 11]


def test_it_is_bounded_in_pages() -> None:
    log = TransitionLog()
    log.note("free", 1, pages(5))
    log.note("free", 1, np.arange(2 * MAX_PAGES, dtype=np.int32))
    (kept,) = log.all()
    assert len(kept.pages) == MAX_PAGES
    for _ in range(20):
        log.note(
            "take", np.ones(MAX_PAGES // 4, np.int32), np.arange(MAX_PAGES // 4, dtype=np.int32)
        )
    assert sum(len(move.pages) for move in log.all()) <= MAX_PAGES

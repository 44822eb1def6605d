"""What the log of moves remembers, and that it forgets in time."""

import numpy as np
import pytest

from sgl_jax.mem_cache.errors import OwnershipError
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.pages.pool_records import MAX_CALLS, MAX_PAGES


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_moves_come_back_in_order_with_their_owners() -> None:
    allocator = PageAllocator(8)
    assert allocator.alloc_each(pages(1, 2)).tolist() == [1, 2]
    allocator.give_to_tree(pages(1), owner=1)
    with pytest.raises(OwnershipError):
        allocator.free(pages(2), owner=1)
    allocator.free(pages(2), owner=2)
    assert [
        (move.clock, move.action, move.owners.tolist(), move.pages.tolist())
        for move in allocator.transitions()
    ] == [
        (1, "take", [1, 2], [1, 2]),
        (2, "give to the tree", [1], [1]),
        (3, "free", [2], [2]),
    ]
    assert allocator.describe(pages(2)) == (
        "page 2: free (before: row 2); last transitions: [1] row 2 took page 2, "
        "[3] row 2 freed page 2"
    )
    assert "none remembered" in allocator.describe(pages(7))


def test_it_is_bounded_in_calls_and_its_clock_goes_on() -> None:
    allocator = PageAllocator(2)
    for _ in range(MAX_CALLS // 2 + 5):
        allocator.free(allocator.alloc(1, owner=1), owner=1)
    moves = allocator.transitions()
    assert len(moves) == MAX_CALLS
    assert (moves[0].clock, moves[-1].clock) == (11, MAX_CALLS + 10)
    allocator.reset()
    allocator.alloc(1, owner=1)
    assert [move.clock for move in allocator.transitions()] == [MAX_CALLS + 11]


def test_it_is_bounded_in_pages() -> None:
    allocator = PageAllocator(2 * MAX_PAGES)
    small, large = allocator.alloc(5, owner=1), allocator.alloc(MAX_PAGES + 7, owner=2)
    (kept,) = allocator.transitions()
    assert kept.pages.tolist() == large[:MAX_PAGES].tolist()
    allocator.free(small, owner=1)
    (kept,) = allocator.transitions()
    assert (kept.action, kept.owners.tolist()) == ("free", [1] * 5)
    assert kept.pages.tolist() == small.tolist()
    for _ in range(3):
        allocator.free(allocator.alloc(MAX_PAGES // 4 + 1, owner=3), owner=3)
    moves = allocator.transitions()
    assert [move.action for move in moves] == ["free", "take", "free"]
    assert all(np.unique(move.owners).tolist() == [3] for move in moves)

"""The records of a pool's pages on all ranks, and the compiled loops that change them.

One call takes the pages of a step on all ranks. `page_allocator.py` has the rules and raises the
errors.
"""

from typing import Literal, NamedTuple

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import Int32Array, IntpArray
from sgl_jax.mem_cache.errors import OutOfPagesError

FREE = 0
RESERVED = -1
TREE = -2

NULL_PAGE = 0

Action = Literal["take", "give to the tree", "free"]

MAX_CALLS = 4096
MAX_PAGES = 65_536

ACTIONS: tuple[Action, ...] = ("take", "give to the tree", "free")
TAKE, GIVE, GIVE_BACK = range(3)
# Columns of `PoolRecords.counts`: pages without an owner, and owned by the tree; pages freed or
# given to the tree so far; moves and calls logged so far.
NUM_FREE, NUM_TREE, NUM_MOVED, NUM_LOGGED, CLOCK = range(5)


class PoolRecords(NamedTuple):
    """The records of one pool on all ranks. The loops below change them. The allocator of a rank
    has a view of its line of each.

    `moves` and `calls` are a log of the latest transitions, at most `MAX_CALLS` of them and
    `MAX_PAGES` pages. Its clock counts calls and reads no time.
    """

    owners: Int32Array  # [ranks, num_pages]
    # [ranks, num_pages] stacks: the lowest ids come out first, and the page freed last is reused
    # first, while it is still warm in some cache.
    free_stacks: Int32Array
    # [ranks, MAX_PAGES, 2] the owner and the page of each move; move i is at i % MAX_PAGES.
    moves: Int32Array
    # [ranks, MAX_CALLS, 3] the action, first move and number of pages of each call; call i is at
    # i % MAX_CALLS.
    calls: IntpArray
    counts: IntpArray  # [ranks, 5], see `NUM_FREE`

    @classmethod
    def empty(cls, num_ranks: int, num_pages: int) -> "PoolRecords":
        records = cls(
            np.empty((num_ranks, num_pages), np.int32),
            np.empty((num_ranks, num_pages), np.int32),
            np.empty((num_ranks, MAX_PAGES, 2), np.int32),
            np.empty((num_ranks, MAX_CALLS, 3), np.intp),
            np.empty((num_ranks, 5), np.intp),
        )
        for each in records:
            each.fill(0)  # now: the first write to a page of memory takes time
        return records

    def num_free(self, ranks: IntpArray) -> IntpArray:
        """Return the number of free pages of each of `ranks`."""
        num_free: IntpArray = self.counts[ranks, NUM_FREE]
        return num_free

    def alloc_each(self, ranks: IntpArray, counts: IntpArray, owners: Int32Array) -> Int32Array:
        """Take a free page for each of `owners`, which are rows: `counts[k]` of them, in order, on
        rank `ranks[k]`; int32[len(owners)]. Raise `OutOfPagesError`, changing nothing, if a rank
        has fewer."""
        pages: Int32Array = np.empty(len(owners), np.int32)
        short = _pop_on_ranks(ranks, counts, owners, pages, *self)
        if short >= 0:
            num_free = self.counts[ranks[short], NUM_FREE]
            raise OutOfPagesError(
                f"rank {ranks[short]}: {counts[short]} pages asked, {num_free} free"
            )
        return pages


@compiled("(int64, int64, int64[:, ::1], int64[::1])")
def _log(action: int, num_pages: int, calls: IntpArray, counts: IntpArray) -> None:
    """Record a call. Of more than `MAX_PAGES` pages, only the first `MAX_PAGES` are kept."""
    call = calls[counts[CLOCK] % len(calls)]
    call[0], call[1], call[2] = action, counts[NUM_LOGGED], num_pages
    counts[CLOCK] += 1
    counts[NUM_LOGGED] += min(num_pages, MAX_PAGES)


@compiled(
    "(int32[::1], int64, int64, int64, int32[::1], int64[::1], int32[::1], int32[::1], "
    "int32[:, ::1], int64[:, ::1], int64[::1])"
)
def change_owner(
    pages: Int32Array,
    owner: int,
    new_owner: int,
    action: int,
    last_owners: Int32Array,
    stamps: IntpArray,
    owners: Int32Array,
    free: Int32Array,
    moves: Int32Array,
    calls: IntpArray,
    counts: IntpArray,
) -> bool:
    """Move `pages` from `owner` to `new_owner`; return False, changing no owner, if not allowed.

    A move is not allowed if a page does not exist, has another owner or appears twice, or if
    `owner` is `FREE` or `RESERVED`. `last_owners` and `stamps` cover all pages. The pages are
    stamped even if the move is refused. The last five are lines of `PoolRecords`.
    """
    assert len(owners) == len(last_owners) == len(stamps) == len(free)
    first_stamp, first_move = counts[NUM_MOVED], counts[NUM_LOGGED]
    for i in range(len(pages)):
        page = pages[i]
        if page < 0 or page >= len(owners) or owners[page] != owner:
            return False
        stamps[page] = first_stamp + i
    # If two pages are equal, only the last keeps its stamp.
    for i in range(len(pages)):
        if stamps[pages[i]] != first_stamp + i or owner in (FREE, RESERVED):
            return False
    for i in range(len(pages)):
        last_owners[pages[i]] = owner
        owners[pages[i]] = new_owner
        if i < len(moves):
            move = moves[(first_move + i) % len(moves)]
            move[0], move[1] = owner, pages[i]
        if new_owner == FREE:
            free[counts[NUM_FREE] + i] = pages[i]
    counts[NUM_FREE] += len(pages) * (new_owner == FREE)
    counts[NUM_TREE] += len(pages) * ((new_owner == TREE) - (owner == TREE))
    counts[NUM_MOVED] += len(pages)
    _log(action, len(pages), calls, counts)
    return True


@compiled(
    "(int32[::1], int32[::1], int32[::1], int32[::1], int32[:, ::1], int64[:, ::1], int64[::1])"
)
def pop_each(
    new_owners: Int32Array,
    pages: Int32Array,
    owners: Int32Array,
    free: Int32Array,
    moves: Int32Array,
    calls: IntpArray,
    counts: IntpArray,
) -> bool:
    """Take `pages`, one for each of `new_owners`, from the end of the free ones, and record their
    owners. The last page is taken first. Return False, changing nothing, if too few are free or one
    of `new_owners` is not a row. The last five are lines of `PoolRecords`."""
    num_free, first_move = counts[NUM_FREE], counts[NUM_LOGGED]
    assert len(pages) == len(new_owners)
    assert num_free <= len(free)
    if len(pages) > num_free:
        return False
    for owner in new_owners:
        if owner < 1:
            return False
    for i in range(len(pages)):
        pages[i] = free[num_free - 1 - i]
        assert 0 <= pages[i] < len(owners)
        owners[pages[i]] = new_owners[i]
        if i < len(moves):
            move = moves[(first_move + i) % len(moves)]
            move[0], move[1] = new_owners[i], pages[i]
    counts[NUM_FREE] -= len(pages)
    _log(TAKE, len(pages), calls, counts)
    return True


@compiled(
    "(int64[::1], int64[::1], int32[::1], int32[::1], int32[:, ::1], int32[:, ::1], "
    "int32[:, :, ::1], int64[:, :, ::1], int64[:, ::1])"
)
def _pop_on_ranks(
    ranks: IntpArray,
    num_asked: IntpArray,
    new_owners: Int32Array,
    pages: Int32Array,
    owners: Int32Array,
    free: Int32Array,
    moves: Int32Array,
    calls: IntpArray,
    counts: IntpArray,
) -> int:
    """Call `pop_each` on each of `ranks` that is asked for pages, and return -1. If a rank has too
    few, change nothing and return its index. See `PoolRecords.alloc_each`."""
    assert len(ranks) == len(num_asked)
    assert num_asked.sum() == len(new_owners) == len(pages)
    assert len(owners) == len(free) == len(moves) == len(calls) == len(counts)
    for k in range(len(ranks)):
        assert 0 <= ranks[k] < len(owners)
        if num_asked[k] > counts[ranks[k], NUM_FREE]:
            return k
    first = 0
    for k in range(len(ranks)):
        if not num_asked[k]:
            continue
        rank, end = ranks[k], first + num_asked[k]
        assert pop_each(
            new_owners[first:end],
            pages[first:end],
            owners[rank],
            free[rank],
            moves[rank],
            calls[rank],
            counts[rank],
        ), "only rows take pages"
        first = end
    return -1

"""Allocates the pages of one rank's pool and records the owner of each.

A page always has exactly one owner: none (`FREE`), the engine (`RESERVED`, page 0), the prefix tree
(`TREE`), or the lease of row r of the row pool (owner r, at least 1). Every move names the owner it
expects, so a double free, or a move of another owner's page, raises at once. The allocator only
records owners; it never evicts. A log of the latest moves explains a failed check.
"""

from collections import deque
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray
from sgl_jax.mem_cache.errors import OutOfPagesError, OwnershipError

FREE = 0
RESERVED = -1
TREE = -2

NULL_PAGE = 0

Action = Literal["take", "give to the tree", "free"]

MAX_CALLS = 4096
MAX_PAGES = 65_536

_MOVES_SHOWN = 24
_IN_WORDS = {
    "take": "{} took page {}",
    "give to the tree": "{} gave page {} to the tree",
    "free": "{} freed page {}",
}


class Transition(NamedTuple):
    """One call: the owner of each page performed `action` at tick `clock`."""

    clock: int
    action: Action
    owners: Int32Array
    pages: Int32Array


class TransitionLog:
    """The latest transitions, at most `MAX_CALLS` of them and `MAX_PAGES` pages.

    Its clock counts calls and reads no time. The compiled loops below write the owners and pages of
    a call to `moves`, from `num_moves` on, before `note` counts them.
    """

    def __init__(self) -> None:
        self.clock = 0
        # The owner and the page of each move; move i is at i % MAX_PAGES.
        self.moves = np.zeros((MAX_PAGES, 2), np.int32)
        self.num_moves = 0
        self._calls: deque[tuple[Action, int, int]] = deque(maxlen=MAX_CALLS)

    def note(self, action: Action, num_pages: int) -> None:
        """Record a call. Of more than `MAX_PAGES` pages, only the first `MAX_PAGES` are kept."""
        self.clock += 1
        self._calls.append((action, self.num_moves, num_pages))
        self.num_moves += min(num_pages, MAX_PAGES)

    def clear(self) -> None:
        """Remove all transitions; the clock continues."""
        self._calls.clear()

    def all(self) -> list[Transition]:
        found = []
        for clock, (action, first, count) in enumerate(
            self._calls, self.clock + 1 - len(self._calls)
        ):
            if self.num_moves - first <= MAX_PAGES:
                places = np.arange(first, first + min(count, MAX_PAGES)) % MAX_PAGES
                owners, pages = self.moves[places].T
                found.append(Transition(clock, action, owners, pages))
        return found

    def of(self, pages: NDArray[np.integer[Any]]) -> list[Transition]:
        found = []
        for transition in self.all():
            concerned = np.isin(transition.pages, pages)
            if concerned.any():
                owners, own_pages = transition.owners[concerned], transition.pages[concerned]
                found.append(transition._replace(owners=owners, pages=own_pages))
        return found


def describe_owner(owner: int, holder: str = "row") -> str:
    return {FREE: "free", RESERVED: "reserved", TREE: "tree"}.get(owner, f"{holder} {owner}")


def each_page(move: Transition) -> list[tuple[int, int]]:
    return list(zip(move.pages.tolist(), move.owners.tolist(), strict=True))


class PageAllocator:
    """Free list and owner array over `num_pages` pages. Each call is O(number of pages it moves).

    Args:
        num_pages: pages of the pool, including the null page; at least 2.
        name: name of the pool in messages, such as "rank 0 full".
    """

    def __init__(self, num_pages: int, name: str = "pool") -> None:
        if num_pages < 2:
            raise ValueError(f"{name}: a pool needs at least 2 pages, got {num_pages}")
        self.num_pages = num_pages
        self.name = name
        self._owner = np.full(num_pages, FREE, np.int32)
        self._last_owner = np.full(num_pages, FREE, np.int32)
        # By page: the value of `num_moved` when the page was last freed or given to the tree.
        self._stamp = np.zeros(num_pages, np.intp)
        self.num_moved = 1  # pages freed or given to the tree so far
        self._log = TransitionLog()
        # A stack: the lowest ids come out first, and the page freed last is reused first, while it
        # is still warm in some cache.
        self._free_stack = np.zeros(num_pages, np.int32)
        self.num_free = 0  # pages without an owner
        self.num_tree = 0  # owned by the prefix tree
        self.reset()

    def reset(self) -> None:
        self._owner.fill(FREE)
        self._last_owner.fill(FREE)
        self._owner[NULL_PAGE] = RESERVED
        self._free_stack[: self.num_pages - 1] = np.arange(self.num_pages - 1, 0, -1)
        self.num_free = self.num_pages - 1
        self.num_tree = 0
        self._log.clear()

    @property
    def num_reserved(self) -> int:
        return 1

    @property
    def num_leased(self) -> int:
        return self.num_pages - self.num_reserved - self.num_free - self.num_tree

    def alloc(self, num_pages: int, owner: int) -> Int32Array:
        """Take `num_pages` free pages for row `owner`; int32[num_pages]. Raise `OutOfPagesError`,
        changing nothing, if fewer are free."""
        owners = np.empty(num_pages, np.int32)
        owners.fill(owner)  # in less time than `np.full` takes for a few
        return self.alloc_each(owners)

    def alloc_each(self, owners: Int32Array) -> Int32Array:
        """Take one free page for each row in `owners` (repeats allowed); int32[len(owners)].

        Raise `OutOfPagesError`, changing nothing, if fewer pages are free, and `OwnershipError` if
        an owner is not a row.
        """
        count, log = len(owners), self._log
        if count > self.num_free:
            raise OutOfPagesError(f"{self.name}: {count} pages asked, {self.num_free} free")
        pages: Int32Array = np.empty(count, np.int32)
        if not _pop_each(
            owners,
            self._free_stack,
            self.num_free,
            self._owner,
            pages,
            log.moves,
            log.num_moves,
        ):
            raise OwnershipError(f"{self.name}: only rows take pages, not owner {owners.min()}")
        self.num_free -= count
        log.note("take", count)
        return pages

    def free(self, pages: Int32Array, owner: int) -> None:
        """Free pages of `owner`. If it lacks one, raise `OwnershipError`, changing nothing."""
        self._move(pages, owner, FREE, "free")
        count = len(pages)
        self._free_stack[self.num_free : self.num_free + count] = pages
        self.num_free += count
        if owner == TREE:
            self.num_tree -= count

    def give_to_tree(self, pages: Int32Array, owner: int) -> None:
        """Give pages of row `owner` to the tree, or raise `OwnershipError`, changing nothing."""
        self._move(pages, owner, TREE, "give to the tree")
        self.num_tree += len(pages)

    def _move(self, pages: Int32Array, owner: int, new_owner: int, action: Action) -> None:
        log = self._log
        if not _change_owner(
            pages,
            owner,
            new_owner,
            self.num_moved,
            self._owner,
            self._last_owner,
            self._stamp,
            log.moves,
            log.num_moves,
        ):
            self._refuse(pages, owner, action)
        self.num_moved += len(pages)
        log.note(action, len(pages))

    def owners(self) -> Int32Array:
        return self._owner.copy()

    def given_before(self, num_moved: int) -> BoolArray:
        """Return bool[num_pages]: True if the tree has owned the page since that `num_moved`."""
        is_given: BoolArray = (self._owner == TREE) & (self._stamp < num_moved)
        return is_given

    def owners_of(self, pages: Int32Array) -> Int32Array:
        """Return the owner of each of `pages`, int32[len(pages)]. All of them must exist."""
        owners: Int32Array = self._owner[pages]
        return owners

    def misplaced_pages(self) -> Int32Array:
        """Return the pages that the free list misplaces, and its entries that are not pages. A free
        page must be listed exactly once, and no other page may be listed."""
        listed = self._free_stack[: self.num_free]
        exists = (listed >= 0) & (listed < self.num_pages)
        is_listed = np.zeros(self.num_pages, np.bool_)
        is_listed[listed[exists]] = True
        is_wrong = is_listed != (self._owner == FREE)
        if np.count_nonzero(is_listed) < len(listed):
            is_wrong |= np.bincount(listed[exists], minlength=self.num_pages) > 1
        return np.concatenate([np.flatnonzero(is_wrong).astype(np.int32), listed[~exists]])

    def free_pages(self) -> Int32Array:
        """Return a copy of the free list, in no particular order."""
        return self._free_stack[: self.num_free].copy()

    @property
    def clock(self) -> int:
        """Return the number of moves so far; it dates each move in the log."""
        return self._log.clock

    def transitions(self) -> list[Transition]:
        return self._log.all()

    def describe(self, pages: Int32Array, limit: int = 8) -> str:
        """Describe the owners and latest moves of the first `limit` of `pages`, for messages."""
        shown = ", ".join(
            f"page {page}: {describe_owner(int(self._owner[page]))} "
            f"(before: {describe_owner(int(self._last_owner[page]))})"
            for page in pages[:limit].tolist()
        )
        more = len(pages) - limit
        shown += f" and {more} more" if more > 0 else ""
        # Oldest first. Ticks count calls to this pool.
        moves = [
            f"[{move.clock}] " + _IN_WORDS[move.action].format(describe_owner(owner), page)
            for move in self._log.of(pages[:limit])
            for page, owner in each_page(move)
        ]
        forgotten = "" if len(moves) <= _MOVES_SHOWN else f"({len(moves) - _MOVES_SHOWN} before) "
        history = forgotten + ", ".join(moves[-_MOVES_SHOWN:]) if moves else "none remembered"
        return f"{shown}; last transitions: {history}"

    def _refuse(self, pages: Int32Array, owner: int, action: Action) -> NoReturn:
        """Raise `OwnershipError` with the reason for which `owner` cannot move `pages`."""
        is_missing = (pages < 0) | (pages >= self.num_pages)
        if is_missing.any():
            raise OwnershipError(
                f"{self.name}: cannot {action}: no such page {pages[is_missing][:8].tolist()}"
            )
        wrong = self._owner[pages] != owner
        if owner in (FREE, RESERVED) or wrong.any():
            raise OwnershipError(
                f"{self.name}: {describe_owner(owner)} cannot {action} pages of another owner: "
                f"{self.describe(pages[wrong] if wrong.any() else pages)}"
            )
        values, counts = np.unique(pages, return_counts=True)
        raise OwnershipError(
            f"{self.name}: cannot {action} a page twice in one call: "
            f"{values[counts > 1][:8].tolist()}"
        )


@compiled(
    "(int32[::1], int64, int64, int64, int32[::1], int32[::1], int64[::1], int32[:, ::1], int64)"
)
def _change_owner(
    pages: Int32Array,
    owner: int,
    new_owner: int,
    first_stamp: int,
    owners: Int32Array,
    last_owners: Int32Array,
    stamps: IntpArray,
    moves: Int32Array,
    first_move: int,
) -> bool:
    """Move `pages` from `owner` to `new_owner`; return False, changing no owner, if not allowed.

    A move is not allowed if a page does not exist, has another owner or appears twice, or if
    `owner` is `FREE` or `RESERVED`. `owners`, `last_owners` and `stamps` cover all pages. The pages
    are stamped from `first_stamp` on, even if the move is refused. `moves` and `first_move` belong
    to the `TransitionLog`.
    """
    assert len(owners) == len(last_owners) == len(stamps)
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
    return True


@compiled("(int32[:], int32[::1], int64, int32[::1], int32[::1], int32[:, ::1], int64)")
def _pop_each(
    new_owners: Int32Array,
    free: Int32Array,
    num_free: int,
    owners: Int32Array,
    pages: Int32Array,
    moves: Int32Array,
    first_move: int,
) -> bool:
    """Take `pages`, one for each of `new_owners`, from the end of the first `num_free` of `free`,
    and record their owners. The last page is taken first. Return False, changing nothing, if one of
    `new_owners` is not a row. `moves` and `first_move` belong to the `TransitionLog`."""
    assert len(pages) == len(new_owners)
    assert len(pages) <= num_free <= len(free)
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
    return True

"""Allocates the pages of one rank's pool and records the owner of each.

A page always has exactly one owner: none (`FREE`), the engine (`RESERVED`, page 0), the prefix tree
(`TREE`), or the lease of row r of the row pool (owner r, at least 1). Every move names the owner it
expects, so a double free, or a move of another owner's page, raises at once. The allocator only
records owners; it never evicts. A log of the latest moves explains a failed check.
"""

from typing import NamedTuple, NoReturn

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.mem_cache.errors import OutOfPagesError, OwnershipError
from sgl_jax.mem_cache.pages.pool_records import (
    ACTIONS,
    CLOCK,
    FREE,
    GIVE,
    GIVE_BACK,
    MAX_CALLS,
    MAX_PAGES,
    NULL_PAGE,
    NUM_FREE,
    NUM_LOGGED,
    NUM_MOVED,
    NUM_TREE,
    RESERVED,
    TREE,
    Action,
    PoolRecords,
    change_owner,
    pop_each,
)

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


def describe_owner(owner: int, holder: str = "row") -> str:
    return {FREE: "free", RESERVED: "reserved", TREE: "tree"}.get(owner, f"{holder} {owner}")


def each_page(move: Transition) -> list[tuple[int, int]]:
    return list(zip(move.pages.tolist(), move.owners.tolist(), strict=True))


class PageAllocator:
    """Free list and owner array over `num_pages` pages. Each call is O(number of pages it moves).

    Args:
        num_pages: pages of the pool, including the null page; at least 2.
        name: name of the pool in messages, such as "rank 0 full".
        records: the pool's records on all ranks; by default for this rank only.
        rank: line of `records` of this rank.
    """

    def __init__(
        self,
        num_pages: int,
        name: str = "pool",
        records: PoolRecords | None = None,
        rank: int = 0,
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"{name}: a pool needs at least 2 pages, got {num_pages}")
        self.num_pages = num_pages
        self.name = name
        self.records = records or PoolRecords.empty(1 + rank, num_pages)
        self._line = PoolRecords(*(each[rank] for each in self.records))
        self._owner, self._counts = self._line.owners, self._line.counts
        self._free_stack = self._line.free_stacks
        self._last_owner = np.full(num_pages, FREE, np.int32)
        # By page: the value of `num_moved` when the page was last freed or given to the tree.
        self._stamp = np.zeros(num_pages, np.intp)
        self._counts[NUM_MOVED] = 1
        self.reset()

    def reset(self) -> None:
        self._owner.fill(FREE)
        self._last_owner.fill(FREE)
        self._owner[NULL_PAGE] = RESERVED
        self._free_stack[: self.num_pages - 1] = np.arange(self.num_pages - 1, 0, -1)
        self._counts[NUM_FREE] = self.num_pages - 1
        self._counts[NUM_TREE] = 0
        self._forgotten = self.clock  # transitions that are not shown

    @property
    def num_free(self) -> int:
        """Return the number of pages without an owner."""
        return self._counts.item(NUM_FREE)

    @property
    def num_tree(self) -> int:
        """Return the number of pages that the prefix tree owns."""
        return self._counts.item(NUM_TREE)

    @property
    def num_moved(self) -> int:
        """Return the number of pages freed or given to the tree so far, plus one."""
        return self._counts.item(NUM_MOVED)

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
        pages: Int32Array = np.empty(len(owners), np.int32)
        if not pop_each(owners, pages, *self._line):
            count = len(owners)
            if count > self.num_free:
                raise OutOfPagesError(f"{self.name}: {count} pages asked, {self.num_free} free")
            raise OwnershipError(f"{self.name}: only rows take pages, not owner {owners.min()}")
        return pages

    def free(self, pages: Int32Array, owner: int) -> None:
        """Free pages of `owner`. If it lacks one, raise `OwnershipError`, changing nothing."""
        self._move(pages, owner, FREE, GIVE_BACK)

    def give_to_tree(self, pages: Int32Array, owner: int) -> None:
        """Give pages of row `owner` to the tree, or raise `OwnershipError`, changing nothing."""
        self._move(pages, owner, TREE, GIVE)

    def _move(self, pages: Int32Array, owner: int, new_owner: int, action: int) -> None:
        last_owners, stamps = self._last_owner, self._stamp
        if not change_owner(pages, owner, new_owner, action, last_owners, stamps, *self._line):
            self._refuse(pages, owner, ACTIONS[action])

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
        """Return the number of calls so far; it dates each transition."""
        return self._counts.item(CLOCK)

    def transitions(self) -> list[Transition]:
        """Return the latest transitions since the last reset, oldest first."""
        found, num_logged = [], self._counts.item(NUM_LOGGED)
        for clock in range(max(self._forgotten, self.clock - MAX_CALLS), self.clock):
            action, first, count = self._line.calls[clock % MAX_CALLS].tolist()
            if num_logged - first <= MAX_PAGES:
                places = np.arange(first, first + min(count, MAX_PAGES)) % MAX_PAGES
                owners, pages = self._line.moves[places].T
                found.append(Transition(clock + 1, ACTIONS[action], owners, pages))
        return found

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
        concerned = set(pages[:limit].tolist())
        moves = [
            f"[{move.clock}] " + _IN_WORDS[move.action].format(describe_owner(owner), page)
            for move in self.transitions()
            for page, owner in each_page(move)
            if page in concerned
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

"""Chooses the running requests of a rank to retract: by cost, or for a request that preempts them.

A retracted request recomputes its tokens, unless the tree still has them. Pages that only it held
are soon evicted, since memory is short; pages locked by other leases stay. A retracted request is
spared until it has gained as many new tokens as it lost, so at most half of all computed tokens are
recomputed.

A set to preempt is judged by the pages that become available if all of it is retracted: a page
shared with a remaining request, or with the waiting one, frees nothing. The waiting request starts
in the same step, so no other request takes the freed pages.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray, RowIndex
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.scheduler.forecast.capacity import Rooms
from sgl_jax.scheduler.forecast.forecast import Forecast
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.running_rows import RunningRows

_NO_PAGES = np.zeros(0, np.int32)


class Preemption(NamedTuple):
    """Rows of one rank to retract, and the number of tokens that they will recompute."""

    rows: list[int]
    num_lost: int


class Preemptible:
    """The running requests of one rank in one step, least important first, without the rows
    `started` in it. Within one priority, requests with the lowest recompute cost come first.

    Attributes:
        levels: the priorities that occur, ascending.
        rooms: ROOM[n], the rank's capacity after retracting all requests up to each priority.
    """

    def __init__(
        self, rank: RankScheduler, started: Sequence[int], forecast: Forecast, room: Rooms
    ) -> None:
        """Sort the rank's running requests; `room`, ROOM[1], is the rank's current capacity."""
        self.rank = rank
        self._forecast = forecast
        self._room = room
        running = rank.running
        rows = running.runnable()
        rows = rows[~np.isin(rows, started)]
        rows = rows[by_cost(rank.memory, running, rows)]
        self._rows: RowIndex = rows[np.argsort(running.columns.priority[rows], kind="stable")]
        self._costs = recompute_cost(rank.memory, self._rows)
        self._priorities = running.columns.priority[self._rows]  # ascending
        self.levels, last = np.unique(self._priorities[::-1], return_index=True)
        freed, num_freed, rooms, first = FreedPages(rank.memory), 0, [room[:0]], 0
        for end in (len(self._rows) - last).tolist():
            num_freed += sum(freed.add(rank.memory.leases[r]) for r in self._rows[first:end])
            rooms.append(self._room_without(num_freed, self._rows[:end]))
            first = end
        self.rooms: Rooms = np.concatenate(rooms)

    def choose(
        self, request: Request, cursor: PrefixCursor, below: int, fits: Callable[[Rooms, int], bool]
    ) -> Preemption | None:
        """Return the rows to retract for `request`, at least one, of priorities below `below`; None
        if it would not fit even without all of these. `fits` tests whether it fits a capacity,
        ROOM[1], if it takes the given number of pages there."""
        memory = self.rank.memory
        freed, num_freed = FreedPages(memory, memory.prefix_pages(cursor)), 0
        num_needed = self.rank.num_pages_needed(request, cursor)
        chosen: list[int] = []
        for row in self._rows[: int(np.searchsorted(self._priorities, below))].tolist():
            chosen.append(row)
            num_freed += freed.add(memory.leases[row])
            if fits(self._room_without(num_freed, chosen), num_needed):
                break
        else:
            return None
        # A later row may have made an earlier one superfluous.
        for row in chosen[-2::-1]:
            rest = [other for other in chosen if other != row]
            num_less = freed.remove(memory.leases[row])
            if fits(self._room_without(num_freed - num_less, rest), num_needed):
                chosen, num_freed = rest, num_freed - num_less
            else:
                freed.add(memory.leases[row])
        lost = self._costs[np.isin(self._rows, chosen)]
        return Preemption(chosen, int(lost.sum()))

    def _room_without(self, num_freed: int, gone: RowIndex | Sequence[int]) -> Rooms:
        """Return the rank's capacity, ROOM[1], once the rows `gone` freed `num_freed` pages."""
        running, room = self.rank.running, self._room.copy()
        kept = running.active[~np.isin(running.active, gone)]
        self._forecast.write_for(self.rank.dp_rank, kept, num_freed, room)
        room["num_running"] = len(kept)
        return room


class FreedPages:
    """Counts the pages of the first pool that become available as leases end. `kept`, int32[n], are
    pages that stay in use in any case."""

    def __init__(self, memory: RankMemory, kept: Int32Array = _NO_PAGES) -> None:
        self._memory = memory
        self._num_ended = np.zeros(memory.allocator.num_pages, np.int32)
        self._num_ended[kept] = np.iinfo(np.int32).min // 2

    def add(self, lease: KVLease) -> int:
        """End `lease`; return the number of pages freed by it."""
        pages, num_locks = self._pages(lease)
        self._num_ended[pages] += 1
        return int(np.count_nonzero(self._num_ended[pages] == num_locks))

    def remove(self, lease: KVLease) -> int:
        """Undo `add`; return the number of pages in use again."""
        pages, num_locks = self._pages(lease)
        num_kept = int(np.count_nonzero(self._num_ended[pages] == num_locks))
        self._num_ended[pages] -= 1
        return num_kept

    def _pages(self, lease: KVLease) -> tuple[Int32Array, Int32Array]:
        """Return the pages of a lease, and the number of leases that must end to free each."""
        memory = self._memory
        pages = memory.by_pool(lease.pages(memory.page_size))[0]
        return pages, np.maximum(memory.locked[0].num_running_locks(pages), 1)


def recompute_cost(memory: RankMemory, rows: RowIndex) -> Int32Array:
    """Return the number of tokens that each of `rows` would recompute after a retract: int32[n]."""
    tables = memory.rows
    committed: Int32Array = tables.kv_committed_len[rows]
    if memory.groups[0].sliding_window is not None:
        # Windows are locked page by page, so no whole prefix is shared.
        return np.asarray(committed)
    protected = tables.cache_protected_len[rows] // np.int32(memory.page_size)
    shared = memory.locked[0].num_shared(tables.pages, rows, protected)
    cost: Int32Array = committed - shared * np.int32(memory.page_size)
    return cost


def choose_victim(memory: RankMemory, running: RunningRows) -> int | None:
    """Return the row of the runnable request of the lowest priority with the lowest recompute cost;
    None if fewer than two are runnable."""
    candidates = running.runnable()
    if len(candidates) <= 1:
        return None
    priorities = running.columns.priority[candidates]
    candidates = candidates[priorities == priorities.min()]
    return int(candidates[by_cost(memory, running, candidates)[0]])


def is_protected(running: RunningRows, rows: RowIndex) -> BoolArray:
    """Return which `rows` have gained fewer tokens than they had lost at their start: bool[n]."""
    spared: BoolArray = running.columns.known_len[rows] < running.columns.regained_len[rows]
    return spared


def by_cost(memory: RankMemory, running: RunningRows, rows: RowIndex) -> IntpArray:
    """Return the indices of `rows`, oldest first, in the order of retracting: protected rows last,
    then by cost; among equals the youngest first."""
    costs, spared = recompute_cost(memory, rows), is_protected(running, rows)
    order: IntpArray = np.lexsort((-np.arange(len(rows)), costs, spared))
    return order

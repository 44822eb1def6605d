"""Chooses the running requests of a rank that give way to a waiting one of higher priority.

A set is chosen by the pages that become available if all of it leaves: a page shared with a
remaining request, or with the waiting one, frees nothing. The waiting request starts in the same
step, so no other takes the freed pages.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import Int32Array, RowIndex
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.scheduler.admission.victims import by_cost, recompute_cost
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request

_NO_PAGES = np.zeros(0, np.int32)


class Preemption(NamedTuple):
    """Rows of one rank that give way, and the number of tokens they compute again."""

    rows: list[int]
    num_lost: int


class Preemptible:
    """The running requests of one rank in one step, least important first, except the rows
    `started` in this step.

    Within one priority, requests that cost least to recompute come first.
    """

    def __init__(self, rank: RankScheduler, started: Sequence[int]) -> None:
        self.rank = rank
        running = rank.running
        rows = running.runnable()
        rows = rows[~np.isin(rows, started)]
        rows = rows[by_cost(rank.memory, running, rows)]
        self._rows: RowIndex = rows[np.argsort(running.priority[rows], kind="stable")]
        self._costs = recompute_cost(rank.memory, self._rows)
        self.priorities = running.priority[self._rows]  # ascending
        self.most_pages = self._most_pages()

    def _most_pages(self) -> Int32Array:
        """The pages available to a request if all rows before each, and before the end, give way:
        int32[n + 1]. Rows of one priority give way together here."""
        freed, num_freed = FreedPages(self.rank.memory), 0
        most = np.zeros(len(self._rows) + 1, np.int32)
        num_pages = self._num_pages(0, [])
        for i, row in enumerate(self._rows.tolist()):
            most[i] = num_pages
            num_freed += freed.add(self.rank.memory.leases[row])
            if i + 1 == len(self._rows) or self.priorities[i + 1] > self.priorities[i]:
                num_pages = self._num_pages(num_freed, self._rows[: i + 1].tolist())
        most[-1] = num_pages
        return most

    def choose(self, request: Request, cursor: PrefixCursor, below: int) -> Preemption | None:
        """The rows of a priority below `below` that must go for `request`, at least one; None if it
        would not fit even without all of these."""
        memory = self.rank.memory
        freed, num_freed = FreedPages(memory, memory.prefix_pages(cursor)), 0
        num_needed = self.rank.num_pages_needed(request, cursor)
        chosen: list[int] = []
        for row in self._rows[: int(np.searchsorted(self.priorities, below))].tolist():
            chosen.append(row)
            num_freed += freed.add(memory.leases[row])
            if num_needed <= self._num_pages(num_freed, chosen):
                break
        else:
            return None
        # A row that came early may have become superfluous by one that came later.
        for row in chosen[-2::-1]:
            rest = [other for other in chosen if other != row]
            num_less = freed.remove(memory.leases[row])
            if num_needed <= self._num_pages(num_freed - num_less, rest):
                chosen, num_freed = rest, num_freed - num_less
            else:
                freed.add(memory.leases[row])
        lost = self._costs[np.isin(self._rows, chosen)]
        return Preemption(chosen, int(lost.sum()))

    def _num_pages(self, num_freed: int, gone: Sequence[int]) -> int:
        """Pages for another request once the rows `gone` have freed `num_freed`."""
        running = self.rank.running
        kept = running.active[~np.isin(running.active, gone)]
        reserved = self.rank.reserve.pages(self.rank.memory, running, kept, num_freed)
        return self.rank.memory.num_reclaimable_pages + num_freed - reserved


class FreedPages:
    """Counts the pages of the first pool that become available as leases end.

    `kept`, int32[n], are pages that stay in use in any case.
    """

    def __init__(self, memory: RankMemory, kept: Int32Array = _NO_PAGES) -> None:
        self._memory = memory
        self._num_ended = np.zeros(memory.allocator.num_pages, np.int32)
        self._num_ended[kept] = np.iinfo(np.int32).min // 2

    def add(self, lease: KVLease) -> int:
        """End `lease`; return the number of pages that frees."""
        pages, num_locks = self._pages(lease)
        self._num_ended[pages] += 1
        return int(np.count_nonzero(self._num_ended[pages] == num_locks))

    def remove(self, lease: KVLease) -> int:
        """Undo `add`; return the number of pages that stay in use."""
        pages, num_locks = self._pages(lease)
        num_kept = int(np.count_nonzero(self._num_ended[pages] == num_locks))
        self._num_ended[pages] -= 1
        return num_kept

    def _pages(self, lease: KVLease) -> tuple[Int32Array, Int32Array]:
        """The pages that a lease lists, and the number of leases that must end to free each."""
        memory = self._memory
        pages = memory.by_pool(lease.pages(memory.page_size))[0]
        return pages, np.maximum(memory.locked[0].num_running_locks(pages), 1)

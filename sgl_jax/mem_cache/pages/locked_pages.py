"""Counts of the leases with a lock on each page.

The tree counts locks by node, not by holder. This file counts locks of running requests and of idle
sessions separately, so the number of pages that only idle sessions hold is available without a
visit to any session: an idle session also locks the pages that it owns.
"""

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import Int32Array, RowIndex


class LockedPages:
    """Lock counts over `num_pages` pages. The pages of one call must be distinct.

    `num_running` counts the pages locked by running requests, `num_idle` by idle sessions, and
    `num_locked` by either; each page counts once.
    """

    def __init__(self, num_pages: int) -> None:
        self._running = np.zeros(num_pages, np.int32)
        self._idle = np.zeros(num_pages, np.int32)
        self.num_running = 0
        self.num_idle = 0
        self.num_locked = 0

    def lock(self, pages: Int32Array) -> None:
        num_first, num_alone = _count_locks(pages, 1, self._running, self._idle)
        self.num_running += num_first
        self.num_locked += num_alone

    def unlock(self, pages: Int32Array) -> None:
        num_last, num_alone = _count_locks(pages, -1, self._running, self._idle)
        self.num_running -= num_last
        self.num_locked -= num_alone

    def mark_idle(self, pages: Int32Array) -> None:
        self.num_running -= _count_locks(pages, -1, self._running, self._idle)[0]
        self.num_idle += _count_locks(pages, 1, self._idle, self._running)[0]

    def mark_running(self, pages: Int32Array) -> None:
        self.num_idle -= _count_locks(pages, -1, self._idle, self._running)[0]
        self.num_running += _count_locks(pages, 1, self._running, self._idle)[0]

    def is_running(self, page: int) -> bool:
        return self._running.item(page) > 0

    def num_locks(self) -> Int32Array:
        """Return the number of leases with a lock on each page, int32[num_pages]."""
        return self._running + self._idle

    def num_running_locks(self, pages: Int32Array) -> Int32Array:
        counts: Int32Array = self._running[pages]
        return counts

    def num_shared(self, table: Int32Array, rows: RowIndex, num_pages: Int32Array) -> Int32Array:
        """Count the shared pages among each row's first `num_pages`; int32[n].

        A page is shared if another lease has locked it too. Each row has locked its pages, which
        group 0 of `table` int32[num_rows, groups, pages_per_row] lists. Locks begin at the root, so
        a row's shared pages come first.
        """
        return _num_shared(table, rows, num_pages, self._running, self._idle)

    def differing(self, other: "LockedPages") -> Int32Array:
        """Return the pages with counts that differ from `other`, in ascending order."""
        differs = (self._running != other._running) | (self._idle != other._idle)
        return np.flatnonzero(differs).astype(np.int32)

    @property
    def totals(self) -> tuple[int, int, int]:
        return self.num_running, self.num_idle, self.num_locked


@compiled("(int32[::1], int64, int32[::1], int32[::1])")
def _count_locks(
    pages: Int32Array, change: int, counts: Int32Array, others: Int32Array
) -> tuple[int, int]:
    """Add `change`, 1 or -1, to the lock count of each of `pages` in `counts`.

    Return the number of pages that gained their first lock or lost their last, and how many of
    these have no lock in the other array.
    """
    num_turned = num_alone = 0
    assert len(counts) == len(others)
    for page in pages:
        assert 0 <= page < len(counts)
        before = counts[page]
        counts[page] = before + change
        if before == 0 or before + change == 0:
            num_turned += 1
            num_alone += others[page] == 0
    return num_turned, num_alone


@compiled("(int32[:, :, ::1], int64[::1], int32[::1], int32[::1], int32[::1])")
def _num_shared(
    table: Int32Array,
    rows: RowIndex,
    num_pages: Int32Array,
    running: Int32Array,
    idle: Int32Array,
) -> Int32Array:
    """Find the end of each row's shared pages by bisection."""
    shared = np.zeros(len(rows), np.int32)
    assert len(rows) == len(num_pages)
    assert len(running) == len(idle)
    for i in range(len(rows)):
        assert 0 <= rows[i] < len(table)
        assert 0 <= num_pages[i] <= table.shape[2]
        low, high = 0, num_pages[i]
        while low < high:
            middle = (low + high) // 2
            page = table[rows[i], 0, middle]
            assert 0 <= page < len(running)
            if running[page] + idle[page] > 1:
                low = middle + 1
            else:
                high = middle
        shared[i] = low
    return shared

"""Pages of the tree that leases have locked, counted page by page.

The tree counts locks by node, not by holder. Here those of running requests are counted apart from
those of idle sessions, so that it is known, without a look at any session, what all idle sessions
together keep from other use. Each call costs O(pages of the one lease), vectorised.
"""

import numpy as np

from sgl_jax.core.step_plan import Int32Array, IntpArray


class LockedPages:
    """Lock counts over `num_pages` pages; the pages of one call must be distinct.

    Three counts of distinct pages are kept: `num_running` have a lock of a running request,
    `num_idle` one of an idle session, `num_locked` either.
    """

    def __init__(self, num_pages: int) -> None:
        self._running = np.zeros(num_pages, np.int32)
        self._idle = np.zeros(num_pages, np.int32)
        self.num_running = 0
        self.num_idle = 0
        self.num_locked = 0

    def lock(self, pages: Int32Array) -> None:
        """A running request has locked `pages`."""
        index = pages.astype(np.intp)  # once, instead of at each use
        count = self._running[index]
        self._running[index] = count + 1
        first = index[count == 0]
        self.num_running += len(first)
        self.num_locked += self._num_not_idle(first)

    def unlock(self, pages: Int32Array) -> None:
        """Undo `lock`."""
        index = pages.astype(np.intp)
        count = self._running[index]
        self._running[index] = count - 1
        last = index[count == 1]
        self.num_running -= len(last)
        self.num_locked -= self._num_not_idle(last)

    def _num_not_idle(self, index: IntpArray) -> int:
        """Those of some pages that no idle session has locked."""
        if self.num_idle == 0 or len(index) == 0:
            return len(index)
        return int(np.count_nonzero(self._idle[index] == 0))

    def park(self, pages: Int32Array) -> None:
        """The lock of a running request has become that of an idle session."""
        index = pages.astype(np.intp)
        running, idle = self._running[index] - 1, self._idle[index]
        self.num_running -= int(np.count_nonzero(running == 0))
        self.num_idle += int(np.count_nonzero(idle == 0))
        self._running[index] = running
        self._idle[index] = idle + 1

    def unpark(self, pages: Int32Array) -> None:
        """Undo `park`."""
        index = pages.astype(np.intp)
        running, idle = self._running[index], self._idle[index] - 1
        self.num_running += int(np.count_nonzero(running == 0))
        self.num_idle -= int(np.count_nonzero(idle == 0))
        self._running[index] = running + 1
        self._idle[index] = idle

    def is_running(self, page: int) -> bool:
        """Whether a running request has locked `page`."""
        return bool(self._running[page])

    def differing(self, other: "LockedPages") -> Int32Array:
        """The pages that `other` counts otherwise, ascending."""
        differs = (self._running != other._running) | (self._idle != other._idle)
        return np.flatnonzero(differs).astype(np.int32)

    @property
    def totals(self) -> tuple[int, int, int]:
        """`num_running`, `num_idle`, `num_locked`."""
        return self.num_running, self.num_idle, self.num_locked

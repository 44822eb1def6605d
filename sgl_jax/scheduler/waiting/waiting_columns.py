"""The columns of the waiting queue: a line for each request, and the lines in use."""

from heapq import heappop, heappush

import numpy as np

from sgl_jax.core.step_plan import Int32Array, IntpArray
from sgl_jax.mem_cache.tree.prefix_cursor import CursorColumns
from sgl_jax.scheduler.forecast.fits import NEED, NO_RANK, Needs
from sgl_jax.scheduler.tenants import MAX_TENANTS
from sgl_jax.scheduler.waiting.queue_loops import most_cached, places_of, read_cursors


class WaitingColumns:
    """Columns for at most `capacity` requests and `num_ranks` ranks, indexed by line, or by rank
    and line.

    Lines in use are below `end`, close together: the lowest free line is taken first. The operating
    system zeroes pages at their first use.
    """

    def __init__(self, num_ranks: int, capacity: int) -> None:
        self.end = 0
        self._free_lines: list[int] = []  # a heap; entries from `end` on are invalid
        self.is_waiting = np.zeros(capacity, np.bool_)
        self.needs: Needs = np.zeros(capacity, NEED)
        self.num_tokens = self.needs["tokens"]
        self.num_pages = self.needs["pages"]
        self.priority = self.needs["priority"]
        self.service = np.zeros(capacity)  # needed service: tokens, times steps
        self.cached_pages = np.zeros((num_ranks, capacity), np.int32)  # on each rank's tree
        self.most_cached = np.zeros(capacity, np.int32)  # the most on a rank where it may run
        self.cursor = np.zeros((num_ranks, capacity), np.int32)  # its number on each rank's tree
        self.may_run = np.zeros((num_ranks, capacity), np.bool_)
        self.arrival = np.zeros(capacity, np.int64)
        self.tenant = np.zeros(capacity, np.int32)
        self.is_retracted = np.zeros(capacity, np.bool_)
        # Passes by younger requests that started first; 0 for lines not in use.
        self.skip_count = np.zeros(capacity, np.int32)
        # The running request with the prefix that a request waits for: its joint row, the row's
        # epoch, and the protected length that includes the prefix.
        self.has_leader = np.zeros(capacity, np.bool_)
        self.leader = np.zeros((capacity, 3), np.int32)
        # Not a candidate before a lookup or load of its prefix in the store ends.
        self.awaits_event = np.zeros(capacity, np.bool_)
        # The rank that a request waits for though another has room, and the step at which the wait
        # ends.
        self.stay_rank = np.full(capacity, NO_RANK, np.int32)
        self.stay_until = np.zeros(capacity, np.int64)
        # By line, or by tenant if tenants have no shares.
        self.no_turns = np.zeros(max(capacity, MAX_TENANTS + 1), np.int32)

    def take_line(self) -> int:
        """Return a free line; the caller must write all its columns except `skip_count`."""
        line = heappop(self._free_lines) if self._free_lines else self.end
        if line >= self.end:
            self._free_lines.clear()
            line = self.end
            self.end += 1
        self.is_waiting[line] = True
        return line

    def free_line(self, line: int) -> None:
        self.is_waiting[line] = False
        self.skip_count[line] = 0
        heappush(self._free_lines, line)
        while self.end and not self.is_waiting[self.end - 1]:
            self.end -= 1

    def clear(self) -> None:
        self._free_lines.clear()
        self.is_waiting[: self.end] = False
        self.skip_count[: self.end] = 0
        self.end = 0

    def read_cursors(self, dp_rank: int, cursors: CursorColumns) -> None:
        """Write the pages cached at the lines' cursors on the tree of a rank."""
        lines = slice(self.end)
        read_cursors(
            self.cursor[dp_rank, lines],
            cursors.above,
            cursors.usable_pages,
            self.cached_pages[dp_rank, lines],
        )

    def places(self, dp_rank: int, lines: IntpArray, cursors: CursorColumns) -> Int32Array:
        """Return the places of the cursors of `lines` on the tree of a rank, int32[len(lines)]."""
        places: Int32Array = places_of(lines, self.cursor[dp_rank], cursors.above, cursors.place)
        return places

    def num_lacking(self, dp_rank: int, lines: slice, page_size: int) -> Int32Array:
        """Return int32[n], the tokens of the lines' requests missing from a rank's tree."""
        num_cached = self.cached_pages[dp_rank, lines] * np.int32(page_size)
        num_lacking: Int32Array = self.num_tokens[lines] - num_cached
        return num_lacking

    def note_most_cached(self, start: int, end: int) -> None:
        """Update `most_cached` from `start` to `end`, after `read_cursors` for all ranks."""
        most_cached(start, end, self.may_run, self.cached_pages, self.most_cached)

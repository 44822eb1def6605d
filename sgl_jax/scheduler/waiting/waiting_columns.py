"""The columns of the waiting queue: a line for each request, and the lines in use."""

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.scheduler.forecast.capacity import NEED, Needs
from sgl_jax.scheduler.forecast.fits import NO_RANK
from sgl_jax.scheduler.forecast.output_lengths import Float64Array, Int64Array
from sgl_jax.scheduler.tenants import MAX_TENANTS


class Lines(NamedTuple):
    """Columns of n lines, indexed by line, or by rank and line. Loops take them together."""

    is_waiting: BoolArray  # False for a line not in use
    needs: Needs
    service: Float64Array  # needed service: tokens, times steps
    cached_pages: Int32Array  # [ranks, n] on each rank's tree
    most_cached: Int32Array  # the most on a rank where it may run
    prefix: Int32Array  # number of its prompt in the tree of waiting prompts
    may_run: BoolArray  # [ranks, n]
    arrival: Int64Array
    tenant: Int32Array
    is_retracted: BoolArray
    has_images: BoolArray
    skip_count: Int32Array  # passes by younger requests that started first; 0 if not in use
    # The running request with the prefix that a request waits for: its joint row, the row's epoch,
    # and the protected length that includes the prefix.
    has_leader: BoolArray
    leader: Int32Array  # [n, 3]
    awaits_event: BoolArray  # not a candidate before a lookup or load of its prefix ends
    # The rank that a request waits for though another has room, and the step at which the wait
    # ends.
    stay_rank: Int32Array
    stay_until: Int64Array
    # The step from which a request is tried again that would evict the working set; else 0.
    held_until: Int64Array
    no_turns: Int32Array  # zeros, by line, or by tenant if tenants have no shares

    @classmethod
    def empty(cls, num_ranks: int, capacity: int) -> "Lines":
        """Return lines not in use. The operating system zeroes pages at their first use."""
        by_rank = num_ranks, capacity
        return cls(
            is_waiting=np.zeros(capacity, np.bool_),
            needs=np.zeros(capacity, NEED),
            service=np.zeros(capacity),
            cached_pages=np.zeros(by_rank, np.int32),
            most_cached=np.zeros(capacity, np.int32),
            prefix=np.zeros(capacity, np.int32),
            may_run=np.zeros(by_rank, np.bool_),
            arrival=np.zeros(capacity, np.int64),
            tenant=np.zeros(capacity, np.int32),
            is_retracted=np.zeros(capacity, np.bool_),
            has_images=np.zeros(capacity, np.bool_),
            skip_count=np.zeros(capacity, np.int32),
            has_leader=np.zeros(capacity, np.bool_),
            leader=np.zeros((capacity, 3), np.int32),
            awaits_event=np.zeros(capacity, np.bool_),
            stay_rank=np.full(capacity, NO_RANK, np.int32),
            stay_until=np.zeros(capacity, np.int64),
            held_until=np.zeros(capacity, np.int64),
            no_turns=np.zeros(max(capacity, MAX_TENANTS + 1), np.int32),
        )


NO_LINES = Lines.empty(0, 0)


class WaitingColumns:
    """Columns for at most `capacity` requests and `num_ranks` ranks.

    Lines in use are below `end`, close together: the lowest free line is taken first.
    """

    def __init__(self, num_ranks: int, capacity: int) -> None:
        self.lines = Lines.empty(num_ranks, capacity)
        self.end = 0
        self._free_lines: list[int] = []  # a heap; entries from `end` on are invalid

    def take_line(self) -> int:
        """Return a free line; the caller must write all its columns except `skip_count`."""
        line = heappop(self._free_lines) if self._free_lines else self.end
        if line >= self.end:
            self._free_lines.clear()
            line = self.end
            self.end += 1
        self.lines.is_waiting[line] = True
        return line

    def free_line(self, line: int) -> None:
        self.lines.is_waiting[line] = False
        self.lines.skip_count[line] = 0
        heappush(self._free_lines, line)
        while self.end and not self.lines.is_waiting[self.end - 1]:
            self.end -= 1

    def clear(self) -> None:
        self._free_lines.clear()
        self.lines.is_waiting[: self.end] = False
        self.lines.skip_count[: self.end] = 0
        self.end = 0

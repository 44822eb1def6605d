"""Requests without memory as columns of arrays, and the order in which they are tried.

What decides whether a waiting request may start is kept in arrays, one line a request, so that a
step rules out thousands of them at once and looks closely at the few that are left. How much of a
prompt each rank has cached is followed by cursors on the ranks' trees and never looked up again.

Order: requests that were passed over too often; then by priority; then retracted ones, which have
output to lose; then the longest cached prefix (`lpm`) or none of that (`fcfs`); then arrival.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray
from sgl_jax.mem_cache.prefix_cursor import PrefixCursor
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.scheduler.priority_counts import PriorityCounts
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.wait_reason import WaitKind

Int64Array: TypeAlias = NDArray[np.int64]

_NO_RANK = -1
_NEVER = np.iinfo(np.int32).max  # pages that no rank has
# Younger requests that start before one for which a rank is held.
MAX_PASSED_OVER = 128
# Parts of an order key, in bits. What does not fit is cut: it changes the order of extremes only.
_ARRIVAL_BITS, _CACHED_BITS, _PRIORITY_BITS = 26, 21, 14
_LAST = np.iinfo(np.int64).max  # no order key


class WaitingQueue:
    """The queue before `memories`, one of each rank; `policy` is fcfs or lpm.

    Args:
        policy: order among requests of equal priority.
        memories: of all ranks, in order.
        capacity: requests at most.
        max_passed_over: a request that so many younger ones were started before is due: it is
            tried before all others, and a rank is held for it until it fits.
    """

    def __init__(
        self,
        policy: str,
        memories: Sequence[RankMemory],
        capacity: int,
        max_passed_over: int = MAX_PASSED_OVER,
    ) -> None:
        self._max_passed_over = max_passed_over
        self._uses_cached_len = policy == "lpm"
        self._memories = memories
        self._requests: dict[str, Request] = {}  # by rid, in the order of their adding
        self._by_line: dict[int, Request] = {}
        self._cursors: dict[int, list[PrefixCursor]] = {}  # by line, one for each rank
        # Lines in use lie below `_end`, close together: of free ones the lowest is taken first.
        self._end = 0
        self._free_lines: list[int] = []  # a heap; those from `_end` on mean nothing
        self._priorities = PriorityCounts()
        # Columns, indexed by line, and one for each rank where ranks differ; the operating system
        # zeroes what is used, when it is used.
        ranks = len(memories)
        self._is_waiting = np.zeros(capacity, np.bool_)
        self._num_pages = np.zeros(capacity, np.int32)  # of the known tokens and one more
        self._cached_pages = np.zeros((ranks, capacity), np.int32)  # of these, on each rank's tree
        self._most_cached = np.zeros(capacity, np.int32)  # of that, on a rank where it may run
        self._place = np.zeros((ranks, capacity), np.int32)  # of the cursor on each rank's tree
        self._may_run = np.zeros((ranks, capacity), np.bool_)
        self._arrival = np.zeros(capacity, np.int64)
        self._priority = np.zeros(capacity, np.int64)
        self._is_retracted = np.zeros(capacity, np.bool_)
        # Younger requests that started before; 0 where none waits.
        self._passed_over = np.zeros(capacity, np.int32)
        # The running request whose prefix a request waits for: rank, row, the row's epoch, and the
        # protected length at which the prefix is there.
        self._has_leader = np.zeros(capacity, np.bool_)
        self._leader = np.zeros((capacity, 4), np.int32)
        # The rank that a request waits for though another has room, and the step it gives up at.
        self._stay_rank = np.full(capacity, _NO_RANK, np.int32)
        self._stay_until = np.zeros(capacity, np.int64)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    # -- requests come and go -----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request waits, new or retracted."""
        line = request.line = self._take_line()
        self._requests[request.rid] = self._by_line[line] = request
        tokens, page_size = request.matchable(), self._memories[0].page_size
        cursors = []
        for memory in self._memories:
            # What a session's lease has locked need not be walked again.
            lease = request.session_lease(memory)
            known = lease.node if lease else None
            cursors.append(memory.cache.cursors.follow(tokens, request.namespace, line, known))
        self._cursors[line] = cursors
        self._is_waiting[line] = True
        self._num_pages[line] = self._memories[0].request_pages(len(request.tokens) + 1)
        self._cached_pages[:, line] = [cursor.length // page_size for cursor in cursors]
        self._place[:, line] = [cursor.place for cursor in cursors]
        pinned = request.message.dp_rank
        self._may_run[:, line] = pinned is None
        if pinned is not None:
            self._may_run[pinned, line] = True
        self._note_most_cached(np.array([line]))
        self._arrival[line] = request.arrival
        self._priority[line] = request.priority
        self._priorities.add(request.priority)
        self._is_retracted[line] = request.num_retractions > 0
        self._has_leader[line] = False
        self._stay_rank[line] = _NO_RANK

    def _take_line(self) -> int:
        line = heappop(self._free_lines) if self._free_lines else self._end
        if line >= self._end:
            self._free_lines.clear()
            line = self._end
            self._end += 1
        return line

    def remove(self, request: Request) -> None:
        """Take a request out, which must be waiting; the caller decides what follows."""
        line = request.line
        del self._requests[request.rid], self._by_line[line]
        for memory, cursor in zip(self._memories, self._cursors.pop(line), strict=True):
            memory.cache.cursors.unfollow(cursor)
        self._priorities.remove(int(self._priority[line]))
        self._is_waiting[line] = False
        self._passed_over[line] = 0
        heappush(self._free_lines, line)
        while self._end and not self._is_waiting[self._end - 1]:
            self._end -= 1

    def started(self, request: Request, dp_rank: int) -> None:
        """A request got memory on a rank: it leaves, and has passed over all older ones there.

        If it was due, younger ones are passed over anew: of a long queue, one request in so many
        starts because it is due, and the others by their order.
        """
        was_due = self.is_due(request)
        self.remove(request)
        end = self._end
        arrival, may_run = self._arrival[:end], self._may_run[dp_rank, :end]
        self._passed_over[:end] += self._is_waiting[:end] & may_run & (arrival < request.arrival)
        if was_due:
            self._passed_over[:end][may_run & (arrival > request.arrival)] = 0

    def clear(self) -> None:
        """Forget all, without asking the ranks' trees, which may be broken."""
        self._requests.clear()
        self._by_line.clear()
        self._cursors.clear()
        self._free_lines.clear()
        self._priorities = PriorityCounts()
        self._is_waiting[: self._end] = False
        self._passed_over[: self._end] = 0
        self._end = 0

    def waits_due(self, rid: str) -> bool:
        """Whether a request of that id waits and is due."""
        return rid in self._requests and self.is_due(self._requests[rid])

    # -- one request --------------------------------------------------------------------------

    def cursors(self, request: Request) -> list[PrefixCursor]:
        """How much of the request's tokens each rank has cached."""
        return self._cursors[request.line]

    def is_due(self, request: Request) -> bool:
        """Whether it was passed over so often that a rank is held for it."""
        return int(self._passed_over[request.line]) >= self._max_passed_over

    def follow(self, request: Request, dp_rank: int, row: int, length: int) -> None:
        """Do not try `request` before what runs in `row` has published `length` tokens, or left."""
        epoch = int(self._memories[dp_rank].rows.epoch[row])
        self._leader[request.line] = (dp_rank, row, epoch, length)
        self._has_leader[request.line] = True
        self.stay(request, dp_rank, until_step=0)

    def leader_of(self, request: Request) -> tuple[int, int] | None:
        """Rank and row of the request whose prefix it waits for; None if for none any more."""
        line = request.line
        if not self._has_leader[line] or not len(self._still_led(np.array([line]))):
            return None
        dp_rank, row = self._leader[line, :2].tolist()
        return dp_rank, row

    def stay(self, request: Request, dp_rank: int, until_step: int) -> None:
        """Do not try `request` before that rank has room or that step is planned."""
        self._stay_rank[request.line] = dp_rank
        self._stay_until[request.line] = until_step

    def stays_for(self, request: Request) -> int | None:
        """The rank that it has waited for though another had room; None if it never did."""
        dp_rank = int(self._stay_rank[request.line])
        return None if dp_rank == _NO_RANK else dp_rank

    def is_staying(self, request: Request, step: int) -> bool:
        """Whether it still waits for that rank when that step is planned."""
        return int(self._stay_until[request.line]) > step

    # -- what is tried ------------------------------------------------------------------------

    def candidates(self, room: Int32Array, is_open: BoolArray, step: int) -> Iterator[Request]:
        """The requests that may start in this step, first to last, as the queue is now.

        Args:
            room: int32[ranks], pages that a request may take there, beside what is in use of its
                prefix. The caller brings it and `is_open` up to date as requests start.
            is_open: bool[ranks], whether the rank's step takes another request.
            step: being planned.
        """
        self._take_moves()
        may_start = self._is_waiting[: self._end].copy()
        may_start[self._following()] = False
        may_start[self._staying(is_open, step)] = False
        ranks = is_open.nonzero()[0]
        known_room = room[ranks]
        least = self._least_pages(may_start, ranks, known_room)
        may_fit = np.logical_or.reduce(least <= known_room[:, None])
        if not np.count_nonzero(may_fit):
            return
        keys = self._order_keys(may_fit)
        while keys[first := keys.argmin()] != _LAST:
            keys[first] = _LAST
            yield self._by_line[int(first)]
            room_now = np.where(is_open, room, -1)[ranks]
            if np.count_nonzero(room_now != known_room):  # one has started
                may_fit = np.logical_or.reduce(least <= room_now[:, None])
                keys[~may_fit] = _LAST
                known_room = room_now

    def due(self, limit: int | None = None) -> list[Request]:
        """Requests that are due, oldest first, whether or not they may start: all, or the first
        `limit`."""
        lines = (self._passed_over[: self._end] >= self._max_passed_over).nonzero()[0]
        if len(lines) > 1:
            lines = lines[np.argsort(self._arrival[lines])]
        return [self._by_line[line] for line in lines[:limit].tolist()]

    @property
    def highest_priority(self) -> int | None:
        """Of the requests that wait; None if none does."""
        return self._priorities.highest

    def first_by_priority(self) -> Request:
        """Of the requests of the highest priority, at least one, the one that waits longest."""
        lines = np.flatnonzero(self._is_waiting[: self._end])
        lines = lines[self._priority[lines] == self._priority[lines].max()]
        return self._by_line[int(lines[self._arrival[lines].argmin()])]

    def count_kinds(self, room: Int32Array, has_row: BoolArray, step: int) -> dict[WaitKind, int]:
        """How many wait for what; `room` and `has_row` of the ranks as in `candidates`.

        A request is counted under "step" if it would fit were all that is cached for it in use.
        """
        self._take_moves()
        lines = np.flatnonzero(self._is_waiting[: self._end])
        is_following = np.isin(lines, self._following())
        is_staying = (self._stay_until[lines] > step) & ~is_following
        least = self._num_pages[lines] - self._cached_pages[:, lines]
        may_run = self._may_run[:, lines] & has_row[:, None]
        may_fit = (may_run & (least <= room[:, None])).any(axis=0)
        has_any_row = may_run.any(axis=0)
        rest = ~is_following & ~is_staying
        return {
            "prefix": int(is_following.sum()),
            "rank": int(is_staying.sum()),
            "step": int((rest & may_fit).sum()),
            "pages": int((rest & ~may_fit & has_any_row).sum()),
            "rows": int((rest & ~has_any_row).sum()),
        }

    # -- inside -------------------------------------------------------------------------------

    def _take_moves(self) -> None:
        """Take over what has changed on the ranks' trees."""
        for dp_rank, memory in enumerate(self._memories):
            moved = memory.cache.cursors.take_moved()
            if not moved:
                continue
            lines = np.array([cursor.tag for cursor in moved])
            lengths = np.array([cursor.length for cursor in moved])
            self._cached_pages[dp_rank, lines] = lengths // memory.page_size
            self._place[dp_rank, lines] = [cursor.place for cursor in moved]
            self._note_most_cached(lines)

    def _note_most_cached(self, lines: Int64Array) -> None:
        self._most_cached[lines] = np.maximum.reduce(
            self._cached_pages[:, lines] * self._may_run[:, lines]
        )

    def _following(self) -> Int64Array:
        """The lines of requests that wait for a prefix that is being computed."""
        lines = (self._has_leader[: self._end] & self._is_waiting[: self._end]).nonzero()[0]
        return self._still_led(lines) if len(lines) else lines

    def _still_led(self, lines: Int64Array) -> Int64Array:
        """Of `lines`, at least one, that have had a leader, those that have it still.

        The others have none any more, for good: lengths grow while the epoch is the same.
        """
        dp_ranks, leaders, epochs, lengths = self._leader[lines].T
        is_led = np.zeros(len(lines), np.bool_)
        for dp_rank in np.flatnonzero(np.bincount(dp_ranks)).tolist():
            rows, here = self._memories[dp_rank].rows, dp_ranks == dp_rank
            is_computing = rows.cache_protected_len[leaders[here]] < lengths[here]
            is_led[here] = is_computing & (rows.epoch[leaders[here]] == epochs[here])
        self._has_leader[lines[~is_led]] = False
        still_led: Int64Array = lines[is_led]
        return still_led

    def _staying(self, is_open: BoolArray, step: int) -> Int64Array:
        """The lines of requests that wait for a better rank than those that have room."""
        lines = (self._stay_until[: self._end] > step).nonzero()[0]
        if not len(lines):
            return lines
        ranks = self._stay_rank[lines]
        staying: Int64Array = lines[(ranks != _NO_RANK) & ~is_open[ranks]]
        return staying

    def _least_pages(self, may_start: BoolArray, ranks: IntpArray, room: Int32Array) -> Int32Array:
        """The pages that each line takes at least on each of `ranks`: int32[len(ranks), _end].

        `_NEVER` where it is not allowed, or does not fit though as much were cached as now.

        Args:
            may_start: bool[_end], the lines to look at.
            ranks: that are open.
            room: int32[len(ranks)], their pages.

        What starts in this step may let others share more of what is cached, but takes more room
        than that: so it makes none fit that does not fit now, and a request that fits now takes
        at least the pages that are not cached.
        """
        room, num_pages = room[:, None], self._num_pages[: self._end]
        may_run = self._may_run[ranks, : self._end] & may_start
        least = np.where(may_run, num_pages - self._cached_pages[ranks, : self._end], _NEVER)
        # Only what depends on how much of the prefix is in use is looked at more closely.
        fits_alone = np.logical_or.reduce(may_run & (num_pages <= room))
        doubtful = (np.logical_or.reduce(least <= room) & ~fits_alone).nonzero()[0]
        if len(doubtful):
            fits = self._pages_needed(doubtful, ranks) <= room
            least[:, doubtful] = np.where(fits, least[:, doubtful], _NEVER)
        return least

    def _pages_needed(self, lines: Int64Array, ranks: IntpArray) -> Int32Array:
        """Pages that each of `lines` takes beside what is in use of its prefix.

        int32[len(ranks), len(lines)].
        """
        needed = np.empty((len(ranks), len(lines)), np.int32)
        for k, dp_rank in enumerate(ranks.tolist()):
            memory, places = self._memories[dp_rank], self._place[dp_rank, lines]
            nodes = memory.cache.cursors.nodes
            in_use = np.zeros(len(nodes), np.int32)
            for place in np.flatnonzero(np.bincount(places)).tolist():
                in_use[place] = memory.in_use_len(nodes[place]) // memory.page_size
            cached = self._cached_pages[dp_rank, lines]
            needed[k] = self._num_pages[lines] - np.minimum(in_use[places], cached)
        return needed

    def _order_keys(self, may_fit: BoolArray) -> Int64Array:
        """A number for each line that sorts as the order says; `_LAST` for all but `may_fit`,
        which are any."""
        end = self._end
        arrival = self._arrival[:end] - np.minimum.reduce(self._arrival[:end][may_fit])
        keys: Int64Array = (~self._is_retracted[:end]).astype(np.int64)
        if self._priorities.differ:
            keys += self._priority_levels() << 1
        keys <<= _CACHED_BITS
        if self._uses_cached_len:
            most = (1 << _CACHED_BITS) - 1
            keys += most - np.minimum(self._most_cached[:end], most)
        keys[self._passed_over[:end] >= self._max_passed_over] = -1
        keys <<= _ARRIVAL_BITS
        keys += np.minimum(arrival, (1 << _ARRIVAL_BITS) - 1)
        keys[~may_fit] = _LAST
        return keys

    def _priority_levels(self) -> Int64Array:
        """For each line, 0 for the highest priority that waits and more for lower ones, in
        `_PRIORITY_BITS`."""
        highest, lowest = self._priorities.highest, self._priorities.lowest
        assert highest is not None, "a request waits"
        assert lowest is not None, "a request waits"
        most = (1 << _PRIORITY_BITS) - 1
        levels: Int64Array = highest - self._priority[: self._end]
        if highest - lowest > most:  # number those that occur
            _, levels = np.unique(levels, return_inverse=True)
        return np.minimum(levels, most)

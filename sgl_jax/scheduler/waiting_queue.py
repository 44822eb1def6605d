"""Requests without memory as columns of arrays, and the order in which they are tried.

What decides whether a waiting request may start is kept in arrays, one line a request, so that a
step rules out thousands of them at once and looks closely at the few that are left. How much of a
prompt each rank has cached is followed by cursors on the ranks' trees and never looked up again.

Order: requests that were passed over too often; then by priority; then retracted ones, which have
output to lose; then the longest cached prefix (`lpm`) or none of that (`fcfs`); then arrival.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray
from sgl_jax.mem_cache.prefix_cursor import PrefixCursor
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.req_to_token_pool import RowTables
from sgl_jax.scheduler.priority_counts import PriorityCounts
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.wait_reason import WaitKind
from sgl_jax.scheduler.waiting_lines import (
    LAST,
    MOST_LEVELS,
    NEVER,
    NO_RANK,
    Int64Array,
    drop_leaders,
    least_pages,
    lines_due,
    most_cached,
    order_keys,
    pass_over,
    read_cursors,
    rule_out,
)

# Younger requests that start before one for which a rank is held.
MAX_PASSED_OVER = 128


class WaitingQueue:
    """The queue before `memories`, one of each rank; `policy` is fcfs or lpm.

    Args:
        policy: order among requests of equal priority.
        memories: of all ranks, in order; `tables` are the columns of all their rows.
        capacity: requests at most.
        max_passed_over: a request that so many younger ones were started before is due: it is
            tried before all others, and a rank is held for it until it fits.
    """

    def __init__(
        self,
        policy: str,
        memories: Sequence[RankMemory],
        tables: RowTables,
        capacity: int,
        max_passed_over: int = MAX_PASSED_OVER,
    ) -> None:
        self._max_passed_over = max_passed_over
        self.set_policy(policy)
        self._memories = memories
        self._tables = tables
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
        self._cursor = np.zeros((ranks, capacity), np.int32)  # its number on each rank's tree
        self._place = np.zeros((ranks, capacity), np.int32)  # of where that stands
        self._may_run = np.zeros((ranks, capacity), np.bool_)
        self._arrival = np.zeros(capacity, np.int64)
        self._priority = np.zeros(capacity, np.int64)
        self._is_retracted = np.zeros(capacity, np.bool_)
        # Younger requests that started before; 0 where none waits.
        self._passed_over = np.zeros(capacity, np.int32)
        # The running request whose prefix a request waits for: its row among those of all ranks,
        # the row's epoch, and the protected length at which the prefix is there.
        self._has_leader = np.zeros(capacity, np.bool_)
        self._leader = np.zeros((capacity, 3), np.int32)
        # The rank that a request waits for though another has room, and the step it gives up at.
        self._stay_rank = np.full(capacity, NO_RANK, np.int32)
        self._stay_until = np.zeros(capacity, np.int64)

    def set_policy(self, policy: str) -> None:
        """The order from now on: fcfs or lpm."""
        self._uses_cached_len = policy == "lpm"

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    # -- requests come and go -----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request waits, new or retracted."""
        line = request.line = self._take_line()
        self._requests[request.rid] = self._by_line[line] = request
        tokens = request.matchable()
        cursors = []
        for memory in self._memories:
            # What a session's lease has locked need not be walked again.
            lease = request.session_lease(memory)
            known = lease.node if lease else None
            cursors.append(memory.cache.cursors.follow(tokens, request.namespace, known))
        self._cursors[line] = cursors
        self._is_waiting[line] = True
        self._num_pages[line] = self._memories[0].request_pages(len(request.tokens) + 1)
        self._cursor[:, line] = [cursor.number for cursor in cursors]
        pinned = request.message.dp_rank
        self._may_run[:, line] = pinned is None
        if pinned is not None:
            self._may_run[pinned, line] = True
        for dp_rank in range(len(self._memories)):
            self._read_cursors(dp_rank, line, line + 1)
        self._note_most_cached(line, line + 1)
        self._arrival[line] = request.arrival
        self._priority[line] = request.priority
        self._priorities.add(request.priority)
        self._is_retracted[line] = request.num_retractions > 0
        self._has_leader[line] = False
        self._stay_rank[line] = NO_RANK

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
        pass_over(
            self._end,
            request.arrival,
            was_due,
            self._is_waiting,
            self._may_run[dp_rank],
            self._arrival,
            self._passed_over,
        )

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
        row += self._memories[dp_rank].rows.first_row
        self._leader[request.line] = (row, self._tables.epoch[row], length)
        self._has_leader[request.line] = True
        self.stay(request, dp_rank, until_step=0)

    def leader_of(self, request: Request) -> tuple[int, int] | None:
        """Rank and row of the request whose prefix it waits for; None if for none any more."""
        line = request.line
        self._drop_leaders(slice(line, line + 1))
        if not self._has_leader[line]:
            return None
        dp_rank, row = divmod(int(self._leader[line, 0]), self._memories[0].rows.num_rows)
        return dp_rank, row

    def _drop_leaders(self, lines: slice) -> None:
        """Requests whose leader has computed the prefix, or has left, have none any more."""
        drop_leaders(
            self._has_leader[lines],
            self._leader[lines],
            self._tables.epoch,
            self._tables.cache_protected_len,
        )

    def stay(self, request: Request, dp_rank: int, until_step: int) -> None:
        """Do not try `request` before that rank has room or that step is planned."""
        self._stay_rank[request.line] = dp_rank
        self._stay_until[request.line] = until_step

    def stays_for(self, request: Request) -> int | None:
        """The rank that it has waited for though another had room; None if it never did."""
        dp_rank = int(self._stay_rank[request.line])
        return None if dp_rank == NO_RANK else dp_rank

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
        end, ranks = self._end, is_open.nonzero()[0]
        self._drop_leaders(slice(end))
        known_room = room[ranks]
        least, doubtful = least_pages(
            end,
            ranks,
            known_room,
            is_open,
            step,
            self._is_waiting,
            self._has_leader,
            self._stay_until,
            self._stay_rank,
            self._may_run,
            self._num_pages,
            self._cached_pages,
        )
        if len(doubtful):
            fits = self._pages_needed(doubtful, ranks) <= known_room[:, None]
            least[:, doubtful] = np.where(fits, least[:, doubtful], NEVER)
        keys = self._order_keys(least, known_room)
        while len(keys) and keys[first := int(keys.argmin())] != LAST:
            keys[first] = LAST
            yield self._by_line[first]
            room_now = np.where(is_open, room, -1)[ranks]
            if np.count_nonzero(room_now != known_room):  # one has started
                rule_out(keys, least, room_now)
                known_room = room_now

    def due(self, limit: int | None = None) -> list[Request]:
        """Requests that are due, oldest first, whether or not they may start: all, or the first
        `limit`."""
        lines = lines_due(self._end, self._passed_over, self._max_passed_over)
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
        self._drop_leaders(slice(self._end))
        is_following = self._has_leader[lines]
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
        have_moved = [memory.cache.cursors.take_has_moved() for memory in self._memories]
        for dp_rank, has_moved in enumerate(have_moved):
            if has_moved:
                self._read_cursors(dp_rank, 0, self._end)
        if any(have_moved):
            self._note_most_cached(0, self._end)

    def _read_cursors(self, dp_rank: int, start: int, end: int) -> None:
        columns = self._memories[dp_rank].cache.cursors.columns
        read_cursors(
            self._cursor[dp_rank, start:end],
            columns.above,
            columns.usable_pages,
            columns.place,
            self._cached_pages[dp_rank, start:end],
            self._place[dp_rank, start:end],
        )

    def _note_most_cached(self, start: int, end: int) -> None:
        most_cached(start, end, self._may_run, self._cached_pages, self._most_cached)

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

    def _order_keys(self, least: Int32Array, room: Int32Array) -> Int64Array:
        """A number for each line that sorts as the order says; `LAST` where it fits nowhere.

        `least` int32[ranks, _end] are the pages that it takes of the ranks' `room`.
        """
        priority, highest = self._priority, self._priorities.highest or 0
        if highest - (self._priorities.lowest or 0) > MOST_LEVELS:  # number those that occur
            _, levels = np.unique(-priority[: self._end], return_inverse=True)
            priority, highest = -levels.astype(np.int64), 0
        keys: Int64Array = order_keys(
            least,
            room,
            highest,
            self._uses_cached_len,
            self._max_passed_over,
            priority,
            self._is_retracted,
            self._most_cached,
            self._passed_over,
            self._arrival,
        )
        return keys

"""Requests without memory as columns of arrays, and the order in which they are tried.

The conditions of a start are kept in arrays, one line a request, so that a step rules out thousands
of requests at once and examines only the few that are left. Cursors on the ranks' trees track the
cached length of each prompt, without repeated lookups.

Order: by priority; then, if tenants have shares, by service of the tenant; then requests that were
passed over too often; then retracted ones, which have output to lose; then the longest cached
prefix (`lpm`) or nothing (`fcfs`); then the least served tenant, and with `lpm` its requests whose
prefix most other waiting requests continue; then arrival.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray
from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.scheduler.admission.preemption import Preemptible
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.waiting.priority_counts import PriorityCounts
from sgl_jax.scheduler.waiting.tenants import MAX_TENANTS, NUM_LEVELS, Tenants, Turns
from sgl_jax.scheduler.waiting.wait_reason import WaitKind
from sgl_jax.scheduler.waiting.waiting_lines import (
    LAST,
    MOST_LEVELS,
    NEVER,
    NO_RANK,
    NUM_REUSES,
    Int64Array,
    count_in_use,
    drop_leaders,
    least_pages,
    most_cached,
    order_keys,
    pass_over,
    places_of,
    read_cursors,
    reuse_order,
    rule_out,
    take_offer,
)

# Later requests of its own priority or a lower one that start before a request is due.
MAX_PASSED_OVER = 128


class Offer(NamedTuple):
    """The ranks' capacity in a step; updated as requests start."""

    num_pages: Int32Array  # [ranks] that a request may take, beside shared pages of its prefix
    is_open: BoolArray  # [ranks] whether the step takes another request that fits
    floor: Int64Array  # [ranks] a request starts only if its priority is above this
    may_preempt: BoolArray  # [ranks] whether running requests may give way


class WaitingQueue:
    """The queue before `memories`, one of each rank; `policy` is fcfs or lpm.

    Args:
        policy: order among requests of equal priority.
        memories: of all ranks, in order; `tables` are the columns of all their rows.
        capacity: requests at most.
        tenants: the tenants of the requests.
        max_passed_over: a request passed over by so many later ones is due: it is tried before the
            others of its priority, and a rank is held for it until it fits.
    """

    def __init__(
        self,
        policy: str,
        memories: Sequence[RankMemory],
        tables: RowTables,
        capacity: int,
        tenants: Tenants,
        max_passed_over: int = MAX_PASSED_OVER,
    ) -> None:
        self._max_passed_over = max_passed_over
        self._tenants = tenants
        self.set_policy(policy)
        self._memories = memories
        self._tables = tables
        self._requests: dict[str, Request] = {}  # by rid, in the order of their adding
        self._by_line: dict[int, Request] = {}
        self._cursors: dict[int, list[PrefixCursor]] = {}  # by line, one for each rank
        # Lines in use lie below `_end`, close together: the lowest free line is taken first.
        self._end = 0
        self._free_lines: list[int] = []  # a heap; entries from `_end` on are invalid
        self._priorities = PriorityCounts()
        # Columns, indexed by line, and one for each rank if ranks differ; the operating system
        # zeroes pages at their first use.
        ranks = len(memories)
        self._is_waiting = np.zeros(capacity, np.bool_)
        self._num_pages = np.zeros(capacity, np.int32)  # of the known tokens and one more
        self._cached_pages = np.zeros((ranks, capacity), np.int32)  # of these, on each rank's tree
        self._most_cached = np.zeros(capacity, np.int32)  # of that, on a rank where it may run
        self._cursor = np.zeros((ranks, capacity), np.int32)  # its number on each rank's tree
        self._place = np.zeros((ranks, capacity), np.int32)  # of the cursor's stop
        self._may_run = np.zeros((ranks, capacity), np.bool_)
        self._arrival = np.zeros(capacity, np.int64)
        self._priority = np.zeros(capacity, np.int64)
        self._tenant = np.zeros(capacity, np.int32)
        self._is_retracted = np.zeros(capacity, np.bool_)
        # Younger requests that started before; 0 for lines not in use.
        self._passed_over = np.zeros(capacity, np.int32)
        # The running request whose prefix a request waits for: its row among all ranks' rows, the
        # row's epoch, and the protected length that includes the prefix.
        self._has_leader = np.zeros(capacity, np.bool_)
        self._leader = np.zeros((capacity, 3), np.int32)
        # The rank that a request waits for though another has room, and the step at which the wait
        # ends.
        self._stay_rank = np.full(capacity, NO_RANK, np.int32)
        self._stay_until = np.zeros(capacity, np.int64)
        # By line, or by tenant if tenants have no shares.
        self._no_turns = np.zeros(max(capacity, MAX_TENANTS + 1), np.int32)

    def set_policy(self, policy: str) -> None:
        """Set the order: fcfs or lpm."""
        self._uses_cached_len = policy == "lpm"

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    # -- requests come and go -----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a new or retracted request."""
        line = request.line = self._take_line()
        self._requests[request.rid] = self._by_line[line] = request
        tokens = request.matchable()
        cursors = []
        for memory in self._memories:
            # The locked tokens of a session's lease need no second walk.
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
        self._tenant[line] = request.tenant
        self._tenants.queue(request.tenant, 1)
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
        """Remove a waiting request; the caller decides about it."""
        line = request.line
        del self._requests[request.rid], self._by_line[line]
        for memory, cursor in zip(self._memories, self._cursors.pop(line), strict=True):
            memory.cache.cursors.unfollow(cursor)
        self._priorities.remove(int(self._priority[line]))
        self._tenants.queue(request.tenant, -1)
        self._is_waiting[line] = False
        self._passed_over[line] = 0
        heappush(self._free_lines, line)
        while self._end and not self._is_waiting[self._end - 1]:
            self._end -= 1

    def started(self, request: Request, dp_rank: int) -> None:
        """Remove a request that got memory on a rank, and count that it passed over earlier, no
        less important requests there.

        If it was due, passes over later requests are counted anew: so in a long queue, one request
        in so many starts because it is due, and the others by their order.
        """
        was_due, turns = self.is_due(request), self._tenants.turns()
        self.remove(request)
        pass_over(
            self._end,
            request.arrival,
            request.priority,
            request.tenant,
            was_due,
            self._is_waiting,
            self._may_run[dp_rank],
            self._arrival,
            self._priority,
            self._tenant,
            self._no_turns if turns is None else turns.order,
            self._passed_over,
        )

    def clear(self) -> None:
        """Remove all, without a call to the ranks' trees, which may be broken."""
        for request in self._requests.values():
            self._tenants.queue(request.tenant, -1)
        self._requests.clear()
        self._by_line.clear()
        self._cursors.clear()
        self._free_lines.clear()
        self._priorities = PriorityCounts()
        self._is_waiting[: self._end] = False
        self._passed_over[: self._end] = 0
        self._end = 0

    def waits_due(self, rid: str) -> bool:
        """Return whether a request of that id waits and is due."""
        return rid in self._requests and self.is_due(self._requests[rid])

    def holds_up(self, rid: str, other: Request) -> bool:
        """Return whether a rank held for the request of that id is held against `other`."""
        if rid == other.rid or not self.waits_due(rid):
            return False
        return other.priority <= self._requests[rid].priority

    # -- one request --------------------------------------------------------------------------

    def cursors(self, request: Request) -> list[PrefixCursor]:
        """The cursors of the request's tokens, one for each rank."""
        return self._cursors[request.line]

    def is_due(self, request: Request) -> bool:
        """Return whether it was passed over so often, or its tenant was, that a rank is held for
        it."""
        turns = self._tenants.turns()
        if turns is not None and turns.is_lagging[request.tenant]:
            return True
        return int(self._passed_over[request.line]) >= self._max_passed_over

    def follow(self, request: Request, dp_rank: int, row: int, length: int) -> None:
        """Delay `request` until `row` has published `length` tokens, or its request has left."""
        row += self._memories[dp_rank].rows.first_row
        self._leader[request.line] = (row, self._tables.epoch[row], length)
        self._has_leader[request.line] = True
        self.stay(request, dp_rank, until_step=0)

    def leader_of(self, request: Request) -> tuple[int, int] | None:
        """Rank and row of the request whose prefix it waits for; None without one."""
        line = request.line
        self._drop_leaders(slice(line, line + 1))
        if not self._has_leader[line]:
            return None
        dp_rank, row = divmod(int(self._leader[line, 0]), self._memories[0].rows.num_rows)
        return dp_rank, row

    def _drop_leaders(self, lines: slice) -> None:
        """Clear leaders that have computed the prefix, or have left."""
        drop_leaders(
            self._has_leader[lines],
            self._leader[lines],
            self._tables.epoch,
            self._tables.cache_protected_len,
        )

    def stay(self, request: Request, dp_rank: int, until_step: int) -> None:
        """Delay `request` until that rank has room or that step is planned."""
        self._stay_rank[request.line] = dp_rank
        self._stay_until[request.line] = until_step

    def stays_for(self, request: Request) -> int | None:
        """The rank that it has waited for though another had room; None if it never did."""
        dp_rank = int(self._stay_rank[request.line])
        return None if dp_rank == NO_RANK else dp_rank

    def is_staying(self, request: Request, step: int) -> bool:
        """Return whether it still waits for that rank when that step is planned."""
        return int(self._stay_until[request.line]) > step

    # -- candidates ---------------------------------------------------------------------------

    def candidates(
        self, offer: Offer, step: int, preemptible: Sequence[Preemptible], threshold: int
    ) -> Iterator[Request]:
        """The requests that may start in this step, and the due ones, first to last.

        Args:
            offer: of the ranks. The caller updates it as requests start.
            step: being planned.
            preemptible: of each rank, if requests may preempt; else empty.
            threshold: by which a request's priority must exceed a preempted one's.
        """
        self._take_moves()
        end = self._end
        ranks = (offer.is_open | offer.may_preempt).nonzero()[0]
        self._drop_leaders(slice(end))
        room, floor = np.zeros(len(ranks), np.int32), np.zeros(len(ranks), np.int64)
        take_offer(ranks, offer.num_pages, offer.is_open, offer.floor, room, floor)
        least, doubtful = least_pages(
            end,
            ranks,
            room,
            offer.is_open,
            floor,
            step,
            self._is_waiting,
            self._has_leader,
            self._stay_until,
            self._stay_rank,
            self._may_run,
            self._priority,
            self._num_pages,
            self._cached_pages,
        )
        if len(doubtful):
            self._count_in_use(doubtful, ranks, room, least)
        is_full = self._tenants.is_full
        if is_full.any():
            least[:, is_full[self._tenant[:end]]] = NEVER
        most_room = self._most_room(ranks, preemptible, threshold)
        turns, passed_over = self._tenants.turns(), self._passed_over
        if turns is not None and turns.is_lagging.any():
            is_lagging = turns.is_lagging[self._tenant[:end]]
            passed_over = np.where(is_lagging, self._max_passed_over, passed_over[:end])
        keys = self._order_keys(least, room, most_room, turns, passed_over)
        while len(keys) and keys[first := int(keys.argmin())] != LAST:
            keys[first] = LAST
            yield self._by_line[first]
            if take_offer(ranks, offer.num_pages, offer.is_open, offer.floor, room, floor):
                rule_out(
                    keys,
                    least,
                    room,
                    floor,
                    most_room,
                    self._max_passed_over,
                    self._priority,
                    passed_over,
                )

    def _most_room(
        self, ranks: IntpArray, preemptible: Sequence[Preemptible], threshold: int
    ) -> Int32Array:
        """The pages of each of `ranks` for each line if all requests that it may preempt give way,
        -1 if none does: int32[len(ranks), end]; int32[len(ranks), 0] if none may preempt."""
        if not preemptible:
            return np.zeros((len(ranks), 0), np.int32)
        below = self._priority[: self._end] - threshold
        most = np.empty((len(ranks), self._end), np.int32)
        for k, dp_rank in enumerate(ranks.tolist()):
            counts = np.searchsorted(preemptible[dp_rank].priorities, below)
            most[k] = np.where(counts > 0, preemptible[dp_rank].most_pages[counts], -1)
        return most

    @property
    def highest_priority(self) -> int | None:
        """The highest priority of the waiting requests; None if none waits."""
        return self._priorities.highest

    def count_kinds(self, room: Int32Array, has_row: BoolArray, step: int) -> dict[WaitKind, int]:
        """The number of waiting requests by reason, if ranks have `room` int32[ranks] pages for a
        request.

        A request counts under "step" if it would fit were all its cached pages in use.
        """
        self._take_moves()
        lines = np.flatnonzero(self._is_waiting[: self._end])
        self._drop_leaders(slice(self._end))
        is_limited = self._tenants.is_full[self._tenant[lines]]
        is_following = self._has_leader[lines] & ~is_limited
        is_staying = (self._stay_until[lines] > step) & ~is_following & ~is_limited
        least = self._num_pages[lines] - self._cached_pages[:, lines]
        may_run = self._may_run[:, lines] & has_row[:, None]
        may_fit = (may_run & (least <= room[:, None])).any(axis=0)
        has_any_row = may_run.any(axis=0)
        rest = ~is_following & ~is_staying & ~is_limited
        return {
            "tenant": int(is_limited.sum()),
            "prefix": int(is_following.sum()),
            "rank": int(is_staying.sum()),
            "step": int((rest & may_fit).sum()),
            "pages": int((rest & ~may_fit & has_any_row).sum()),
            "rows": int((rest & ~has_any_row).sum()),
        }

    # -- inside -------------------------------------------------------------------------------

    def _take_moves(self) -> None:
        """Copy changed cursors of the ranks' trees."""
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

    def _count_in_use(
        self, lines: Int64Array, ranks: IntpArray, room: Int32Array, least: Int32Array
    ) -> None:
        """Raise `least` for those `lines` that do not fit but might if all their cached pages were
        in use: a line takes all pages of its prefix that are not in use."""
        for k, dp_rank in enumerate(ranks.tolist()):
            memory, place = self._memories[dp_rank], self._place[dp_rank]
            nodes, most = memory.cache.cursors.nodes, int(room[k])
            in_use = np.zeros(len(nodes), np.int32)
            for number in places_of(lines, least[k], most, place, len(nodes)).tolist():
                in_use[number] = memory.in_use_len(nodes[number]) // memory.page_size
            cached_pages = self._cached_pages[dp_rank]
            count_in_use(lines, least[k], most, place, in_use, self._num_pages, cached_pages)

    def _order_keys(
        self,
        least: Int32Array,
        room: Int32Array,
        most_room: Int32Array,
        turns: Turns | None,
        passed_over: Int32Array,
    ) -> Int64Array:
        """`order_keys`; the arguments are `candidates`'."""
        end = self._end
        tenant = self._tenant[:end]
        highest, lowest = self._priorities.highest or 0, self._priorities.lowest or 0
        level, num_levels = highest - self._priority[:end], highest - lowest + 1
        turn = self._no_turns[:end]
        if turns is not None:
            level = level * NUM_LEVELS + turns.level[tenant]
            turn, num_levels = turns.order[tenant], num_levels * NUM_LEVELS
            if self._uses_cached_len:
                turn = turn * NUM_REUSES + self._reuse_order()
        if num_levels > MOST_LEVELS:  # number the occurring levels
            level = np.unique(level, return_inverse=True)[1].astype(np.int64)
        keys: Int64Array = order_keys(
            least,
            room,
            most_room,
            self._uses_cached_len,
            self._max_passed_over,
            level,
            turn,
            self._is_retracted,
            self._most_cached,
            passed_over,
            self._arrival,
        )
        return keys

    def _reuse_order(self) -> Int32Array:
        end = self._end
        stems = self._memories[0].cache.cursors.columns  # equal on every rank
        order: Int32Array = reuse_order(
            self._is_waiting[:end],
            self._num_pages[:end],
            self._most_cached[:end],
            self._cursor[0, :end],
            stems.parent,
            stems.end_pages,
        )
        return order

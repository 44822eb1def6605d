"""Requests without memory as columns of arrays, and the order in which they are tried.

The conditions of a start are kept in arrays, one line a request, so that a step rules out thousands
of requests at once and examines only the few that are left. Cursors on the ranks' trees track the
cached length of each prompt, without repeated lookups.

Order: by priority; then, if tenants have shares, by service of the tenant; then requests that were
passed over too often; then retracted ones, which have output to lose; then the longest cached
prefix (`lpm`) or nothing (`fcfs`); then the least served tenant, and with `lpm` its requests whose
prefix most other waiting requests continue; then arrival.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray
from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.scheduler.admission.preemption import Preemptible
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.waiting.priority_counts import PriorityCounts
from sgl_jax.scheduler.waiting.tenants import NUM_LEVELS, Tenants, Turns
from sgl_jax.scheduler.waiting.wait_reason import WaitKind
from sgl_jax.scheduler.waiting.waiting_columns import WaitingColumns
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
    order_keys,
    pass_over,
    places_of,
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
        self._columns = WaitingColumns(len(memories), capacity)
        self._priorities = PriorityCounts()
        self.num_pinned: Counter[int | None] = Counter()  # by the rank that a request names

    def set_policy(self, policy: str) -> None:
        """Set the order: fcfs or lpm."""
        self._uses_cached_len = policy == "lpm"

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def num_retracted(self) -> int:
        """Requests that ran before."""
        columns, end = self._columns, self._columns.end
        return int(np.count_nonzero(columns.is_waiting[:end] & columns.is_retracted[:end]))

    # -- requests come and go -----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a new or retracted request."""
        columns = self._columns
        line = request.line = columns.take_line()
        self._requests[request.rid] = self._by_line[line] = request
        tokens = request.matchable()
        cursors = []
        for memory in self._memories:
            # The locked tokens of a session's lease need no second walk.
            lease = request.session_lease(memory)
            known = lease.node if lease else None
            cursors.append(memory.cache.cursors.follow(tokens, request.namespace, known))
        self._cursors[line] = cursors
        columns.num_pages[line] = self._memories[0].request_pages(len(request.tokens) + 1)
        columns.cursor[:, line] = [cursor.number for cursor in cursors]
        pinned = request.message.dp_rank
        columns.may_run[:, line] = pinned is None
        if pinned is not None:
            columns.may_run[pinned, line] = True
        for dp_rank, memory in enumerate(self._memories):
            columns.read_cursors(dp_rank, memory.cache.cursors.columns, line, line + 1)
        columns.note_most_cached(line, line + 1)
        columns.arrival[line] = request.arrival
        columns.priority[line] = request.priority
        self._priorities.add(request.priority)
        self.num_pinned[pinned] += 1
        columns.tenant[line] = request.tenant
        self._tenants.queue(request.tenant, 1)
        columns.is_retracted[line] = request.num_retractions > 0
        columns.has_leader[line] = False
        columns.stay_rank[line] = NO_RANK

    def remove(self, request: Request) -> None:
        """Remove a waiting request; the caller decides about it."""
        line = request.line
        del self._requests[request.rid], self._by_line[line]
        for memory, cursor in zip(self._memories, self._cursors.pop(line), strict=True):
            memory.cache.cursors.unfollow(cursor)
        self._priorities.remove(int(self._columns.priority[line]))
        self.num_pinned[request.message.dp_rank] -= 1
        self._tenants.queue(request.tenant, -1)
        self._columns.free_line(line)

    def started(self, request: Request, dp_rank: int) -> None:
        """Remove a request that got memory on a rank, and count that it passed over earlier, no
        less important requests there.

        If it was due, passes over later requests are counted anew: so in a long queue, one request
        in so many starts because it is due, and the others by their order.
        """
        columns = self._columns
        was_due, turns = self.is_due(request), self._tenants.turns()
        self.remove(request)
        pass_over(
            columns.end,
            request.arrival,
            request.priority,
            request.tenant,
            was_due,
            columns.is_waiting,
            columns.may_run[dp_rank],
            columns.arrival,
            columns.priority,
            columns.tenant,
            columns.no_turns if turns is None else turns.order,
            columns.passed_over,
        )

    def clear(self) -> None:
        """Remove all, without a call to the ranks' trees, which may be broken."""
        for request in self._requests.values():
            self._tenants.queue(request.tenant, -1)
        self._requests.clear()
        self._by_line.clear()
        self._cursors.clear()
        self._columns.clear()
        self._priorities = PriorityCounts()
        self.num_pinned.clear()

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
        return int(self._columns.passed_over[request.line]) >= self._max_passed_over

    def follow(self, request: Request, dp_rank: int, row: int, length: int) -> None:
        """Delay `request` until `row` has published `length` tokens, or its request has left."""
        row += self._memories[dp_rank].rows.first_row
        self._columns.leader[request.line] = (row, self._tables.epoch[row], length)
        self._columns.has_leader[request.line] = True
        self.stay(request, dp_rank, until_step=0)

    def leader_of(self, request: Request) -> tuple[int, int] | None:
        """Rank and row of the request whose prefix it waits for; None without one."""
        line = request.line
        self._drop_leaders(slice(line, line + 1))
        if not self._columns.has_leader[line]:
            return None
        dp_rank, row = divmod(int(self._columns.leader[line, 0]), self._memories[0].rows.num_rows)
        return dp_rank, row

    def _drop_leaders(self, lines: slice) -> None:
        """Clear leaders that have computed the prefix, or have left."""
        drop_leaders(
            self._columns.has_leader[lines],
            self._columns.leader[lines],
            self._tables.epoch,
            self._tables.cache_protected_len,
        )

    def stay(self, request: Request, dp_rank: int, until_step: int) -> None:
        """Delay `request` until that rank has room or that step is planned."""
        self._columns.stay_rank[request.line] = dp_rank
        self._columns.stay_until[request.line] = until_step

    def stays_for(self, request: Request) -> int | None:
        """The rank that it has waited for though another had room; None if it never did."""
        dp_rank = int(self._columns.stay_rank[request.line])
        return None if dp_rank == NO_RANK else dp_rank

    def is_staying(self, request: Request, step: int) -> bool:
        """Return whether it still waits for that rank when that step is planned."""
        return int(self._columns.stay_until[request.line]) > step

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
        columns = self._columns
        self._take_moves()
        end = columns.end
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
            columns.is_waiting,
            columns.has_leader,
            columns.stay_until,
            columns.stay_rank,
            columns.may_run,
            columns.priority,
            columns.num_pages,
            columns.cached_pages,
        )
        if len(doubtful):
            self._count_in_use(doubtful, ranks, room, least)
        is_full = self._tenants.is_full
        if is_full.any():
            least[:, is_full[columns.tenant[:end]]] = NEVER
        most_room = self._most_room(ranks, preemptible, threshold)
        turns, passed_over = self._tenants.turns(), columns.passed_over
        if turns is not None and turns.is_lagging.any():
            is_lagging = turns.is_lagging[columns.tenant[:end]]
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
                    columns.priority,
                    passed_over,
                )

    def _most_room(
        self, ranks: IntpArray, preemptible: Sequence[Preemptible], threshold: int
    ) -> Int32Array:
        """The pages of each of `ranks` for each line if all requests that it may preempt give way,
        -1 if none does: int32[len(ranks), end]; int32[len(ranks), 0] if none may preempt."""
        if not preemptible:
            return np.zeros((len(ranks), 0), np.int32)
        end = self._columns.end
        below = self._columns.priority[:end] - threshold
        most = np.empty((len(ranks), end), np.int32)
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
        columns = self._columns
        self._take_moves()
        lines = np.flatnonzero(columns.is_waiting[: columns.end])
        self._drop_leaders(slice(columns.end))
        is_limited = self._tenants.is_full[columns.tenant[lines]]
        is_following = columns.has_leader[lines] & ~is_limited
        is_staying = (columns.stay_until[lines] > step) & ~is_following & ~is_limited
        least = columns.num_pages[lines] - columns.cached_pages[:, lines]
        may_run = columns.may_run[:, lines] & has_row[:, None]
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
                cursors = self._memories[dp_rank].cache.cursors.columns
                self._columns.read_cursors(dp_rank, cursors, 0, self._columns.end)
        if any(have_moved):
            self._columns.note_most_cached(0, self._columns.end)

    def _count_in_use(
        self, lines: Int64Array, ranks: IntpArray, room: Int32Array, least: Int32Array
    ) -> None:
        """Raise `least` for those `lines` that do not fit but might if all their cached pages were
        in use: a line takes all pages of its prefix that are not in use."""
        columns = self._columns
        for k, dp_rank in enumerate(ranks.tolist()):
            memory, place = self._memories[dp_rank], columns.place[dp_rank]
            nodes, most = memory.cache.cursors.nodes, int(room[k])
            in_use = np.zeros(len(nodes), np.int32)
            for number in places_of(lines, least[k], most, place, len(nodes)).tolist():
                in_use[number] = memory.in_use_len(nodes[number]) // memory.page_size
            cached_pages = columns.cached_pages[dp_rank]
            count_in_use(lines, least[k], most, place, in_use, columns.num_pages, cached_pages)

    def _order_keys(
        self,
        least: Int32Array,
        room: Int32Array,
        most_room: Int32Array,
        turns: Turns | None,
        passed_over: Int32Array,
    ) -> Int64Array:
        """`order_keys`; the arguments are `candidates`'."""
        columns = self._columns
        end = columns.end
        tenant = columns.tenant[:end]
        highest, lowest = self._priorities.highest or 0, self._priorities.lowest or 0
        level, num_levels = highest - columns.priority[:end], highest - lowest + 1
        turn = columns.no_turns[:end]
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
            columns.is_retracted,
            columns.most_cached,
            passed_over,
            columns.arrival,
        )
        return keys

    def _reuse_order(self) -> Int32Array:
        columns, end = self._columns, self._columns.end
        stems = self._memories[0].cache.cursors.columns  # equal on every rank
        order: Int32Array = reuse_order(
            columns.is_waiting[:end],
            columns.num_pages[:end],
            columns.most_cached[:end],
            columns.cursor[0, :end],
            stems.parent,
            stems.end_pages,
        )
        return order

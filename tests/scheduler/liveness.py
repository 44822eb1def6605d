"""The liveness invariant, proved by brute force after each planned step.

No request waits that fits whatever happens: there is a row that is free or an idle session's, and
pages for all tokens that it may come to have, beside all that running requests may come to take;
nor one that would fit so if running requests gave way that are less important by more than the
threshold. Unless it has a reason that is true and comes to an end.
None is passed over for ever by requests of its own priority. Each request that gives way does so
for one that starts in the same step. Tenants with waiting requests stay within a bound of each
other. Everything is counted from leases and trees, page by page: nothing that admission keeps for
itself is believed, but for the prompt tokens of the step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import RowIndex
from sgl_jax.mem_cache.row_growth import pages_held_and_lacking
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor, common_prefix_len
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.radix_tree import RadixTree
from sgl_jax.mem_cache.tree_node import TreeNode
from sgl_jax.scheduler.admission.rank_capacity import Option, RankCapacity
from sgl_jax.scheduler.preemption import is_protected
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.scheduler import Scheduler
from sgl_jax.scheduler.step_builder import StepBuilder
from sgl_jax.scheduler.step_builders import StepBuilders
from sgl_jax.scheduler.waiting.waiting_queue import WaitingQueue
from sgl_jax.scheduler.working_set import HOLD_STEPS, WorkingSet

# Steps that a request may be due for: a rank is held for it, whose requests end in the meantime.
MAX_STEPS_DUE = 1500


class ThrashingSet(WorkingSet):
    """Of a rank that always thrashes."""

    is_thrashing = True


class Liveness:
    """Watches a scheduler's admissions; `check` is called after each planned step.

    Each request's stated reason is proved every `check_interval` steps.
    """

    check_interval = 1

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.num_waits: dict[str, int] = {}  # requests found waiting, by kind of reason
        self.num_preempted = 0
        # Requests, and ranks whose step has had prompt tokens for them all the time.
        self._had_tokens: set[tuple[str, int]] = set()
        self._due_since: dict[str, int] = {}
        self._stayed_since: dict[tuple[str, int], int] = {}  # by rid and retracts before
        admit_into = scheduler._admission.admit_into

        def watched(ranks: Ranks, builders: StepBuilders, step: int) -> None:
            # Only builders that were made anyway: a rank without one only decodes.
            check_spared(builders.made())
            running = {rid for rank in ranks.ranks for rid in rids_of(rank)}
            self._had_tokens = self._with_tokens(builders)
            make = builders._make

            def watched_make(dp_rank: int) -> StepBuilder:
                builder = make(dp_rank)
                self._watch_starts(builder, builders)
                return builder

            builders._make = watched_make
            for builder in builders.made():
                self._watch_starts(builder, builders)
            admit_into(ranks, builders, step)
            for builder in builders.made():
                self._check_preempted(builder, running)
            self._check_admitted(builders, step, running)

        scheduler._admission.admit_into = watched
        fetches_for = scheduler._admission._fetches_for

        def fetched(room: RankCapacity, request: Request) -> bool:
            has_begun = fetches_for(room, request)
            if has_begun:  # a fetch that ends in this step leaves the request to the next
                self._had_tokens = {each for each in self._had_tokens if each[0] != request.rid}
            return has_begun

        scheduler._admission._fetches_for = fetched
        holds_back = scheduler._admission._holds_back

        def held(room: RankCapacity, request: Request, chosen: Option, step: int) -> bool:
            room.rank.working_set._num_recent = None  # counted again, as after a tick
            is_held = holds_back(room, request, chosen, step)
            if is_held:
                self._check_held(room.rank, request, step)
            return is_held

        scheduler._admission._holds_back = held

    def _with_tokens(self, builders: StepBuilders) -> set[tuple[str, int]]:
        """The waiting requests, and ranks whose step has prompt tokens for them."""
        return {
            (request.rid, dp_rank)
            for request in self.scheduler._waiting
            for dp_rank in range(len(builders))
            if self._has_tokens(builders.find(dp_rank), request)
        }

    def _watch_starts(self, builder: StepBuilder, builders: StepBuilders) -> None:
        """A request that a step has no prompt tokens for is left to the next, though the short part
        may have some for it when longer prompts have started."""
        admit = builder.admit

        def watched(request: Request, cursor: PrefixCursor) -> int:
            row = admit(request, cursor)
            self._had_tokens &= self._with_tokens(builders)
            return row

        builder.admit = watched

    def _check_preempted(self, builder: StepBuilder, before: set[str]) -> None:
        """What gave way did so for requests that are more important and run there now."""
        threshold = self.scheduler.args.priority_scheduling_preemption_threshold
        started = [self.scheduler._requests[rid] for rid in rids_of(builder.rank) - before]
        self.num_preempted += len(builder.preempted)
        for victim in builder.preempted:
            assert any(request.priority > victim.priority + threshold for request in started)
        if builder.preempted:
            highest = max(request.priority for request in started)
            assert builder.num_tokens_left(highest, 0, 1) < builder.chunk_size, (
                "none of it is computed"
            )

    def _has_tokens(self, builder: StepBuilder | None, request: Request) -> bool:
        """Whether the step has prompt tokens for a waiting request."""
        if builder is None:
            return True
        num_lacking = self._num_lacking(builder.rank, request)
        return builder.takes(request.priority, request.tenant, num_lacking)

    def _check_admitted(self, builders: StepBuilders, step: int, before: set[str]) -> None:
        """A request that admission leaves waiting though the step could have taken it waits for a
        reason. `before` are the requests that ran before: those that started in this step may be
        replaced in the next."""
        scheduler, sizes = self.scheduler, self.scheduler.sizes
        rooms = [room_of(rank) for rank in scheduler.ranks]
        is_full = scheduler._all_ranks.tenants.is_full
        for request in scheduler._waiting:
            open_ranks = [
                rank
                for rank in scheduler.ranks
                for builder in [builders.find(rank.dp_rank)]
                if request.message.dp_rank in (None, rank.dp_rank)
                and (builder is None or builder.can_admit)
                and self._has_tokens(builder, request)
                and (request.rid, rank.dp_rank) in self._had_tokens
                and not is_full[request.tenant]
                and (
                    num_short(rank, request, rooms[rank.dp_rank]) <= 0
                    or self._could_replace(rank, request, before)
                )
            ]
            if not open_ranks:
                continue
            reason = scheduler.why_waiting(request.rid)
            if reason.kind == "prefix":
                self._check_leader(request, reason.behind)
            elif reason.kind == "fetch":
                self._check_fetch(request, reason.dp_rank)
            elif reason.kind == "store":
                assert any(rank.host.awaits_store(request) for rank in scheduler.ranks)
            elif reason.kind == "working_set":
                assert any(len(rank.running) for rank in scheduler.ranks), "it is never tried again"
                lines = scheduler._waiting._columns.lines
                assert step < lines.held_until[request.line] <= step + HOLD_STEPS
            elif reason.kind == "rank":
                # No longer than it takes to compute it and all that runs on another rank.
                since = self._stayed_since.setdefault((request.rid, request.num_retractions), step)
                chunk = sizes.max_chunk_tokens
                most = sizes.num_rows * (sizes.max_context_len // chunk + 1) + 2
                assert step - since <= most, request.rid
            else:
                # Each is held for another of at least its priority, passed over too often, which
                # may start before this one ends.
                num_left = request.max_len - len(request.tokens)
                num_tokens = sizes.request_pages(len(request.tokens) + 1) * sizes.page_size
                num_left += num_tokens // sizes.max_chunk_tokens
                held = {
                    hold.dp_rank
                    for rid, hold in scheduler._admission.holds.items()
                    if rid != request.rid
                    and scheduler._requests[rid].priority >= request.priority
                    and step + num_left > hold.until_step
                }
                assert {rank.dp_rank for rank in open_ranks} <= held, (request.rid, reason)

    def _num_lacking(self, rank: RankScheduler, request: Request) -> int:
        """Tokens of a waiting request that the tree of a rank lacks."""
        cursor = self.scheduler._waiting.cursor(request, rank.dp_rank)
        return len(request.tokens) - cursor.length

    def _could_replace(self, rank: RankScheduler, request: Request, before: set[str]) -> bool:
        """Whether `request` would fit without all running ones of `before` that it may preempt."""
        threshold = self.scheduler.args.priority_scheduling_preemption_threshold
        running = rank.running
        rows = running.runnable()
        lower = rows[running.columns.priority[rows] < request.priority - threshold].tolist()
        gone = [row for row in lower if running.request(row).rid in before]
        if not gone:
            return False
        without = pages_in_use(rank, gone)
        kept = np.array([row for row in running.active.tolist() if row not in gone], np.intp)
        num_free = rank.memory.allocator.num_pages - 1 - len(without) - most_growth(rank, kept)
        return num_pages_short(rank, request, Room(without, num_free)) <= 0

    def _check_leader(self, request: Request, rid: str | None) -> None:
        """The request that computes the prefix runs, prefills, and goes on as this one does."""
        leader = self.scheduler._requests[rid or ""]
        assert leader.lease is not None
        rank = self.scheduler.ranks[leader.lease.dp_rank]
        row = leader.lease.row
        assert leader.namespace == request.namespace
        assert rank.columns.planned_len[row] > rank.memory.rows.kv_committed_len[row]
        start, page_size = leader.lease.cache_protected_len, rank.memory.page_size
        theirs = rank.running.known_tokens(row)[: start + page_size].tolist()
        assert len(theirs) == start + page_size
        assert request.tokens[: start + page_size].tolist() == theirs

    def _check_held(self, rank: RankScheduler, request: Request, step: int) -> None:
        """A request that waits for the working set lacks most of its prompt, and pages that no
        prefix used in the window holds; it has not waited too long, and others of its priority or
        a higher one run, so that it is tried again."""
        scheduler, memory, own = self.scheduler, rank.memory, rank.working_set
        assert rank.host.tier is None
        assert len(rank.running)
        rows = rank.running.active.tolist()
        assert all(rank.running.request(row).priority >= request.priority for row in rows)
        assert request.rid not in {each.rid for each in due_of(scheduler._waiting)}
        assert own.is_thrashing
        num_lacking = len(request.tokens) - rank.reusable_len(
            request, scheduler._waiting.cursor(request, rank.dp_rank)
        )
        assert 2 * num_lacking > len(request.tokens)
        now_s = scheduler._live.deadlines.now_s
        assert now_s - request.arrived_s < scheduler.args.working_set_max_wait_s
        since = own._clocks[0][1]
        in_use = pages_in_use(rank)
        recent = {
            page
            for node in memory.cache.tree.nodes()
            if not node.locks[0] and was_used(memory.cache.tree, node, since)
            for page in node.values[0].tolist()
        }
        assert not recent & in_use
        # The working set is counted once between two ticks, so it may hold pages locked since then.
        num_recent = own._count_recent()
        assert len(recent) <= num_recent or memory.cache.num_evicted > own._seen[0]
        num_spare = memory.allocator.num_pages - 1 - len(in_use) - num_recent
        assert memory.request_pages(num_lacking) > num_spare

    def _check_fetch(self, request: Request, dp_rank: int | None) -> None:
        """A fetch in flight brings a part of the request's prefix that its rank lacked."""
        assert dp_rank is not None
        rank = self.scheduler.ranks[dp_rank]
        assert rank.host.tier is not None
        tokens = request.matchable()
        assert any(
            fetch.lease.namespace == request.namespace
            and common_prefix_len(fetch.tokens, tokens) > fetch.lease.cache_protected_len
            for fetch in rank.host.tier.fetches.values()
        )

    def check(self) -> None:
        """After a planned step: reasons are stated, and true; none is due for ever."""
        scheduler = self.scheduler
        rooms = [room_of(rank) for rank in scheduler.ranks]
        step, due = scheduler._steps, {r.rid for r in due_of(scheduler._waiting)}
        highest = max((r.priority for r in scheduler._requests.values()), default=0)
        self._due_since = {
            rid: self._due_since.get(rid, step)
            for rid in due
            if scheduler._requests[rid].priority == highest  # others may starve
        }
        for rid, since in self._due_since.items():
            assert step - since <= MAX_STEPS_DUE, f"{rid} is due for {step - since} steps"
        self._check_shares()
        for request in scheduler._waiting:
            awaits_store = any(rank.host.awaits_store(request) for rank in scheduler.ranks)
            assert scheduler._waiting._columns.lines.awaits_event[request.line] == awaits_store
        counts = scheduler.count_waiting()
        assert sum(counts.values()) == scheduler.num_waiting
        for request in scheduler._waiting:
            if (request.arrival + step) % self.check_interval:
                continue
            reason = scheduler.why_waiting(request.rid)
            self.num_waits[reason.kind] = self.num_waits.get(reason.kind, 0) + 1
            ranks = [
                rank for rank in scheduler.ranks if request.message.dp_rank in (None, rank.dp_rank)
            ]
            if reason.kind == "pages":
                most_short = {
                    rank.dp_rank: num_pages_short(rank, request, rooms[rank.dp_rank])
                    for rank in ranks
                    if has_row(rank)
                }
                assert reason.pages_short.keys() == most_short.keys()
                for dp_rank, short in reason.pages_short.items():
                    assert 0 < short <= most_short[dp_rank]
            elif reason.kind == "rows":
                assert not any(has_row(rank) for rank in ranks)
            elif reason.kind == "step":
                assert any(has_row(rank) for rank in ranks)
            elif reason.kind == "order":
                assert reason.behind in due

    def _check_shares(self) -> None:
        """No tenant with waiting requests is behind another such by more than the bound."""
        tenants, args = self.scheduler._all_ranks.tenants, self.scheduler.args
        assert tenants._num_present == np.count_nonzero(tenants._num_requests)
        if not tenants.is_fair or args.enable_priority_scheduling:
            return
        may_start = (tenants._num_queued > 0) & ~tenants.is_full
        numbers = np.flatnonzero(may_start)
        for number in numbers:  # in tokens of the one of less weight
            lags = tenants._served[numbers] - tenants._served[number]
            lags *= np.minimum(tenants._weight[numbers], tenants._weight[number])
            assert lags.max() <= 2 * tenants._max_lag, lags


def due_of(waiting: WaitingQueue) -> list[Request]:
    """The requests that are due, oldest first."""
    return sorted(filter(waiting.is_starved, waiting), key=lambda request: request.arrival)


def rids_of(rank: RankScheduler) -> set[str]:
    """The ids of the requests that run on a rank."""
    return {rank.running.request(row).rid for row in rank.running.active.tolist()}


def was_used(tree: RadixTree, node: TreeNode, since: int) -> bool:
    """Whether `node` or one below it was used after `since`."""
    return any(each.last_access > since for each in tree.nodes(node))


def check_spared(builders: Sequence[StepBuilder]) -> None:
    """Short of memory, none was retracted that had gained less than it lost, unless all others of
    its priority had as well."""
    for builder in builders:
        running = builder.rank.running
        for request in builder.retracted:
            if request.num_lost > 0:
                rows = running.runnable()
                rows = rows[running.columns.priority[rows] == request.priority]
                assert is_protected(running, rows).all(), request.rid


def has_row(rank: RankScheduler) -> bool:
    """Whether a row is free, or held by a session that runs nothing."""
    idle = {lease.row for _, lease in rank.memory.sessions.idle()}
    return len(rank.memory.leases) - len(idle) < rank.memory.rows.num_rows - 1


def pages_in_use(rank: RankScheduler, but_for: Sequence[int] = ()) -> set[int]:
    """The pages that running requests list, the tree's among them, but for those of some rows."""
    memory = rank.memory
    idle = {lease.row for _, lease in memory.sessions.idle()} | set(but_for)
    leases = [lease for row, lease in memory.leases.items() if row not in idle]
    return {
        page
        for lease in leases
        for page in memory.by_pool(lease.pages(memory.page_size))[0].tolist()
    }


class Room(NamedTuple):
    """What a rank has for another request, counted page by page."""

    in_use: set[int]  # pages that running requests list
    num_free: int  # all other pages, but for those that running requests may come to take


def room_of(rank: RankScheduler) -> Room:
    memory, in_use = rank.memory, pages_in_use(rank)
    growth = most_growth(rank, rank.running.active)
    return Room(in_use, memory.allocator.num_pages - 1 - len(in_use) - growth)


def most_growth(rank: RankScheduler, rows: RowIndex) -> int:
    """The pages that the requests in `rows` may come to take."""
    memory, most_len = rank.memory, rank.columns.max_len[rows] - 1
    return int(pages_held_and_lacking(memory, memory.rows, rows, most_len[None])[1].sum())


def num_pages_short(rank: RankScheduler, request: Request, room: Room) -> int:
    """Pages that `request` lacks on a rank up to its limit; 0 or less if it has enough."""
    memory, inner = rank.memory, rank.memory.cache
    needed = memory.request_pages(request.max_kv_len)
    if isinstance(inner, RadixCache) and memory.groups[0].sliding_window is None:
        node, length = inner.find(request.matchable(), request.namespace)
        known = inner.tree.pages_to(node)[0, : length // memory.page_size].tolist()
        needed -= sum(page in room.in_use for page in known)
    return needed - room.num_free


def num_short(rank: RankScheduler, request: Request, room: Room) -> int:
    """As `num_pages_short`; 1 at least where there is no row."""
    short = num_pages_short(rank, request, room)
    return short if has_row(rank) else max(short, 1)

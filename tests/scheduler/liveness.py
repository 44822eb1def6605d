"""The liveness invariant, proved by brute force after each planned step.

No request waits that fits: a row that is free or an idle session's, its pages beside those of
running requests, and their reserve. Unless it has a reason that is true and comes to an end. And
none is passed over for ever. Everything is counted from leases and trees, page by page: nothing
that admission keeps for itself is believed, but for the budget of the step.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sgl_jax.mem_cache.radix_cache import RadixCache
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.scheduler import Scheduler
from sgl_jax.scheduler.step_builder import StepBuilder
from sgl_jax.scheduler.victims import is_protected

# Steps that a request may be due for: a rank is held for it, whose requests end in the meantime.
MAX_STEPS_DUE = 1500


class Liveness:
    """Watches a scheduler's admissions; `check` is called after each planned step.

    Each request's stated reason is proved every `check_interval` steps.
    """

    check_interval = 1

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.num_waits: dict[str, int] = {}  # requests found waiting, by kind of reason
        self._due_since: dict[str, int] = {}
        self._stayed_since: dict[tuple[str, int], int] = {}  # by rid and retracts before
        admit_into = scheduler._admission.admit_into

        def watched(ranks: Ranks, builders: Sequence[StepBuilder], step: int) -> None:
            check_spared(builders)
            admit_into(ranks, builders, step)
            self._check_admitted(builders, step)

        scheduler._admission.admit_into = watched  # type: ignore[method-assign]

    def _check_admitted(self, builders: Sequence[StepBuilder], step: int) -> None:
        """What admission leaves waiting though the step could have taken it waits for a reason."""
        scheduler = self.scheduler
        rooms = [room_of(rank) for rank in scheduler.ranks]
        for request in scheduler._waiting:
            open_ranks = [
                builder.rank
                for builder in builders
                if request.message.dp_rank in (None, builder.rank.dp_rank)
                and builder.can_admit
                and num_short(builder.rank, request, rooms[builder.rank.dp_rank]) <= 0
            ]
            if not open_ranks:
                continue
            reason = scheduler.why_waiting(request.rid)
            if reason.kind == "prefix":
                self._check_leader(request, reason.behind)
            elif reason.kind == "rank":
                # No longer than it takes to compute it and all that runs on another rank.
                since = self._stayed_since.setdefault((request.rid, request.num_retractions), step)
                sizes, chunk = scheduler.sizes, scheduler.sizes.max_chunk_tokens
                most = sizes.num_rows * (sizes.max_context_len // chunk + 1) + 2
                assert step - since <= most, request.rid
            else:
                # Each is held for another that was passed over too often.
                held = {r for rid, r in scheduler._admission._holds.items() if rid != request.rid}
                assert {rank.dp_rank for rank in open_ranks} <= held, (request.rid, reason)

    def _check_leader(self, request: Request, rid: str | None) -> None:
        """The request that computes the prefix runs, prefills, and goes on as this one does."""
        leader = self.scheduler._requests[rid or ""]
        assert leader.lease is not None
        rank = self.scheduler.ranks[leader.lease.dp_rank]
        row = leader.lease.row
        assert leader.namespace == request.namespace
        assert rank.running.planned_len[row] > rank.memory.rows.kv_committed_len[row]
        start, page_size = leader.lease.cache_protected_len, rank.memory.page_size
        theirs = rank.running.known_tokens(row)[: start + page_size].tolist()
        assert len(theirs) == start + page_size
        assert request.tokens[: start + page_size].tolist() == theirs

    def check(self) -> None:
        """After a planned step: reasons are stated, and true; none is due for ever."""
        scheduler = self.scheduler
        rooms = [room_of(rank) for rank in scheduler.ranks]
        step, due = scheduler._steps, {r.rid for r in scheduler._waiting.due()}
        self._due_since = {rid: self._due_since.get(rid, step) for rid in due}
        for rid, since in self._due_since.items():
            assert step - since <= MAX_STEPS_DUE, f"{rid} is due for {step - since} steps"
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
                assert reason.pages_short == {
                    rank.dp_rank: num_pages_short(rank, request, rooms[rank.dp_rank])
                    for rank in ranks
                    if has_row(rank)
                }
                assert min(reason.pages_short.values()) > 0
            elif reason.kind == "rows":
                assert not any(has_row(rank) for rank in ranks)
            elif reason.kind == "step":
                shorts = [num_short(rank, request, rooms[rank.dp_rank]) for rank in ranks]
                assert min(shorts) <= 0, (request.rid, shorts)
            elif reason.kind == "order":
                assert reason.behind in due


def check_spared(builders: Sequence[StepBuilder]) -> None:
    """Short of memory, none was retracted that had gained less than it lost, unless all others of
    its priority had as well."""
    for builder in builders:
        running = builder.rank.running
        for request in builder.retracted:
            if request.num_lost > 0:
                rows = running.runnable()
                rows = rows[running.priority[rows] == request.priority]
                assert is_protected(running, rows).all(), request.rid


def has_row(rank: RankScheduler) -> bool:
    """Whether a row is free, or held by a session that runs nothing."""
    idle = {lease.row for _, lease in rank.memory.sessions.idle()}
    return len(rank.memory.leases) - len(idle) < rank.memory.rows.num_rows - 1


def pages_in_use(rank: RankScheduler) -> set[int]:
    """The pages that running requests list, the tree's among them."""
    memory = rank.memory
    idle = {lease.row for _, lease in memory.sessions.idle()}
    leases = [lease for row, lease in memory.leases.items() if row not in idle]
    return {
        page
        for lease in leases
        for page in memory.by_pool(lease.pages(memory.page_size))[0].tolist()
    }


class Room(NamedTuple):
    """What a rank has for another request, counted page by page."""

    in_use: set[int]  # pages that running requests list
    num_free: int  # all other pages, but for the reserve


def room_of(rank: RankScheduler) -> Room:
    memory, in_use = rank.memory, pages_in_use(rank)
    reserve = rank.reserve.pages(memory, rank.running)
    return Room(in_use, memory.allocator.num_pages - 1 - len(in_use) - reserve)


def num_pages_short(rank: RankScheduler, request: Request, room: Room) -> int:
    """Pages that `request` lacks on a rank; 0 or less if it has enough."""
    memory, inner = rank.memory, rank.memory.cache
    needed = memory.sizes.request_pages(len(request.tokens) + 1)
    if isinstance(inner, RadixCache) and memory.groups[0].sliding_window is None:
        path, _ = inner.tree.peek(request.matchable(), request.namespace)
        for node, num_matched in path:
            known = node.values[0][: num_matched // memory.page_size].tolist()
            needed -= sum(page in room.in_use for page in known)
    return needed - room.num_free


def num_short(rank: RankScheduler, request: Request, room: Room) -> int:
    """As `num_pages_short`; 1 at least where there is no row."""
    short = num_pages_short(rank, request, room)
    return short if has_row(rank) else max(short, 1)

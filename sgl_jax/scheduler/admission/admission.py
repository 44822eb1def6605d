"""Chooses the waiting requests that start in the step being planned, and their ranks.

A request fits if a row is free and there are enough pages for its tokens and the reserve of the
running requests. A fitting request starts, unless a wait costs fewer prompt tokens: a wait for a
prefix that a running request is computing (`in_flight.py`), or for a rank with so much more of its
prefix cached that the wait is shorter than the work elsewhere. Each such wait has an end fixed at
its start.

A request that fits nowhere may preempt running ones of a lower priority (`preemption.py`), and
starts in their place in the same step. Otherwise it blocks no fitting request, until so many have
passed it over that it is due: then a rank is held for it, against requests of its own or a lower
priority.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import release_idle_lease
from sgl_jax.scheduler.admission.step_room import Option, RankRoom
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.step_builder import StepBuilder
from sgl_jax.scheduler.waiting.candidate_order import Offer
from sgl_jax.scheduler.waiting.tenants import Tenants
from sgl_jax.scheduler.waiting.wait_reason import WaitKind, WaitReason
from sgl_jax.scheduler.waiting.waiting_queue import WaitingQueue

# A rank may run this many requests more than the least busy one, or this share of them more; each
# further one counts as a step full of prompt tokens.
MAX_SKEW_REQUESTS = 4
MAX_SKEW_SHARE = 0.25
# Requests that begin to wait for a prefix in one step; the others that would wait for the same one
# are passed by in it. So many may begin to wait for a rank.
MAX_PUT_OFF = 128
# Requests tried for preemption in a step until this many fail.
MAX_FAILED_PREEMPTIONS = 32

_T = TypeVar("_T", RankScheduler, RankRoom)


class Admission:
    """Starts waiting requests on ranks.

    Args:
        waiting: the queue.
        args: the scheduler's; may be replaced later.
        home_of: the memory with the lease of a request's session, if any.
        tenants: the tenants of the requests.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        args: SchedulerArgs,
        home_of: Callable[[Request], RankMemory | None],
        tenants: Tenants,
    ) -> None:
        self._waiting = waiting
        self._tenants = tenants
        self.args = args
        self._home_of = home_of
        self._holds: dict[str, int] = {}  # rid of a request that is due -> the rank held for it
        self._next_rank = 0  # of round_robin

    def admit_into(self, ranks: Ranks, builders: Sequence[StepBuilder], step: int) -> None:
        """Start waiting requests in step number `step`; `builders` are the ranks' shares of it."""
        highest = self._waiting.highest_priority
        if highest is None:
            return
        threshold = self.args.priority_scheduling_preemption_threshold
        may_preempt = [_may_preempt(builder, highest - threshold) for builder in builders]
        if not any(may_preempt) and not any(
            builder.can_admit and builder.rank.has_row and highest > builder.priority_floor
            for builder in builders
        ):
            return
        forecast = ranks.forecast()
        rooms = [
            RankRoom(builder, forecast, outlook)
            for builder, outlook in zip(builders, ranks.outlooks(), strict=True)
        ]
        is_counted = np.array([room.needs_forecast for room in rooms])
        if is_counted.any():
            forecast.add(*ranks.active(), is_counted)
            for room, num_reserved in zip(rooms, forecast.pages(slice(None)), strict=True):
                if is_counted[room.dp_rank]:
                    room.take_forecast(num_reserved)
        self._holds = {r: k for r, k in self._holds.items() if self._waiting.waits_due(r)}
        offer = Offer(
            num_pages=np.zeros(len(rooms), np.int32),
            is_open=np.zeros(len(rooms), np.bool_),
            floor=np.zeros(len(rooms), np.int64),
            may_preempt=np.array(may_preempt),
            passed_by=[],
        )
        is_changed = True
        while is_changed:
            for each in rooms:
                # A request for which a rank was held may start on another rank now.
                each.release_hold()
                _renew(offer, each)
            is_changed = self._start_some(rooms, offer, step)

    def _start_some(self, rooms: list[RankRoom], offer: Offer, step: int) -> bool:
        """Start requests in the queue's order, up to the first after which more may start: it
        preempted others, or its output is forecast to be short. Returns whether to try the rest
        anew."""
        threshold = self.args.priority_scheduling_preemption_threshold
        preemptible = [room.preemptible for room in rooms] if offer.may_preempt.any() else []
        num_following = num_staying = num_failed = 0
        for request in self._waiting.candidates(offer, step, preemptible, threshold):
            if not self._tenants.may_run(request.tenant):
                continue
            chosen = self._choose(rooms, request, step)
            room: RankRoom | None = None
            if chosen is not None:
                room = rooms[chosen.dp_rank]
                if chosen.fits and chosen.leader is None:
                    if self._fetches_for(room, request):
                        pass
                    elif self._start(room, request, may_preempt=offer.may_preempt[room.dp_rank]):
                        return True
                else:
                    self._put_off(room, request, chosen)
                    num_staying += chosen.leader is None
            elif preemptible and self._preempt_for(rooms, request, threshold):
                return True
            elif self._waiting.is_due(request):
                room = self._hold_for(rooms, request)
            elif preemptible and not self._waiting.is_following(request):
                num_failed += 1
                if num_failed == MAX_FAILED_PREEMPTIONS:
                    offer.may_preempt[:] = False
                    return True
            if room is not None:
                _renew(offer, room)
            if self._waiting.is_following(request):
                num_following += 1
                if num_following >= MAX_PUT_OFF:
                    offer.passed_by.append(request.line)
            if num_staying == MAX_PUT_OFF or not (preemptible or offer.is_open.any()):
                break
        return False

    def _put_off(self, room: RankRoom, request: Request, chosen: Option) -> None:
        """Make `request` wait for a rank, or for a prefix that is computed there."""
        if chosen.leader is not None:
            self._waiting.follow(request, chosen.dp_rank, *chosen.leader)
            room.rank.keep_branch(*chosen.leader)
        room.num_staying += 1

    def _fetches_for(self, room: RankRoom, request: Request) -> bool:
        """Make `request` wait for its prefix from the host, if that has more of it than the device
        and a fetch is sooner than to compute it."""
        if room.rank.host.tier is None:
            return False
        found = room.fetch(request, self._waiting.cursors(request)[room.dp_rank])
        if found is not None:
            self._waiting.follow(request, room.dp_rank, *found)
        return found is not None

    # -- requests that do not fit -------------------------------------------------------------

    def _preempt_for(self, rooms: list[RankRoom], request: Request, threshold: int) -> bool:
        """Retract running requests for one of higher priority, and start it.

        False, retracting nothing, if it would still fit nowhere, or a prefix of it is in flight.
        Among several ranks, the one with the fewest tokens to compute is chosen.
        """
        cursors, best = self._waiting.cursors(request), None
        for room in _allowed(rooms, request):
            cursor = cursors[room.dp_rank]
            num_read = room.rank.reusable_len(request, cursor)
            leader = room.leader(request, cursor, num_read)
            if leader is not None:
                self._waiting.follow(request, room.dp_rank, *leader)
                room.rank.keep_branch(*leader)
                return False
            found = room.preemption(request, cursor, threshold)
            if found is not None:
                cost = found.num_lost - num_read
                if best is None or cost < best[0]:
                    best = cost, room, found
        if best is None:
            return False
        _, room, found = best
        room.preempt(found.rows)
        self._start(room, request, may_preempt=False)  # all are tried anew in any case
        return True

    def _hold_for(self, rooms: list[RankRoom], request: Request) -> RankRoom:
        """Hold a rank for a due request; return its room."""
        if request.rid not in self._holds:
            self._holds[request.rid] = self._least_short(rooms, request)
        room = rooms[self._holds[request.rid]]
        room.hold(request.priority)
        return room

    def _least_short(self, rooms: list[RankRoom], request: Request) -> int:
        """The rank where a request lacks the fewest pages; among equals, the least busy."""
        cursors = self._waiting.cursors(request)
        allowed = _allowed(rooms, request)
        num_pages = allowed[0].rank.num_pages_at_most(request)
        return min(
            (max(room.num_short(num_pages, cursors[r]), 0), room.num_running, r)
            for room in allowed
            for r in (room.dp_rank,)
        )[2]

    # -- reasons to wait ----------------------------------------------------------------------

    def why_waiting(
        self, request: Request, ranks: Sequence[RankScheduler], room: Sequence[int], step: int
    ) -> WaitReason:
        """The reason why `request` waits, with step number `step` planned next.

        `room` has `num_pages_to_give` of each rank.
        """
        if not self._tenants.may_run(request.tenant):
            return WaitReason("tenant")
        for rank in ranks:
            if rank.host.awaits_store(request):
                return WaitReason("store", dp_rank=rank.dp_rank)
        leader = self._waiting.leader_of(request)
        if leader is not None:
            dp_rank, row = leader
            leader_request = ranks[dp_rank].running.requests[row]
            if leader_request is None:
                return WaitReason("fetch", dp_rank=dp_rank)
            return WaitReason("prefix", behind=leader_request.rid)
        if self._waiting.is_staying(request, step):
            return WaitReason("rank", dp_rank=self._waiting.stays_for(request))
        cursors, allowed = self._waiting.cursors(request), _allowed(ranks, request)
        holders = [self._holder(rank.dp_rank, request) for rank in allowed]
        if None not in holders:
            return WaitReason("order", behind=holders[0])
        with_row = [rank for rank in allowed if rank.has_row]
        short = {
            rank.dp_rank: rank.num_pages_needed(request, cursors[rank.dp_rank]) - room[rank.dp_rank]
            for rank in with_row
        }
        if not short:
            return WaitReason("rows")
        if min(short.values()) > 0:
            return WaitReason("pages", pages_short=short)
        return WaitReason("step")

    def _holder(self, dp_rank: int, request: Request) -> str | None:
        """The id of the request for which a rank is held against `request`."""
        for rid, held in self._holds.items():
            if held == dp_rank and self._waiting.holds_up(rid, request):
                return rid
        return None

    def count_waiting(
        self, ranks: Sequence[RankScheduler], room: Sequence[int], step: int
    ) -> dict[WaitKind, int]:
        """The number of waiting requests by reason; arguments as for `why_waiting`."""
        num_pages = np.array(room, np.int32)
        has_row = np.array([rank.has_row for rank in ranks])
        fetching = [row for rank in ranks for row in rank.host.fetching_rows()]
        return self._waiting.count_kinds(num_pages, has_row, step, fetching)

    # -- choice of a rank ---------------------------------------------------------------------

    def _choose(self, rooms: list[RankRoom], request: Request, step: int) -> Option | None:
        """The best rank for a request that fits on one now, even if it must wait there; else
        None."""
        cursors, allowed = self._waiting.cursors(request), _allowed(rooms, request)
        num_pages, bound = rooms[0].rank.num_pages_at_most(request), _num_unskewed(rooms)
        # A lone rank's cost is compared with none: the host need not be searched for it.
        reads_host = len(allowed) > 1
        options = [
            room.option(request, num_pages, cursors[room.dp_rank], bound, reads_host=reads_host)
            for room in allowed
        ]
        fitting = [option for option in options if option.fits]
        if not fitting:
            return None
        stayed = self._waiting.stays_for(request)
        if self.args.load_balance_method == "round_robin" and self._home_of(request) is None:
            # A request that waited for a prefix in flight goes to its rank, if possible.
            in_turn = min(fitting, key=lambda o: (o.dp_rank < self._next_rank, o.dp_rank))
            return next((o for o in fitting if o.dp_rank == stayed), in_turn)
        best, cheapest = min(options), min(fitting)
        if best.fits or best.leader is not None:
            return best
        # It waits once in its life, for as many steps as the saved tokens take.
        if stayed is None:
            num_steps = 1 + (cheapest.cost - best.cost) // rooms[best.dp_rank].chunk_size
            self._waiting.stay(request, best.dp_rank, step + num_steps)
        return best if self._waiting.is_staying(request, step) else cheapest

    def _start(self, room: RankRoom, request: Request, *, may_preempt: bool) -> bool:
        """Start a fitting request; return whether others may start that could not before, by
        preemption if any there `may_preempt`."""
        dp_rank = room.dp_rank
        home = self._home_of(request)
        if home is not None and home is not room.rank.memory and request.kept_by is not None:
            release_idle_lease(home, request.kept_by)
        cursor = self._waiting.cursors(request)[dp_rank]
        may_more_start = room.start(request, cursor, may_preempt=may_preempt)
        if request.num_retractions == 0:
            self._tenants.serve_prompt(request.tenant, request.prompt_len, request.cached_tokens)
        self._waiting.started(request, dp_rank)
        self._holds.pop(request.rid, None)
        self._next_rank = dp_rank + 1
        return may_more_start


def _may_preempt(builder: StepBuilder, below: int) -> bool:
    """Return whether a request with a priority below `below` runs there and may give way."""
    lowest = builder.rank.running.priorities.lowest
    return builder.can_admit and lowest is not None and lowest < below


def _renew(offer: Offer, room: RankRoom) -> None:
    """Update the rank's part of an offer."""
    dp_rank = room.dp_rank
    offer.is_open[dp_rank], offer.floor[dp_rank] = room.is_open, room.priority_floor
    offer.num_pages[dp_rank] = room.num_pages if room.is_open else 0


def _num_unskewed(rooms: list[RankRoom]) -> int:
    """Requests that may run on a rank before they count as too many."""
    least = min(room.num_running for room in rooms)
    return int(least + max(MAX_SKEW_REQUESTS, MAX_SKEW_SHARE * least))


def _allowed(ranks: Sequence[_T], request: Request) -> Sequence[_T]:
    """Keep the entries for the ranks that `request` may run on."""
    pinned = request.message.dp_rank
    return ranks if pinned is None else [ranks[pinned]]

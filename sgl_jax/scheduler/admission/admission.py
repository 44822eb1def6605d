"""Chooses the waiting requests that start in the step being planned, and their ranks.

A request starts on a rank that it fits (`forecast/fits.py`), if a row is free there and the step
has prompt tokens for it. It is deferred if a wait costs fewer prompt tokens: a wait for a prefix
that a running request computes (`in_flight.py`), or for a rank with so much more of its prefix
cached that the wait is shorter than the work elsewhere. Each such wait has a fixed end.

A request that fits nowhere may preempt running requests of a lower priority (`preemption.py`), and
starts in their place in the same step. Otherwise it blocks no fitting request, until the requests
that passed it over have had as much service as it needs. Then it is due, and a rank is held for it:
other requests of the same or a lower priority start there only if they leave it enough at the step
at which it is expected to start. That step is fixed as the hold begins; after it, none passes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import BoolArray
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import release_idle_lease
from sgl_jax.scheduler.admission.rank_capacity import (
    Option,
    RankCapacities,
    RankCapacity,
)
from sgl_jax.scheduler.admission.rank_options import RankOptions
from sgl_jax.scheduler.forecast.fits import NO_FLOOR, NO_LIMIT, NO_RANK
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request, RequestState
from sgl_jax.scheduler.step_builders import StepBuilders
from sgl_jax.scheduler.tenants import Tenants
from sgl_jax.scheduler.waiting.admission_order import Offer
from sgl_jax.scheduler.waiting.waiting_queue import WaitingQueue
from sgl_jax.scheduler.working_set import HOLD_STEPS

# Limit of requests that start in one step. Each takes a fifth of a millisecond of the host, and
# decode rows wait for all of them.
MAX_STARTS = 288
# Limit of requests that begin to wait for a prefix in one step; after it, requests that would wait
# for the same prefix are not tried. Also the limit of requests that begin to wait for a rank.
MAX_DEFERRED = 128
# Requests tried for preemption in a step until this many fail.
MAX_FAILED_PREEMPTIONS = 32

_T = TypeVar("_T", RankScheduler, RankCapacity)


class Hold(NamedTuple):
    """A rank held for a due request, and the step at which it is expected to start there."""

    dp_rank: int
    until_step: int


class Admission:
    """Starts waiting requests on ranks.

    Args:
        waiting: the queue.
        args: the scheduler's arguments; may be replaced later.
        home_of: returns the memory with the lease of a request's session, if any.
        tenants: the tenants of the requests.

    Attributes:
        holds: the held ranks, by rid of a due request; of several for one rank, the last applies.
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
        self.holds: dict[str, Hold] = {}
        self._next_rank = 0  # for round_robin
        self._num_starts = 0  # in the step being planned
        # Requests whose images did not fit in the last planned step, by rank.
        self._without_images: dict[int, Request] = {}

    def admit_into(self, ranks: Ranks, builders: StepBuilders, step: int) -> None:
        """Start waiting requests in step number `step`; `builders` are the ranks' parts of it.
        Called only if any request waits."""
        highest = self._waiting.priorities.highest
        assert highest is not None, "a request waits"
        self._without_images.clear()
        threshold = self.args.priority_scheduling_preemption_threshold
        # Whether a request of a priority so much lower runs on a rank and may be preempted.
        lowest = [rank.running.priorities.lowest for rank in ranks.ranks]
        may_preempt = [each is not None and each < highest - threshold for each in lowest]
        for builder in builders.made():
            may_preempt[builder.rank.dp_rank] &= builder.can_admit
        if all(each is None for each in lowest):
            self._waiting.delays.release_held()  # no step would come
        if not any(may_preempt) and not self._has_tokens(ranks, builders, highest, step):
            return
        rooms = RankCapacities(ranks, builders, self._waiting)
        num_tenants = self._tenants.num_numbers
        self.holds = {r: k for r, k in self.holds.items() if self._waiting.find_due(r)}
        offer = Offer(
            rooms.records,
            np.array(may_preempt),
            open_tenants=np.zeros((len(rooms), num_tenants), np.bool_),
            passed_by=[],
            started_on=[],
        )
        options = RankOptions(rooms, self._waiting)
        self._num_starts, is_changed = 0, True
        while is_changed and self._num_starts < MAX_STARTS:
            # A request for which a rank was held may start on another rank now.
            rooms.records["held_above"] = NO_FLOOR
            offer.open_tenants[:] = False
            for builder in builders.made():
                if builder.open_tenants is not None:
                    _note_open_tenants(offer, builder.rank.dp_rank, builder.open_tenants)
            is_changed = self._start_some(rooms, options, offer, step)

    def _has_tokens(self, ranks: Ranks, builders: StepBuilders, highest: int, step: int) -> bool:
        """Return whether any rank may have prompt tokens for a waiting request."""
        limited = []
        for rank in ranks.ranks:
            builder = builders.find(rank.dp_rank)
            if builder is None:  # it only decodes
                if rank.has_row:
                    return True
                continue
            floor = builder.priority_floor
            if floor < highest and builder.can_admit and rank.has_row:
                if floor < highest - 1 or builder.most_tokens == NO_LIMIT:
                    return True
                limited.append(builder)
        if not limited:
            return False
        open_tenants = np.zeros((len(limited), self._tenants.num_numbers), np.bool_)
        for k, builder in enumerate(limited):
            if builder.open_tenants is not None:
                open_tenants[k] = builder.open_tenants[: open_tenants.shape[1]]
        limited_ranks = np.array([builder.rank.dp_rank for builder in limited])
        most_tokens = np.array([builder.most_tokens for builder in limited])
        return self._waiting.has_short(limited_ranks, most_tokens, open_tenants, step)

    def _start_some(
        self, rooms: RankCapacities, options: RankOptions, offer: Offer, step: int
    ) -> bool:
        """Start requests in the queue's order, up to the first that preempted others. Return
        whether to try the rest again."""
        threshold = self.args.priority_scheduling_preemption_threshold
        preemptible = []
        if np.count_nonzero(offer.may_preempt):
            preemptible = [room.preemptible for room in rooms]
        num_following, num_staying, num_failed, is_open = 0, 0, 0, offer.rooms["is_open"]
        is_thrashing = rooms.is_thrashing
        candidates = self._waiting.candidates(offer, step, preemptible, threshold, is_thrashing)
        for request, may_start in candidates:
            if not self._tenants.may_run(request.tenant):
                continue
            chosen = self._choose(rooms, options, offer, request, step) if may_start else None
            room: RankCapacity | None = None
            if chosen is not None:
                room = rooms[chosen.dp_rank]
                if chosen.fits and chosen.leader is None:
                    if not self._takes_images(room, request):
                        continue
                    if is_thrashing and self._holds_back(room, request, chosen, step):
                        continue
                    if not self._fetches_for(room, request):
                        self._start(room, request)
                        offer.started_on.append(room.dp_rank)
                else:
                    self._defer(room, request, chosen)
                    num_staying += chosen.leader is None
            elif (
                preemptible and may_start and self._preempt_for(rooms, options, request, threshold)
            ):
                return True
            elif self._waiting.is_starved(request):
                room = self._hold_for(rooms, request, step)
            elif preemptible and not self._waiting.delays.is_following(request):
                num_failed += 1
                if num_failed == MAX_FAILED_PREEMPTIONS:
                    offer.may_preempt[:] = False
                    return True
            if room is not None:
                _note_open_tenants(offer, room.dp_rank, room.open_tenants)
            if self._waiting.delays.is_following(request):
                num_following += 1
                if num_following >= MAX_DEFERRED:
                    offer.passed_by.append(request.line)
            if num_staying == MAX_DEFERRED or self._num_starts == MAX_STARTS:
                break
            if not (preemptible or np.count_nonzero(is_open)):
                break
        return False

    def lacks_images(self, request: Request, rank: RankScheduler) -> bool:
        """Return whether `request` waits for room in the rank's table, for its images or those of
        a request before it."""
        if not request.images:
            return False
        ahead = self._without_images.get(rank.dp_rank, request)
        return any(
            not rank.has_images(each, self._waiting.cursor(each, rank.dp_rank))
            for each in (request, ahead)
            if each.state is RequestState.WAITING
        )

    def _takes_images(self, room: RankCapacity, request: Request) -> bool:
        """Return whether the rank has room for the images of `request`. If not, no later request
        of the step with images starts there, or a request with many would starve."""
        if not request.images:
            return True
        cursor = self._waiting.cursor(request, room.dp_rank)
        if room.dp_rank in self._without_images or not room.rank.has_images(request, cursor):
            self._without_images.setdefault(room.dp_rank, request)
            return False
        return True

    def _defer(self, room: RankCapacity, request: Request, chosen: Option) -> None:
        """Defer `request` until a rank has room, or a prefix is computed there."""
        if chosen.leader is not None:
            self._waiting.delays.follow(request, chosen.dp_rank, *chosen.leader)
            room.rank.prompts.keep_branch(*chosen.leader)
        cursor = self._waiting.cursor(request, room.dp_rank)
        room.stay(room.rank.num_pages_needed(request, cursor))

    def _holds_back(self, room: RankCapacity, request: Request, chosen: Option, step: int) -> bool:
        """Delay `request` if it would evict the working set of its rank, unless the rank runs
        nothing, or only requests of lower priorities, or the request is due. All ranks thrash."""
        rank = room.rank
        lowest = rank.running.priorities.lowest
        is_held = (
            self._waiting.uses_cached_len
            and lowest is not None
            and request.priority <= lowest
            and not self._waiting.is_starved(request)
            and rank.working_set.holds(request, chosen.num_read)
        )
        if is_held:
            self._waiting.delays.hold_until(request, step + HOLD_STEPS)
        return is_held

    def _fetches_for(self, room: RankCapacity, request: Request) -> bool:
        """Defer `request` until its prefix is fetched, if the host has more of it than the device
        and a fetch is faster than computing it. Return whether it is deferred."""
        if room.rank.host.tier is None:
            return False
        found = room.fetch(request, self._waiting.cursor(request, room.dp_rank))
        if found is not None:
            self._waiting.delays.follow(request, room.dp_rank, *found)
        return found is not None

    # -- requests that do not fit -------------------------------------------------------------

    def _preempt_for(
        self, rooms: RankCapacities, options: RankOptions, request: Request, threshold: int
    ) -> bool:
        """Retract running requests for a request of higher priority, and start it. Return False,
        retracting nothing, if it would still fit nowhere, or if a prefix of it is in flight. Among
        several ranks, the rank with the fewest tokens to compute is chosen."""
        options.begin(request, self._home_of(request))
        for dp_rank in options.ranks:
            options.confirm([dp_rank])
            if (leader := options.leaders.get(dp_rank)) is not None:
                self._waiting.delays.follow(request, dp_rank, *leader)
                rooms[dp_rank].rank.prompts.keep_branch(*leader)
                return False
        best = None
        for room in _allowed(rooms, request):
            found = room.preemption(request, threshold)
            if found is not None and self._takes_images(room, request):
                cost = found.num_lost - options.num_present(room.dp_rank)
                if best is None or cost < best[0]:
                    best = cost, room, found
        if best is None:
            return False
        _, room, found = best
        room.preempt(found.rows)
        self._start(room, request)
        return True

    def _hold_for(self, rooms: RankCapacities, request: Request, step: int) -> RankCapacity | None:
        """Hold a rank for a due request and return its room; None if it is held for another."""
        hold = self.holds.get(request.rid)
        if hold is None:
            open_rooms = [room for room in _allowed(rooms, request) if not room.is_held]
            if not open_rooms:
                return None
            room = self._least_short(open_rooms, request)
        else:
            room = rooms[hold.dp_rank]
        if room.is_held:
            return None
        cursor = self._waiting.cursor(request, room.dp_rank)
        num_pages = room.rank.num_pages_needed(request, cursor)
        if hold is None:
            hold = Hold(room.dp_rank, step + max(room.steps_to_room(num_pages), 1))
        self.holds.pop(request.rid, None)
        self.holds[request.rid] = hold  # comes last now
        room.hold(request, num_pages, max(hold.until_step - step, 0))
        return room

    def _least_short(self, rooms: Sequence[RankCapacity], request: Request) -> RankCapacity:
        """Return the rank on which a request lacks the fewest pages, then the least busy."""

        def shortage(room: RankCapacity) -> tuple[int, int, int]:
            cursor = self._waiting.cursor(request, room.dp_rank)
            num_pages = room.rank.num_pages_needed(request, cursor)
            short = room.pages_short(request, num_pages)
            return max(short, 0), room.num_running, room.dp_rank

        return min(rooms, key=shortage)

    # -- choice of a rank ---------------------------------------------------------------------

    def _choose(
        self,
        rooms: RankCapacities,
        options: RankOptions,
        offer: Offer,
        request: Request,
        step: int,
    ) -> Option | None:
        """Return the best rank for a request, even if it must wait; None if it fits no rank now."""
        home, delays = self._home_of(request), self._waiting.delays
        options.begin(request, home)
        if self.args.load_balance_method == "round_robin" and home is None:
            # A request that waited for a prefix in flight goes to its rank, if possible.
            fitting, stayed = options.fitting(offer), delays.deferred_rank(request)
            if stayed not in fitting:
                stayed = min(fitting, key=lambda k: (k < self._next_rank, k), default=None)
            return None if stayed is None else options.option(stayed)
        found, others = options.cheapest(offer)
        if found == NO_RANK:
            return None
        best = cheapest = options.option(found)
        for dp_rank in others:
            best = min(best, rooms[dp_rank].after_wait(request, options.option(dp_rank)))
        if best.fits or best.leader is not None:
            return best
        # A request waits for a rank only once, for as many steps as the saved tokens take.
        if delays.deferred_rank(request) is None:
            num_steps = 1 + (cheapest.cost - best.cost) // rooms[best.dp_rank].chunk_size
            delays.stay(request, best.dp_rank, step + num_steps)
        return best if delays.is_staying(request, step) else cheapest

    def _start(self, room: RankCapacity, request: Request) -> None:
        dp_rank, num_free = room.dp_rank, room.num_free
        home = self._home_of(request)
        if home is not None and home is not room.rank.memory and request.kept_by is not None:
            release_idle_lease(home, request.kept_by)
        room.start(request, self._waiting.cursor(request, dp_rank))
        self._num_starts += 1
        if request.num_retractions == 0:
            self._tenants.serve_prompt(request.tenant, request.prompt_len, request.cached_tokens)
        self._waiting.started(request, dp_rank, num_free)
        self.holds.pop(request.rid, None)
        self._next_rank = dp_rank + 1


def _note_open_tenants(offer: Offer, dp_rank: int, open_tenants: BoolArray | None) -> None:
    """Record on which tenants a rank has no limit, bool[tenants]; None if it has one on all."""
    offer.open_tenants[dp_rank] = (
        False if open_tenants is None else open_tenants[: offer.open_tenants.shape[1]]
    )


def _allowed(ranks: Sequence[_T], request: Request) -> Sequence[_T]:
    """Return the entries for the ranks that `request` may run on."""
    pinned = request.message.dp_rank
    return ranks if pinned is None else [ranks[pinned]]

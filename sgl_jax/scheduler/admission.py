"""Which waiting requests start in the step being planned, and on which rank.

A request starts as soon as it fits: a row, the pages of its tokens, and the reserve of those that
run there. It waits though it fits only while that costs less, in prompt tokens: for a prefix that
a running request is computing (`in_flight.py`), or for a rank that has so much more of it cached
that the wait there is shorter than the work elsewhere. Each such wait has an end that is known
when it begins.

A request that does not fit does not hold up others that do, until so many of them have passed it
over that it is due: then a rank is held for it, and nothing else starts there before it.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from sgl_jax.core.server_args import SchedulerArgs
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import release_idle_lease
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.step_builder import StepBuilder
from sgl_jax.scheduler.step_room import Option, RankRoom
from sgl_jax.scheduler.wait_reason import WaitKind, WaitReason
from sgl_jax.scheduler.waiting_queue import WaitingQueue

# A rank may run this many requests more than the least busy one, or this share of them more, and
# each further one counts as much as a step full of prompt tokens.
MAX_SKEW_REQUESTS = 4
MAX_SKEW_SHARE = 0.25
# Of what started because it was due: higher than any priority that a request can ask for, so that
# it is not preempted by what it has waited for long enough.
AGED_PRIORITY = 2**32
# Requests that are told in one step what to wait for; the others are told in the next.
MAX_PUT_OFF = 128
# Of those that are due, so many are tried in a step before the others, the oldest: were priorities
# to keep a long queue waiting, all of it would become due.
MAX_DUE_TRIED = 32

_T = TypeVar("_T", RankScheduler, RankRoom)


class Admission:
    """Starts waiting requests on ranks.

    Args:
        waiting: the queue.
        args: the scheduler's; may be others later.
        home_of: the memory with the lease of a request's session, if any.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        args: SchedulerArgs,
        home_of: Callable[[Request], RankMemory | None],
    ) -> None:
        self._waiting = waiting
        self.args = args
        self._home_of = home_of
        self._holds: dict[str, int] = {}  # rid of a request that is due -> the rank held for it
        self._next_rank = 0  # of round_robin

    def preempt(self, ranks: Sequence[RankScheduler]) -> list[Request]:
        """Retract running requests for a waiting one of higher priority that fits nowhere.

        Only for the oldest of the highest priority, only those whose priority is lower by more
        than the threshold, on the rank where the fewest have to go, and none if it would not fit
        even so. Answers those retracted; the caller queues them again.
        """
        highest = self._waiting.highest_priority
        if highest is None:
            return []
        below = highest - self.args.priority_scheduling_preemption_threshold
        lowest = [rank.running.priorities.lowest for rank in ranks]
        if not any(priority is not None and priority < below for priority in lowest):
            return []
        request = self._waiting.first_by_priority()
        held = {dp_rank for rid, dp_rank in self._holds.items() if rid != request.rid}
        allowed = [rank for rank in _allowed(ranks, request) if rank.dp_rank not in held]
        if self._waiting.leader_of(request) is not None:
            return []
        cursors = self._waiting.cursors(request)
        if any(rank.fits(request, cursors[rank.dp_rank]) for rank in allowed):
            return []
        chosen: list[int] | None = None
        for rank in allowed:
            victims = rank.victims_for(request, cursors[rank.dp_rank], below)
            if victims is not None and (chosen is None or len(victims) < len(chosen)):
                chosen, chosen_rank = victims, rank
        if chosen is None:
            return []
        return [chosen_rank.retract(row, "preempted") for row in chosen]

    def admit_into(self, ranks: Ranks, builders: Sequence[StepBuilder], step: int) -> None:
        """Start what can start in step number `step`, of which `builders` are the ranks' shares."""
        if not len(self._waiting):
            return
        due = self._waiting.due(MAX_DUE_TRIED)
        if not due and not any(builder.can_admit and builder.rank.has_row for builder in builders):
            self._holds.clear()
            return
        rooms = [
            RankRoom(builder, soonest_end)
            for builder, soonest_end in zip(builders, ranks.soonest_ends(), strict=True)
        ]
        self._start_due(rooms, due)
        is_open = np.array([room.is_open for room in rooms])
        if not is_open.any():
            return
        num_pages = np.array([room.num_pages if room.is_open else 0 for room in rooms], np.int32)
        num_put_off = 0
        for request in self._waiting.candidates(num_pages, is_open, step):
            chosen = self._choose(rooms, request, step)
            if chosen is None:
                continue
            if chosen.fits and chosen.leader is None:
                self._start(rooms, request, chosen.dp_rank)
                room = rooms[chosen.dp_rank]
                is_open[chosen.dp_rank] = room.is_open
                if room.is_open:
                    num_pages[chosen.dp_rank] = room.num_pages
                elif not is_open.any():
                    return
                continue
            if chosen.leader is not None:
                self._waiting.follow(request, chosen.dp_rank, *chosen.leader)
                rooms[chosen.dp_rank].rank.keep_branch(*chosen.leader)
            rooms[chosen.dp_rank].num_staying += 1
            num_put_off += 1
            if num_put_off == MAX_PUT_OFF:
                return

    # -- why others wait ----------------------------------------------------------------------

    def why_waiting(
        self, request: Request, ranks: Sequence[RankScheduler], step: int
    ) -> WaitReason:
        """What `request` waits for when step number `step` is planned next."""
        leader = self._waiting.leader_of(request)
        if leader is not None:
            dp_rank, row = leader
            return WaitReason("prefix", behind=ranks[dp_rank].running.request(row).rid)
        if self._waiting.is_staying(request, step):
            return WaitReason("rank", dp_rank=self._waiting.stays_for(request))
        held_for = {r: rid for rid, r in self._holds.items() if self._waiting.waits_due(rid)}
        cursors, allowed = self._waiting.cursors(request), _allowed(ranks, request)
        holders = [held_for.get(rank.dp_rank, request.rid) for rank in allowed]
        if request.rid not in holders:
            return WaitReason("order", behind=holders[0])
        with_row = [rank for rank in allowed if rank.has_row]
        short = {
            rank.dp_rank: rank.num_pages_needed(request, cursors[rank.dp_rank])
            - rank.num_pages_to_give()
            for rank in with_row
        }
        if not short:
            return WaitReason("rows")
        if min(short.values()) > 0:
            return WaitReason("pages", pages_short=short)
        return WaitReason("step")

    def count_waiting(self, ranks: Sequence[RankScheduler], step: int) -> dict[WaitKind, int]:
        """How many wait for what when step number `step` is planned next."""
        num_pages = np.array([rank.num_pages_to_give() for rank in ranks], np.int32)
        has_row = np.array([rank.has_row for rank in ranks])
        return self._waiting.count_kinds(num_pages, has_row, step)

    # -- requests that are due ----------------------------------------------------------------

    def _start_due(self, rooms: list[RankRoom], due: list[Request]) -> None:
        """Start what was passed over too often, or hold a rank for it."""
        self._holds = {r.rid: self._holds[r.rid] for r in due if r.rid in self._holds}
        for request in due:
            if not any(room.is_open for room in rooms):
                return  # all ranks are held for older ones, or take nothing anyway
            if self._waiting.leader_of(request) is not None or not self._waiting.is_due(request):
                continue  # not due any more: an older one that was due has just started
            if fitting := self._fitting_options(rooms, request):
                if self.args.enable_priority_scheduling:
                    request.priority = AGED_PRIORITY
                self._start(rooms, request, min(fitting).dp_rank)
                continue
            if request.rid not in self._holds:
                self._holds[request.rid] = self._least_short(rooms, request)
            rooms[self._holds[request.rid]].hold()

    def _least_short(self, rooms: list[RankRoom], request: Request) -> int:
        """The rank where a request lacks the fewest pages; of equals, the least busy."""
        cursors = self._waiting.cursors(request)
        allowed = _allowed(rooms, request)
        return min(
            (max(room.num_short(request, cursors[r]), 0), room.num_running, r)
            for room in allowed
            for r in (room.rank.dp_rank,)
        )[2]

    # -- where a request runs -----------------------------------------------------------------

    def _options(self, rooms: list[RankRoom], request: Request) -> list[Option]:
        """All ranks that a request may run on; none if it fits none of them now."""
        cursors, allowed = self._waiting.cursors(request), _allowed(rooms, request)
        fits = [room.fits(request, cursors[room.rank.dp_rank]) for room in allowed]
        if not any(fits):
            return []
        bound = _num_unskewed(rooms)
        return [
            room.option(request, cursors[room.rank.dp_rank], bound, fits=fits_here)
            for room, fits_here in zip(allowed, fits, strict=True)
        ]

    def _fitting_options(self, rooms: list[RankRoom], request: Request) -> list[Option]:
        """Those of `_options` that fit, found without a look at the others."""
        cursors, bound = self._waiting.cursors(request), _num_unskewed(rooms)
        return [
            room.option(request, cursors[room.rank.dp_rank], bound, fits=True)
            for room in _allowed(rooms, request)
            if room.fits(request, cursors[room.rank.dp_rank])
        ]

    def _choose(self, rooms: list[RankRoom], request: Request, step: int) -> Option | None:
        """The best rank for a request that fits one now, even if it must wait there; else None."""
        options = self._options(rooms, request)
        fitting = [option for option in options if option.fits]
        if not fitting:
            return None
        stayed = self._waiting.stays_for(request)
        if self.args.load_balance_method == "round_robin" and self._home_of(request) is None:
            # One that waited for a prefix in flight goes where that is, if it can.
            in_turn = min(fitting, key=lambda o: (o.dp_rank < self._next_rank, o.dp_rank))
            return next((o for o in fitting if o.dp_rank == stayed), in_turn)
        best, cheapest = min(options), min(fitting)
        if best.fits or best.leader is not None:
            return best
        # It waits for as many steps as the tokens take that it saves, once in its life.
        if stayed is None:
            num_steps = 1 + (cheapest.cost - best.cost) // rooms[best.dp_rank].chunk_size
            self._waiting.stay(request, best.dp_rank, step + num_steps)
        return best if self._waiting.is_staying(request, step) else cheapest

    def _start(self, rooms: list[RankRoom], request: Request, dp_rank: int) -> None:
        room, cursor = rooms[dp_rank], self._waiting.cursors(request)[dp_rank]
        home = self._home_of(request)
        if home is not None and home is not room.rank.memory and request.kept_by is not None:
            release_idle_lease(home, request.kept_by)
        room.start(request, cursor)
        self._waiting.started(request, dp_rank)
        self._holds.pop(request.rid, None)
        self._next_rank = dp_rank + 1


def _num_unskewed(rooms: list[RankRoom]) -> int:
    """Requests that may run on a rank without it counting as too many."""
    least = min(room.num_running for room in rooms)
    return int(least + max(MAX_SKEW_REQUESTS, MAX_SKEW_SHARE * least))


def _allowed(ranks: Sequence[_T], request: Request) -> Sequence[_T]:
    """Of what there is one of for each rank, those of the ranks that `request` may run on."""
    pinned = request.message.dp_rank
    return ranks if pinned is None else [ranks[pinned]]

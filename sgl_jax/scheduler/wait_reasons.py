"""Finds the reasons why requests wait, as of the last planned step."""

from collections.abc import Iterable

import numpy as np

from sgl_jax.scheduler.admission.admission import Admission
from sgl_jax.scheduler.forced_retract import ForcedRetract
from sgl_jax.scheduler.forecast.capacity import Rooms
from sgl_jax.scheduler.live_requests import LiveRequests
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.waiting.wait_reason import WaitKind, WaitReason


class WaitReasons:
    """The reasons why the requests of `live` wait, while the scheduler is not paused.

    `step` is the number of the step planned next. `forced` delays starts in tests.
    """

    def __init__(
        self, ranks: Ranks, live: LiveRequests, admission: Admission, forced: ForcedRetract | None
    ) -> None:
        self._ranks, self._admission, self._forced = ranks, admission, forced
        self._gate, self._waiting = live.gate, live.waiting

    def find(self, requests: Iterable[Request], step: int) -> list[tuple[Request, WaitReason]]:
        """Return each of the waiting `requests` with its reason."""
        rooms = self._ranks.forecast_rooms()
        return [(request, self._find(request, rooms, step)) for request in requests]

    def _find(self, request: Request, rooms: Rooms, step: int) -> WaitReason:
        if request in self._gate:
            is_compiled = self._gate.awaits_grammar(request.rid) is None
            return WaitReason("program" if is_compiled else "grammar")
        reason = self._event(request, step) or self._room(request, rooms, step)
        forced = self._forced
        if reason.kind == "step" and forced is not None and not forced.may_start(self._ranks.ranks):
            return WaitReason("paused")
        return reason

    def _event(self, request: Request, step: int) -> WaitReason | None:
        """Return the event or time that a request waits for, if any."""
        ranks = self._ranks.ranks
        if not self._ranks.tenants.may_run(request.tenant):
            return WaitReason("tenant")
        for rank in ranks:
            if rank.host.awaits_store(request):
                return WaitReason("store", dp_rank=rank.dp_rank)
        leader = self._waiting.delays.leader_of(request)
        if leader is not None:
            dp_rank, row = leader
            leader_request = ranks[dp_rank].running.requests[row]
            if leader_request is None:
                return WaitReason("fetch", dp_rank=dp_rank)
            return WaitReason("prefix", behind=leader_request.rid)
        if self._waiting.delays.is_held(request, step):
            return WaitReason("working_set")
        if self._waiting.delays.is_staying(request, step):
            return WaitReason("rank", dp_rank=self._waiting.delays.deferred_rank(request))
        return None

    def _room(self, request: Request, rooms: Rooms, step: int) -> WaitReason:
        """Return what keeps a request from each rank. `rooms` are their forecast capacities."""
        pinned = request.message.dp_rank
        ranks = self._ranks.ranks if pinned is None else [self._ranks.ranks[pinned]]
        with_row = [rank for rank in ranks if rank.has_row]
        if not with_row:
            return WaitReason("rows")
        held_rooms, holders = self._held(rooms, step)
        short: dict[int, int] = {}
        behind: str | None = None
        full_table: int | None = None
        for rank in with_row:
            dp_rank = rank.dp_rank
            num_pages = rank.num_pages_needed(request, self._waiting.cursor(request, dp_rank))
            if self._waiting.pages_short(request, held_rooms, dp_rank, num_pages) <= 0:
                if not self._admission.lacks_images(request, rank):
                    return WaitReason("step")
                full_table = dp_rank if full_table is None else full_table
                continue
            short[dp_rank] = self._waiting.pages_short(request, rooms, dp_rank, num_pages)
            if short[dp_rank] <= 0:
                behind = holders[dp_rank]
        if full_table is not None:
            return WaitReason("images", dp_rank=full_table)
        if behind is None:
            return WaitReason("pages", pages_short=short)
        return WaitReason("order", behind=behind)

    def _held(self, rooms: Rooms, step: int) -> tuple[Rooms, dict[int, str]]:
        """Return `rooms` with the holds of the last planned step, and the requests' ids by rank."""
        held, holders = rooms.copy(), {}
        for rid, hold in reversed(self._admission.holds.items()):
            request = self._waiting.find_due(rid)
            dp_rank = hold.dp_rank
            if request is None or dp_rank in holders:
                continue
            holders[dp_rank] = rid
            cursor = self._waiting.cursor(request, dp_rank)
            num_pages = self._ranks.ranks[dp_rank].num_pages_needed(request, cursor)
            num_steps = max(hold.until_step - step + 1, 0)
            self._waiting.hold(request, held, dp_rank, num_pages, num_steps)
        return held, holders

    def count(self, step: int) -> dict[WaitKind, int]:
        """Return the number of waiting requests by reason."""
        ranks, rooms = self._ranks.ranks, self._ranks.forecast_rooms()
        has_row = np.array([rank.has_row for rank in ranks])
        fetching = [row for rank in ranks for row in rank.host.fetching_rows()]
        held_rooms, _ = self._held(rooms, step)
        counts = self._waiting.count_kinds(
            rooms,
            held_rooms,
            has_row,
            step,
            fetching,
            lambda request, dp_rank: self._admission.lacks_images(request, ranks[dp_rank]),
        )
        num_without_grammar = self._gate.num_without_grammar
        num_without_program = len(self._gate.held) - num_without_grammar
        return counts | {"grammar": num_without_grammar, "program": num_without_program}

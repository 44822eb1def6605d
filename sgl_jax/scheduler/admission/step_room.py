"""The room of each rank in the step being planned, and the cost of running a request there.

Costs are counted in prompt tokens, the unit of a step's budget. So computing a prefix again, though
another rank has it cached, is comparable to waiting for room there.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.scheduler.admission.in_flight import InFlight, Leader
from sgl_jax.scheduler.admission.preemption import Preemptible, Preemption
from sgl_jax.scheduler.admission.reserve import Forecast
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.ranks import Outlook
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.step_builder import NO_FLOOR, StepBuilder
from sgl_jax.scheduler.waiting.waiting_lines import NEVER


class Option(NamedTuple):
    """A rank that a request may run on. Options compare by cost, then by load, then by rank."""

    cost: int  # prompt tokens: to compute, ahead of them, and computed elsewhere while waiting
    num_running: int
    dp_rank: int
    fits: bool  # in this step
    leader: Leader | None = None  # that computes a part of the request's prefix


class RankRoom:
    """The room of one rank in the step being planned.

    Args:
        builder: the rank's share of the step.
        forecast: of the ranks' needs, empty yet.
        outlook: of the rank's running requests.
    """

    def __init__(self, builder: StepBuilder, forecast: Forecast, outlook: Outlook) -> None:
        self.rank: RankScheduler = builder.rank
        self.dp_rank = builder.rank.dp_rank
        self.num_staying = 0  # requests that wait for room here though other ranks have it
        self._builder = builder
        self._forecast = forecast
        self.chunk_size = builder.chunk_size
        self._soonest_end = outlook.soonest_end
        # Pages that running requests may come to take, and that another like the youngest may.
        self._most_growth = outlook.most_growth
        self._most_of_youngest = self.rank.memory.request_pages(outlook.longest)
        self._enough = self.rank.memory.request_pages(self.rank.memory.sizes.max_request_tokens)
        self._held_above = NO_FLOOR
        self._started: list[int] = []  # rows
        # Computed when they are first read.
        self._num_reserved: int | None = None
        self._num_pages: int | None = None
        self._sorted_ends: Int32Array | None = None
        self._in_flight: InFlight | None = None
        self._preemptible: Preemptible | None = None
        self._is_counted = False
        self._look()

    def _look(self) -> None:
        """Compute the rank's room and load, which change only as requests start here."""
        self.num_running = len(self.rank.running)
        self._has_row = self.rank.has_row
        # True if the step takes another request of some priority here that fits.
        self.is_open = self._has_row and self._builder.can_admit

    @property
    def needs_forecast(self) -> bool:
        """Return whether it depends on the forecast which requests fit here."""
        return self._has_row and not self._is_ample()

    def _is_ample(self) -> bool:
        """Return whether any request fits if the running ones come to take all that they may."""
        return self._num_pages_at_least() >= self._enough

    def _num_pages_at_least(self) -> int:
        return self.rank.memory.num_reclaimable_pages - self._most_reserved

    @property
    def _most_reserved(self) -> int:
        """A bound of the reserve that holds for every forecast."""
        return self._most_growth + self._most_of_youngest

    def take_forecast(self, num_reserved: int) -> None:
        """The rank's requests are in the forecast now, by which their reserve is `num_reserved`."""
        self._is_counted, self._num_reserved = True, num_reserved

    @property
    def num_pages(self) -> int:
        """Pages that another request may take, excluding the reserve. If any request fits, these
        are fewer: there is no need to forecast the reserve."""
        if self._num_pages is None:
            if self._is_ample():
                self._num_pages = self._num_pages_at_least()
            else:
                self._num_pages = self.rank.memory.num_reclaimable_pages - self._reserve()
        return self._num_pages

    def _reserve_for(self, num_pages: int) -> int:
        """The reserve; or more, if even then no session must be evicted for `num_pages` more."""
        if self.rank.memory.num_available_pages >= num_pages + self._most_reserved:
            return self._most_reserved
        return self._reserve()

    def _reserve(self) -> int:
        if self._num_reserved is None:
            if not self._is_counted:
                self._count()
            (self._num_reserved,) = self._forecast.pages(slice(self.dp_rank, self.dp_rank + 1))
        return self._num_reserved

    def _count(self) -> None:
        """Forecast the needs of the requests that run here now."""
        self._forecast.recount(self.dp_rank, self.rank.running.active)
        self._is_counted = True

    def num_short(self, num_pages: int, cursor: PrefixCursor) -> int:
        """Pages that a request of `num_pages` pages lacks here, or more; not above 0 if it has
        enough."""
        # Mostly there are enough without a look at how much of its prefix is in use.
        num_short = num_pages - self.num_pages
        return (
            num_short if num_short <= 0 else num_short - self.rank.memory.num_pages_in_use(cursor)
        )

    def takes(self, request: Request) -> bool:
        """Return whether `request` can start here in this step, if it has enough pages."""
        return self.is_open and request.priority > self.priority_floor

    @property
    def priority_floor(self) -> int:
        """Only requests of a priority above this start here: the others have no prompt tokens in
        this step, or the rank is held against them."""
        return max(self._held_above, self._builder.priority_floor)

    def option(
        self,
        request: Request,
        num_pages: int,
        cursor: PrefixCursor,
        num_unskewed: int,
        *,
        reads_host: bool,
    ) -> Option:
        """The cost of running `request` of `num_pages` pages here, with or without room for it;
        more requests than `num_unskewed` are too many. Unless it `reads_host`, the cost ignores the
        host's memory."""
        num_read = self.rank.reusable_len(request, cursor)
        leader = self.leader(request, cursor, num_read)
        if leader is not None:
            num_read = leader.length
        num_ahead = self._builder.num_prefill_tokens
        if self.num_running > num_unskewed:
            num_ahead += self.chunk_size * (self.num_running - num_unskewed)
        has_room = self._has_row and self.num_short(num_pages, cursor) <= 0
        if not (has_room and request.priority > self._held_above):
            num_ahead += self.chunk_size * self._steps_to_room()
        num_spared = 0
        if leader is None and reads_host:
            num_spared = self.rank.host.num_spared(request, num_read)
        cost = len(request.tokens) - num_read - num_spared + num_ahead
        fits = has_room and self.takes(request)
        return Option(cost, self.num_running, self.dp_rank, fits, leader)

    def leader(self, request: Request, cursor: PrefixCursor, num_read: int) -> Leader | None:
        """The row computing more of the request's tokens here than the `num_read` present, if worth
        the wait."""
        if not self._builder.is_prefilling:
            return None
        if self._in_flight is None:
            rows = self._builder.prefilling_rows()
            left = self._builder.num_tokens_left
            self._in_flight = InFlight(self.rank, rows, self.chunk_size, left)
        return self._in_flight.leader(request, cursor, num_read)

    def fetch(self, request: Request, cursor: PrefixCursor) -> tuple[int, int] | None:
        """Fetch the request's prefix from the host: `RankHost.fetch_for`."""
        num_read = self.rank.reusable_len(request, cursor)
        num_ahead = self._builder.num_prefill_tokens
        make_room = partial(self.rank.evict_sessions_for_prefix, cursor)
        found = self.rank.host.fetch_for(request, num_read, num_ahead, make_room)
        self._num_pages = None  # it may have taken some, and a row
        self._look()
        return found

    def hold(self, priority: int) -> None:
        """Start no more requests of this priority or a lower one here in this step."""
        self._held_above = max(self._held_above, priority)

    def release_hold(self) -> None:
        """Start requests of every priority again."""
        self._held_above = NO_FLOOR

    @property
    def preemptible(self) -> Preemptible:
        """The running requests here that others may preempt."""
        if self._preemptible is None:
            self._preemptible = Preemptible(self.rank, self._started)
        return self._preemptible

    def preemption(
        self, request: Request, cursor: PrefixCursor, threshold: int
    ) -> Preemption | None:
        """The rows that give way to `request`, of priorities lower by more than `threshold`; None
        if it cannot start here in this step even so."""
        if request.priority <= self.priority_floor or not self._builder.can_admit:
            return None
        return self.preemptible.choose(request, cursor, request.priority - threshold)

    def preempt(self, rows: Sequence[int]) -> None:
        """Retract `rows` for a request that starts here next."""
        for row in rows:
            self._builder.preempt(row)
        self._count()
        self._most_growth = NEVER  # without a bound: another request is the youngest now
        self._num_pages = self._num_reserved = self._in_flight = self._preemptible = None
        self._sorted_ends = None
        ends = self.rank.expected_steps_to_ends()
        self._soonest_end = int(ends.min()) if len(ends) else None
        self._look()

    def start(self, request: Request, cursor: PrefixCursor, *, may_preempt: bool) -> bool:
        """Start a request that fits.

        Returns whether others may start now that could not before, by preemption if any here
        `may_preempt`: it takes more pages than others can come to share with it, unless the
        forecast of the reserve has fallen.
        """
        was_ample = self._is_ample()
        may_preempt = may_preempt and not was_ample
        num_needed = self.rank.num_pages_needed(request, cursor)
        num_pages = self.num_pages - num_needed
        by_preemption = self.preemptible.most_pages - num_needed if may_preempt else None
        num_reserved = self._reserve_for(self.rank.num_pages_at_most(request))
        row = self._builder.admit(request, cursor, num_reserved)
        self._started.append(row)
        if self._is_counted:
            self._forecast.start(self.dp_rank, row)
        self._most_of_youngest = self.rank.memory.request_pages(request.max_len)
        self._most_growth += self._most_of_youngest
        self._num_reserved, self._num_pages = None, None
        self._preemptible = None
        self._sorted_ends = None
        end = self.rank.running.expected_steps_to_end(row)
        self._soonest_end = end if self._soonest_end is None else min(self._soonest_end, end)
        self._look()
        if self._in_flight is not None:
            self._in_flight.add(row)
        if was_ample or not (self.is_open or may_preempt):
            return False
        if self.num_pages > num_pages:
            return True
        # The reserve of the requests that a preemption leaves may fall alone.
        return by_preemption is not None and bool(
            (self.preemptible.most_pages > by_preemption).any()
        )

    def _steps_to_room(self) -> int:
        """Steps until so many requests have ended as wait for room, and one more."""
        if self._soonest_end is None:
            return 1
        if not self.num_staying:
            return self._soonest_end
        if self._sorted_ends is None:
            self._sorted_ends = np.sort(self.rank.expected_steps_to_ends())
        return int(self._sorted_ends[min(self.num_staying, len(self._sorted_ends) - 1)])

"""The capacity of each rank in the step being planned, and the cost of running a request there.

Costs are counted in prompt tokens, the unit of a step's budget. So recomputing a prefix cached on
another rank can be compared with waiting for room there.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.scheduler.admission.in_flight import InFlight, Leader
from sgl_jax.scheduler.forecast.capacity import (
    Rooms,
    steps_to_room,
    write_load,
    write_loads,
)
from sgl_jax.scheduler.forecast.fits import FULL_PART, NO_FLOOR, NO_LIMIT
from sgl_jax.scheduler.forecast.forecast import Forecast
from sgl_jax.scheduler.forecast.output_lengths import MOMENTS
from sgl_jax.scheduler.preemption import Preemptible, Preemption
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.step_builder import StepBuilder
from sgl_jax.scheduler.step_builders import StepBuilders
from sgl_jax.scheduler.waiting.waiting_queue import WaitingQueue


class Option(NamedTuple):
    """A rank that a request may run on. Options compare by cost, then by load, then by rank."""

    cost: int  # prompt tokens: to compute, ahead of it, and computed elsewhere while waiting
    is_full: bool  # whether most of its pages are forecast to be in use, at the peak
    num_running: int
    dp_rank: int
    fits: bool  # in this step
    num_read: int  # tokens present, or computed by the leader
    leader: Leader | None = None  # computes a part of the request's prefix


class RankCapacities(Sequence["RankCapacity"]):
    """The capacities of all ranks in the step of `builders`. Most ranks need no more than their
    records: the capacity of a rank is made when it is first read."""

    def __init__(self, ranks: Ranks, builders: StepBuilders, waiting: WaitingQueue) -> None:
        self.records = ranks.rooms()  # ROOM[ranks]
        self.in_flight = InFlight(builders, ranks.running.tokens)
        self.ranks, self.builders, self._waiting = ranks.ranks, builders, waiting
        self._forecast = ranks.forecast()
        self._made: dict[int, RankCapacity] = {}
        self._outlooks = ranks.outlooks()
        # In one list, in half the time of a list for each rank.
        each = [_load(rank, builders.find(rank.dp_rank)) for rank in self.ranks]
        loads = np.array([value for load in each for value in load])
        enough = self.ranks[0].most_request_pages
        self._is_counted = write_loads(self.records, loads, self._outlooks, enough)
        if np.count_nonzero(self._is_counted):
            self._forecast.add(*ranks.active(), self._is_counted)
            for dp_rank in self._is_counted.nonzero()[0].tolist():
                self._forecast.write(dp_rank, self.records[dp_rank : dp_rank + 1])

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def is_thrashing(self) -> bool:
        """Return whether most evicted prefixes return on all ranks (`working_set.py`)."""
        return all(rank.working_set.is_thrashing for rank in self.ranks)

    def __getitem__(self, dp_rank: int) -> "RankCapacity":  # type: ignore[override]
        made = self._made.get(dp_rank)
        if made is None:
            if not 0 <= dp_rank < len(self):
                raise IndexError(f"there are {len(self)} ranks, not one {dp_rank}")
            made = self._made[dp_rank] = RankCapacity(
                self.builders[dp_rank],
                self._waiting,
                self.in_flight,
                self._forecast,
                self.records,
                self._outlooks[dp_rank].tolist(),
                bool(self._is_counted[dp_rank]),
            )
        return made


def _load(
    rank: RankScheduler, builder: StepBuilder | None
) -> tuple[int, int, bool, bool, int, int, int]:
    """Return the row of a rank in the argument `loads` of `write_loads`."""
    num_running, num_left = len(rank.running), rank.memory.num_reclaimable_pages
    if builder is None:  # it only decodes
        return num_running, 0, rank.has_row, True, NO_FLOOR, NO_LIMIT, num_left
    num_ahead, floor = builder.num_prefill_tokens, builder.priority_floor
    can_admit, most_tokens = builder.can_admit, builder.most_tokens
    return num_running, num_ahead, rank.has_row, can_admit, floor, most_tokens, num_left


class RankCapacity:
    """The capacity of one rank in the step being planned.

    Args:
        builder: the rank's part of the step.
        waiting: the queue.
        in_flight: the prompts in flight of all ranks.
        forecast: the forecast of the ranks' needs.
        rooms: ROOM[ranks]; this rank's record is kept up to date.
        outlook: the rank's part of `Ranks.outlooks`.
        is_counted: whether the forecast has the rank's requests.
    """

    def __init__(
        self,
        builder: StepBuilder,
        waiting: WaitingQueue,
        in_flight: InFlight,
        forecast: Forecast,
        rooms: Rooms,
        outlook: Sequence[int],
        is_counted: bool,
    ) -> None:
        self.rank: RankScheduler = builder.rank
        self.dp_rank = builder.rank.dp_rank
        self.num_running = len(self.rank.running)
        self.num_staying = 0  # requests that wait for room here though other ranks have it
        self._staying_pages = 0  # that these take
        self.in_flight = in_flight
        self._builder = builder
        self._waiting = waiting
        self._forecast = forecast
        self._rooms = rooms
        self.chunk_size = builder.chunk_size
        soonest_end, self._most_growth = outlook  # upper bound
        self._soonest_end = None if soonest_end < 0 else soonest_end
        self._num_total = self.rank.memory.allocator.num_pages - 1
        self._started: list[int] = []  # rows
        # Computed when they are first read.
        self._sorted_ends: Int32Array | None = None
        self._preemptible: Preemptible | None = None
        self.is_counted = is_counted

    def _update(self) -> None:
        """Compute the rank's load and pages, which change only as requests start or leave here."""
        rank, builder, self.num_running = self.rank, self._builder, len(self.rank.running)
        needs_forecast = write_load(
            self._rooms,
            self.dp_rank,
            self.num_running,
            builder.num_prefill_tokens,
            rank.has_row,
            1 if self._soonest_end is None else self._soonest_end,
            builder.can_admit,
            builder.priority_floor,
            builder.most_tokens,
            rank.memory.num_reclaimable_pages,
            self._most_growth,
            NO_LIMIT if self.is_counted else rank.most_request_pages,
        )
        if not needs_forecast:
            return
        if not self.is_counted:
            self._forecast.recount(self.dp_rank, rank.running.active)
            self.is_counted = True
        self._forecast.write(self.dp_rank, self._rooms[self.dp_rank : self.dp_rank + 1])

    @property
    def num_free(self) -> int:
        """Return the pages that no running request holds, or needs for its known tokens."""
        return self._num_total - int(self._rooms["pages"].item(self.dp_rank, 0))

    def pages_short(self, request: Request, num_pages: int) -> int:
        """Return the pages that `request` lacks if it takes `num_pages` here; <= 0 if none."""
        return self._waiting.pages_short(request, self._rooms, self.dp_rank, num_pages)

    @property
    def open_tenants(self) -> BoolArray | None:
        """Return, by number, the tenants with a next prompt that gets tokens at any length."""
        return self._builder.open_tenants

    def after_wait(self, request: Request, option: Option) -> Option:
        """Return the cost of running a request here once it has room. In `option`, it does not fit
        now, and the cost includes no wait."""
        cursor = self._waiting.cursor(request, self.dp_rank)
        num_pages = self.rank.num_pages_at_most(request)
        short = self.pages_short(request, num_pages)
        # Usually there are enough pages, however much of its prefix is in use.
        if short > 0 and (num_in_use := self.rank.memory.num_pages_in_use(cursor)):
            num_pages -= num_in_use
            short = self.pages_short(request, num_pages)
        cost = option.cost
        if not self.rank.has_row or short > 0:
            cost += self.chunk_size * self._steps_to_room(num_pages)
        peak = self._rooms["peak"].item(self.dp_rank)
        num_at_peak = self._rooms["pages"].item(self.dp_rank, peak) + num_pages
        return option._replace(cost=cost, is_full=num_at_peak > FULL_PART * self._num_total)

    def fetch(self, request: Request, cursor: PrefixCursor) -> tuple[int, int] | None:
        """Fetch the request's prefix from the host if faster; return its row and length."""
        num_read = self.rank.reusable_len(request, cursor)
        num_ahead = self._builder.num_prefill_tokens
        make_room = partial(self.rank.idle_sessions.evict_for_prefix, cursor)
        found = self.rank.host.fetch_for(request, num_read, num_ahead, make_room)
        self._update()  # it may have taken pages, and a row
        return found

    def stay(self, num_pages: int) -> None:
        """Count a request that takes `num_pages` and waits here though other ranks have room."""
        self.num_staying += 1
        self._staying_pages += num_pages

    def steps_to_room(self, num_pages: int) -> int:
        """Return the steps until the forecast leaves `num_pages`; 0 if it does now."""
        return int(steps_to_room(self._rooms, self.dp_rank, num_pages, MOMENTS))

    def hold(self, request: Request, num_pages: int, num_steps: int) -> None:
        """Hold the rank for `request`, which takes `num_pages` to start, in `num_steps`. Requests
        of its priority or lower start here only if they leave it enough."""
        self._waiting.hold(request, self._rooms, self.dp_rank, num_pages, num_steps)

    @property
    def is_held(self) -> bool:
        return bool(self._rooms["held_above"][self.dp_rank] > NO_FLOOR)

    @property
    def preemptible(self) -> Preemptible:
        """Return the running requests here that may be preempted."""
        if self._preemptible is None:
            own = self._rooms[self.dp_rank : self.dp_rank + 1]
            self._preemptible = Preemptible(self.rank, self._started, self._forecast, own)
        return self._preemptible

    def preemption(self, request: Request, threshold: int) -> Preemption | None:
        """Return the rows to retract for `request`, of priorities lower by more than `threshold`;
        None if it cannot start here in this step even so."""
        cursor = self._waiting.cursor(request, self.dp_rank)
        num_tokens = len(request.tokens) - self.rank.reusable_len(request, cursor)
        has_tokens = self._builder.takes(request.priority, request.tenant, num_tokens)
        if not has_tokens or not self._builder.can_admit:
            return None

        def fits(room: Rooms, num_pages: int) -> bool:
            return self._waiting.pages_short(request, room, 0, num_pages) <= 0

        return self.preemptible.choose(request, cursor, request.priority - threshold, fits)

    def preempt(self, rows: Sequence[int]) -> None:
        """Retract `rows` for a request that starts here next."""
        for row in rows:
            self._builder.preempt(row)
        self._most_growth = self.rank.memory.allocator.num_pages  # without a bound
        self.in_flight.list_again(self.dp_rank)
        ends = self.rank.columns.expected_steps_to_ends(self.rank.running.active)
        self._soonest_end = int(ends.min()) if len(ends) else None
        self.is_counted = False
        self._update()

    def start(self, request: Request, cursor: PrefixCursor) -> None:
        row = self._builder.admit(request, cursor)
        self._started.append(row)
        if self.is_counted:
            self._forecast.start(self.dp_rank, row)
        self._most_growth += self.rank.memory.request_pages(request.max_kv_len)
        self._preemptible = self._sorted_ends = None
        end = (request.max_len - len(request.tokens)) // 2  # `expected_steps_to_ends`
        self._soonest_end = end if self._soonest_end is None else min(self._soonest_end, end)
        self._update()
        self.in_flight.add(self.dp_rank, row)

    def _steps_to_room(self, num_pages: int) -> int:
        """Return the steps until the rank has rows and pages for the requests deferred to it, and
        for one more that takes `num_pages`."""
        num_steps = self.steps_to_room(num_pages + self._staying_pages)
        last = self.num_staying - self.rank.num_rows_left  # of the ends that leave a row
        if last < 0 or self._soonest_end is None:
            return max(num_steps, 1)
        if self._sorted_ends is None:
            self._sorted_ends = np.sort(
                self.rank.columns.expected_steps_to_ends(self.rank.running.active)
            )
        last = min(last, len(self._sorted_ends) - 1)
        return max(num_steps, int(self._sorted_ends[last]))

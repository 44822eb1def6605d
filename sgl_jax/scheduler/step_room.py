"""What each rank can still take in the step being planned, and what it costs to run there.

Costs are counted in prompt tokens, the work that a step has a budget of. So "computing again what
another rank has cached" and "waiting there until it has room" can be held against each other.
"""

from functools import cached_property
from typing import NamedTuple

from sgl_jax.mem_cache.prefix_cursor import PrefixCursor
from sgl_jax.scheduler.in_flight import InFlight, Leader
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.step_planner import StepDraft

# A prefix in flight is worth waiting for from this share of a step's prompt tokens on.
_MIN_SHARED_PART = 8


class Option(NamedTuple):
    """A rank that a request may run on. Options compare by cost, then by load, then by rank."""

    cost: int  # prompt tokens: to compute, ahead of them, and computed elsewhere while waiting
    num_running: int
    dp_rank: int
    fits: bool  # in this step
    leader: Leader | None = None  # that computes a part of the request's prefix


class RankRoom:
    """What one rank can take.

    Args:
        draft: the rank's share of the step.
        chunk_size: prompt tokens of a step.
    """

    def __init__(self, draft: StepDraft, chunk_size: int) -> None:
        self.rank: RankScheduler = draft.rank
        self.num_staying = 0  # requests that are to wait for room here though others have it
        self._draft = draft
        self._chunk_size = chunk_size
        self._is_held = False
        self._look()

    def _look(self) -> None:
        """What the rank can take, and how busy it is: changes only as requests start here."""
        self.num_running = len(self.rank.running)
        self._has_row = self.rank.has_row
        # Whether the step takes another request here, if that fits.
        self.is_open = self._draft.can_admit and self._has_row and not self._is_held
        self._num_pages: int | None = None

    @property
    def num_pages(self) -> int:
        """Pages that another request may take: the reserve of those that run is left out."""
        if self._num_pages is None:
            self._num_pages = self.rank.memory.num_reclaimable_pages - self._num_reserved
        return self._num_pages

    @cached_property
    def _num_reserved(self) -> int:
        return self.rank.reserve.pages(self.rank.memory, self.rank.running)

    def num_short(self, request: Request, cursor: PrefixCursor) -> int:
        """Pages that `request` lacks here; not above 0 if it has enough."""
        return self.rank.num_pages_needed(request, cursor) - self.num_pages

    def fits(self, request: Request, cursor: PrefixCursor) -> bool:
        """Whether `request` can start here in this step."""
        return self.is_open and self.num_short(request, cursor) <= 0

    def option(
        self, request: Request, cursor: PrefixCursor, num_unskewed: int, *, fits: bool
    ) -> Option:
        """What it costs to run `request` here, where more than `num_unskewed` are too many.

        `fits` is what the method of that name says.
        """
        rank = self.rank
        may_fit_next = not self.is_open and self._has_row and not self._is_held
        has_room = fits or (may_fit_next and self.num_short(request, cursor) <= 0)
        num_read, leader = rank.reusable_len(request, cursor), self.leader(request, cursor)
        if leader is not None and leader.length > num_read:
            num_read = leader.length
        else:
            leader = None
        num_excess = max(self.num_running - num_unskewed, 0)
        num_ahead = self._draft.num_prefill_tokens + self._chunk_size * num_excess
        if not has_room:
            num_ahead += self._chunk_size * self._steps_to_room()
        cost = len(request.tokens) - num_read + num_ahead
        return Option(cost, self.num_running, rank.dp_rank, fits, leader)

    def leader(self, request: Request, cursor: PrefixCursor) -> Leader | None:
        """Who computes more of the request's tokens here than the tree has."""
        return self._in_flight.leader(request, cursor)

    def hold(self) -> None:
        """Nothing more starts here in this step."""
        self._is_held = True
        self.is_open = False

    def start(self, request: Request, cursor: PrefixCursor) -> None:
        """Start a request that fits."""
        row = self._draft.admit(request, cursor, self._num_reserved)
        # The reserve of the others is as it was.
        self._num_reserved += self.rank.reserve.pages_of(row, self.rank.memory, self.rank.running)
        self._look()
        if "_in_flight" in self.__dict__:
            self._in_flight.add(row)

    @cached_property
    def _in_flight(self) -> InFlight:
        return InFlight(self.rank, self._chunk_size // _MIN_SHARED_PART)

    @cached_property
    def _steps_to_ends(self) -> list[int]:
        return self.rank.expected_steps_to_ends()

    def _steps_to_room(self) -> int:
        """Steps until so many requests have ended as wait for room, and one more."""
        ends = self._steps_to_ends
        return ends[min(self.num_staying, len(ends) - 1)] if ends else 1

"""Finds requests past their time limits, by the scheduler's ticks.

Owns each request's arrival time, which is the time of the last tick before it. Must never read a
clock: several hosts, and a replay, must reach the same result.
"""

import math
from collections import OrderedDict
from itertools import islice
from typing import NamedTuple


class Expired(NamedTuple):
    """Ids of requests past a limit, oldest first; a request may be in both lists."""

    to_start: list[str]  # end these only if they have not started yet
    to_finish: list[str]


class Deadlines:
    """The arrival times of requests, in order. A limit of 0 s disables the check."""

    def __init__(self, waiting_timeout_s: float, request_timeout_s: float) -> None:
        self.set_limits(waiting_timeout_s, request_timeout_s)
        self._now_s: float | None = None  # until the first tick
        # rid -> arrival, oldest first; no entry once the limit has passed. (A plain dictionary
        # finds its first entry slowly after many removals at its start.)
        self._to_start: OrderedDict[str, float] = OrderedDict()
        self._to_finish: OrderedDict[str, float] = OrderedDict()

    @property
    def now_s(self) -> float:
        """Return the time of the last tick in seconds; 0 before the first tick."""
        return self._now_s or 0.0

    def set_limits(self, waiting_timeout_s: float, request_timeout_s: float) -> None:
        """Set both limits in seconds, also for current requests."""
        self._waiting_timeout_s = waiting_timeout_s or math.inf
        self._request_timeout_s = request_timeout_s or math.inf

    def add(self, rid: str) -> None:
        """Record a request's arrival at the time of the last tick, or else of the first."""
        self._to_start[rid] = self._to_finish[rid] = self._now_s or 0.0

    def forget(self, rid: str) -> None:
        self._to_start.pop(rid, None)
        self._to_finish.pop(rid, None)

    def needs_tick(self, now_s: float) -> bool:
        """Return whether a tick would do more than advance the time."""
        if self._now_s is None:
            has_limit = min(self._waiting_timeout_s, self._request_timeout_s) < math.inf
            return has_limit and bool(self._to_finish)
        return any(
            next(iter(arrivals.values()), now_s) < now_s - timeout_s
            for arrivals, timeout_s in (
                (self._to_start, self._waiting_timeout_s),
                (self._to_finish, self._request_timeout_s),
            )
        )

    def tick(self, now_s: float, most: int) -> Expired:
        """Advance the time to `now_s`, never backward; return up to `most` expired requests, each
        once. If more are left, another tick is needed."""
        if self._now_s is None:
            self._to_start = OrderedDict.fromkeys(self._to_start, now_s)
            self._to_finish = OrderedDict.fromkeys(self._to_finish, now_s)
            self._now_s = now_s
        self._now_s = max(self._now_s, now_s)
        to_finish = _pop_before(self._to_finish, self._now_s - self._request_timeout_s, most)
        most -= len(to_finish)
        to_start = _pop_before(self._to_start, self._now_s - self._waiting_timeout_s, most)
        return Expired(to_start, to_finish)


def _pop_before(arrivals: OrderedDict[str, float], limit_s: float, most: int) -> list[str]:
    expired = []
    for rid, arrived_s in islice(arrivals.items(), most):
        if arrived_s >= limit_s:
            break
        expired.append(rid)
    for rid in expired:
        del arrivals[rid]
    return expired

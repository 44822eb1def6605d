"""Requests that hold no memory, and the order in which they get some.

Retracted requests come first, oldest first: they have output to lose. Then `fcfs` is order of
arrival, `lpm` the longest cached prefix (ties by arrival).
"""

from collections.abc import Callable, Iterator
from itertools import islice

from sgl_jax.scheduler.request import Request

# Beyond this many waiting requests `lpm` ranks only the oldest: looking up all would cost more
# host time than a better order saves.
MAX_RANKED = 128


class WaitingQueue:
    """The queue; `cached_len(request)` says how much of a request some rank has cached."""

    def __init__(self, policy: str, cached_len: Callable[[Request], int]) -> None:
        self._policy = policy
        self._cached_len = cached_len
        self._requests: dict[str, Request] = {}  # by rid, in order of arrival
        self._retracted: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests) + len(self._retracted)

    def __iter__(self) -> Iterator[Request]:
        yield from self._retracted.values()
        yield from self._requests.values()

    def add(self, request: Request) -> None:
        """Append a new request, or put a retracted one back in front."""
        queue = self._retracted if request.num_retractions else self._requests
        queue[request.rid] = request

    def remove(self, request: Request) -> None:
        """Take a request out; it must be waiting."""
        queue = self._retracted if request.num_retractions else self._requests
        del queue[request.rid]

    def ordered(self) -> list[Request]:
        """The requests to try next, first to last: at most `MAX_RANKED` of the new ones."""
        retracted = sorted(self._retracted.values(), key=lambda request: request.arrival)
        fresh = list(islice(self._requests.values(), MAX_RANKED))
        if self._policy == "lpm" and len(fresh) > 1:
            fresh.sort(key=lambda request: (-self._cached_len(request), request.arrival))
        return retracted + fresh

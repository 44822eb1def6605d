"""Requests that hold no memory, and the order in which they get some.

Retracted requests come first, oldest first: they have output to lose. Then `fcfs` is order of
arrival, `lpm` the longest cached prefix (ties by arrival), though nobody is passed over forever.
"""

from collections.abc import Callable, Collection, Iterator
from itertools import islice

from sgl_jax.scheduler.request import Request

# `lpm` ranks only so many of the oldest as this many lookups allow, one for each request and
# rank: looking up all would cost more host time than a better order saves.
MAX_LOOKUPS = 256
# After this many younger requests were served before the oldest, it is the oldest's turn.
MAX_PASSED_OVER = 128


class WaitingQueue:
    """The queue; `cached_len(request)` says how much of a request some rank has cached."""

    def __init__(self, policy: str, dp_size: int, cached_len: Callable[[Request], int]) -> None:
        self._policy = policy
        self._max_ranked = max(MAX_LOOKUPS // dp_size, 1)
        self._cached_len = cached_len
        self._requests: dict[str, Request] = {}  # by rid, in order of arrival
        self._retracted: dict[str, Request] = {}
        self._times_passed_over = 0  # the oldest of `_requests`

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
        if request.num_retractions:
            del self._retracted[request.rid]
            return
        is_oldest = request is next(iter(self._requests.values()))
        self._times_passed_over = 0 if is_oldest else self._times_passed_over + 1
        del self._requests[request.rid]

    def clear(self) -> None:
        """Forget all."""
        self._requests.clear()
        self._retracted.clear()
        self._times_passed_over = 0

    def ordered(self, open_ranks: Collection[int]) -> list[Request]:
        """The requests to try next, first to last: a limited number of the new ones.

        Only those that some rank of `open_ranks` may serve: requests pinned to a rank that is
        full do not hold up the rest.
        """
        retracted = sorted(self._retracted.values(), key=lambda request: request.arrival)
        allowed = {None, *open_ranks}
        eligible = (request for request in self._requests.values() if request.dp_rank in allowed)
        fresh = list(islice(eligible, self._max_ranked))
        if self._policy == "lpm" and len(fresh) > 1:
            due = 1 if self._times_passed_over >= MAX_PASSED_OVER else 0
            fresh[due:] = sorted(fresh[due:], key=lambda r: (-self._cached_len(r), r.arrival))
        return retracted + fresh

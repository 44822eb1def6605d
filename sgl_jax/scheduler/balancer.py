"""Which data-parallel rank gets a request.

`prefix_aware`: the rank with the longest cached prefix, unless it is busier than the least busy
one by more than the skew bound. `round_robin`: in turn.
"""

from typing import NamedTuple

# A rank may run this many requests more than the least busy one, or this share of them more,
# before cached prefixes stop drawing requests to it.
MAX_SKEW_REQUESTS = 4
MAX_SKEW_SHARE = 0.25


class Candidate(NamedTuple):
    """A rank that has room for the request."""

    dp_rank: int
    num_requests: int  # running there now
    cached_len: int  # tokens of the request it has cached, if that is used


class Balancer:
    """Chooses among candidates; `method` is prefix_aware or round_robin."""

    def __init__(self, method: str, dp_size: int) -> None:
        self._method = method
        self._dp_size = dp_size
        self._next_rank = 0

    @property
    def uses_cached_len(self) -> bool:
        """Whether it looks at what candidates have cached."""
        return self._method == "prefix_aware"

    def choose(self, candidates: list[Candidate]) -> int:
        """The data-parallel rank of one of `candidates` (at least one)."""
        if self._method == "round_robin":
            chosen = min(candidates, key=lambda c: (c.dp_rank - self._next_rank) % self._dp_size)
            self._next_rank = (chosen.dp_rank + 1) % self._dp_size
            return chosen.dp_rank
        least = min(candidate.num_requests for candidate in candidates)
        bound = least + max(MAX_SKEW_REQUESTS, MAX_SKEW_SHARE * least)
        allowed = [candidate for candidate in candidates if candidate.num_requests <= bound]
        return min(allowed, key=lambda c: (-c.cached_len, c.num_requests, c.dp_rank)).dp_rank

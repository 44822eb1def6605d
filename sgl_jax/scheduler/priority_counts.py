"""The priorities of a set of requests, so that the extremes are known without a look at each."""


class PriorityCounts:
    """How many requests have each priority; costs as many operations as there are priorities."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, priority: int) -> None:
        """A request joins."""
        self._counts[priority] = self._counts.get(priority, 0) + 1

    def remove(self, priority: int) -> None:
        """A request leaves."""
        if self._counts[priority] > 1:
            self._counts[priority] -= 1
        else:
            del self._counts[priority]

    @property
    def differ(self) -> bool:
        """Whether not all are equal."""
        return len(self._counts) > 1

    @property
    def highest(self) -> int:
        """Of at least one request."""
        return max(self._counts)

    def has_below(self, priority: int) -> bool:
        """Whether a request has a lower one than that."""
        return bool(self._counts) and min(self._counts) < priority

"""The priorities of a set of requests, so that the extremes are known without a look at each."""


class PriorityCounts:
    """How many requests have each priority. Only when the last one of an extreme leaves, the next
    is looked for among the priorities that are left.

    `lowest` and `highest` are None while there is no request.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.lowest: int | None = None
        self.highest: int | None = None

    def add(self, priority: int) -> None:
        """A request joins."""
        count = self._counts.get(priority, 0)
        self._counts[priority] = count + 1
        if not count:
            self._find_extremes()

    def remove(self, priority: int) -> None:
        """A request leaves."""
        self._counts[priority] -= 1
        if not self._counts[priority]:
            del self._counts[priority]
            self._find_extremes()

    def _find_extremes(self) -> None:
        self.lowest = min(self._counts, default=None)
        self.highest = max(self._counts, default=None)

    @property
    def differ(self) -> bool:
        """Whether not all are equal."""
        return len(self._counts) > 1

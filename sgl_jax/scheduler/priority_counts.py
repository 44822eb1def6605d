"""Counts the priorities of a set of requests, to find its lowest and highest without a scan."""


class PriorityCounts:
    """The number of requests of each priority. The priorities are scanned only when one appears or
    disappears. `lowest` and `highest` are None without requests."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.lowest: int | None = None
        self.highest: int | None = None

    def add(self, priority: int) -> None:
        count = self._counts.get(priority, 0)
        self._counts[priority] = count + 1
        if not count:
            self._find_extremes()

    def remove(self, priority: int) -> None:
        self._counts[priority] -= 1
        if not self._counts[priority]:
            del self._counts[priority]
            self._find_extremes()

    def _find_extremes(self) -> None:
        self.lowest = min(self._counts, default=None)
        self.highest = max(self._counts, default=None)

    @property
    def differ(self) -> bool:
        return len(self._counts) > 1

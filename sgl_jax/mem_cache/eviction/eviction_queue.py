"""A set of evictable items, oldest first."""

import heapq
from typing import Generic, Protocol, TypeVar

from sgl_jax.mem_cache.errors import LedgerError


class Aged(Protocol):
    """An item of the queue: `last_access` may change only through `EvictionQueue.add`."""

    last_access: int
    node_id: int


T = TypeVar("T", bound=Aged)


class EvictionQueue(Generic[T]):
    """A set that finds its oldest item, by the clock of its last use and its id, in O(log n).

    It is a heap with lazy deletion: an entry counts only if its item is a member and still has the
    age of the entry. Stale entries are removed once they outnumber the members.
    """

    def __init__(self) -> None:
        self._members: dict[int, T] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, item: T) -> bool:
        return item.node_id in self._members

    def add(self, item: T) -> None:
        """Add `item` at its present age. Call this again after each change of age."""
        self._members[item.node_id] = item
        heapq.heappush(self._heap, (item.last_access, item.node_id))
        if len(self._heap) > 64 + 2 * len(self._members):
            self._heap = [(item.last_access, key) for key, item in self._members.items()]
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        self._members.pop(item.node_id, None)

    def oldest(self) -> T | None:
        """Return the least recently used member, without removing it; None if the set is empty."""
        while self._heap:
            age, node_id = self._heap[0]
            item = self._members.get(node_id)
            if item is not None and item.last_access == age:
                return item
            heapq.heappop(self._heap)
        return None

    def clear(self) -> None:
        self._members.clear()
        self._heap.clear()

    def audit(self) -> None:
        """Raise `LedgerError` if a member is not listed at its present age."""
        listed = set(self._heap)
        for key, item in self._members.items():
            if (item.last_access, key) not in listed:
                raise LedgerError(f"the eviction queue does not list {item!r} at its age")

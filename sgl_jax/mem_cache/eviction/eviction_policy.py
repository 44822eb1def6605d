"""The order in which the prefix tree evicts leaves: least recently used, or a subclass's order.

A policy decides only the order: matches depend only on tokens, and locked pages stay in every state
of the policy.

Ages use the tree's logical clock, never wall time, so that all hosts evict in the same order.
"""

import heapq
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.path_records import PathEnd
from sgl_jax.mem_cache.tree_node import TreeNode

EVICTION_POLICIES = ("adaptive", "lru")


class Aged(Protocol):
    """An item of the queue: `last_access` may change only through `EvictionQueue.add`."""

    last_access: int
    node_id: int


T = TypeVar("T", bound=Aged)


class EvictionQueue(Generic[T]):
    """A set that finds its oldest item, by the clock of its last use and its id, in O(log n).

    It is a heap with lazy deletion: an entry counts only if its item is a member and still has the
    age of the entry. Stale entries are removed once they outnumber the members. `members`, by id,
    is for reading only.
    """

    def __init__(self) -> None:
        self.members: dict[int, T] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, item: T) -> bool:
        return item.node_id in self.members

    def add(self, item: T) -> None:
        """Add `item` at its present age. Call this again after each change of age."""
        self.members[item.node_id] = item
        heapq.heappush(self._heap, (item.last_access, item.node_id))
        if len(self._heap) > 64 + 2 * len(self.members):
            self._heap = [(item.last_access, key) for key, item in self.members.items()]
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        self.members.pop(item.node_id, None)

    def oldest(self) -> T | None:
        """Return the least recently used member, without removing it; None if the set is empty."""
        while self._heap:
            age, node_id = self._heap[0]
            item = self.members.get(node_id)
            if item is not None and item.last_access == age:
                return item
            heapq.heappop(self._heap)
        return None

    def clear(self) -> None:
        self.members.clear()
        self._heap.clear()

    def audit(self) -> None:
        """Raise `LedgerError` if a member is not listed at its present age."""
        listed = set(self._heap)
        for key, item in self.members.items():
            if (item.last_access, key) not in listed:
                raise LedgerError(f"the eviction queue does not list {item!r} at its age")


class UseRun(NamedTuple):
    """Consecutive tokens of a new edge (whole pages), and the number of their earlier uses."""

    num_tokens: int
    num_uses: int


class EvictionPolicy:
    """A set of evictable leaves, least recently used first. Subclasses record uses.

    A node is in the set, at its present `last_access` and `num_uses`, exactly if the component's
    last call for it was `add`, not `discard`. `audit` verifies this invariant.
    """

    now_s = 0.0  # seconds from any origin, set by the caller
    num_returned = 0  # pages that were evicted and used again while remembered

    def __init__(self, num_classes: int = 1) -> None:
        """Create a queue by age for each class: each number of uses below `num_classes`."""
        self._queues: list[EvictionQueue[TreeNode]] = [EvictionQueue() for _ in range(num_classes)]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._queues[node.num_uses]

    def add(self, node: TreeNode) -> None:
        """Make `node` evictable at its present age; call again when `last_access` changes."""
        self._queues[node.num_uses].add(node)

    def discard(self, node: TreeNode) -> None:
        self._queues[node.num_uses].discard(node)

    @property
    def num_classes(self) -> int:
        """Return the upper bound, exclusive, of all `num_uses`."""
        return len(self._queues)

    def next_victim(self, now: int) -> TreeNode | None:
        """Return the first leaf to evict, without removing it; None if the set is empty."""
        return self._queues[0].oldest()

    def expected_pause_s(self, node: TreeNode) -> float | None:
        """Return how long after its last use the node is expected back; None if that does not
        order the evictions."""
        return None

    @property
    def retained_pages(self) -> dict[str, int]:
        """Return the numbers of pages evicted in place of retained ones, and of retained pages
        evicted, by name."""
        return {"retained_pages_exchanged": 0, "retained_pages_evicted": 0}

    def num_kept(self, leaf: TreeNode) -> int:
        """Return the pages of the next victim's edge to keep until another leaf is chosen."""
        return 0

    def rate(self, num_uses: int, last_access: int, now: int) -> float:
        """Return the expected rate of use at this number of uses and age, for comparison only."""
        return 1.0 / (now - last_access + 1)

    def begin(self, node: TreeNode) -> list[UseRun]:
        """Return the earlier uses of the tokens of a new edge, before it is in the set.

        The runs, at least one, cover the edge from the top down. Set `node.num_uses` to the value
        of the last run. The tree splits the edge so that each node has one number.
        """
        return [UseRun(len(node.key), 0)]

    def use(self, node: TreeNode, now: int) -> None:
        """Record a use of `node` by a request, before `last_access` is updated."""

    def ended(self, path: Sequence[TreeNode], num_prompt: int, end: PathEnd) -> None:
        """Record the end of an answer: `path`, from the root and still locked, has its prompt of
        `num_prompt` whole pages, and what follows."""

    def drop(self, leaf: TreeNode, keep_tokens: int, now: int) -> None:
        """Record that `leaf` is about to lose its edge's tokens past the first `keep_tokens`."""

    def clear(self) -> None:
        for queue in self._queues:
            queue.clear()

    def audit(self) -> None:
        for queue in self._queues:
            queue.audit()

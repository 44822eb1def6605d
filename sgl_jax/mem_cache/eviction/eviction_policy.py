"""The order in which the prefix tree evicts leaves: least recently used, or a subclass's.

The tree reports each use and each eviction to its policy. The FULL component reports which leaves
are evictable, and requests the next victim. A policy decides the order and nothing else: matches
depend on tokens alone, and locked pages stay in every state of the policy.

Ages use the tree's logical clock, never wall time, so that hosts evict alike.
"""

from typing import NamedTuple

from sgl_jax.mem_cache.eviction.eviction_queue import EvictionQueue
from sgl_jax.mem_cache.tree_node import TreeNode

EVICTION_POLICIES = ("adaptive", "lru")


class UseRun(NamedTuple):
    """Consecutive tokens of a new edge (whole pages), and the number of their earlier uses."""

    num_tokens: int
    num_uses: int


class EvictionPolicy:
    """A set of evictable leaves, least recently used first; subclasses record their use.

    Between any two calls, and proved by `audit`: a node is in the set, at its present `last_access`
    and `num_uses`, exactly if the component's last call for it was `add`, not `discard`.
    """

    def __init__(self, num_classes: int = 1) -> None:
        """`num_uses` of all nodes is below `num_classes`; each has a queue by age."""
        self._queues: list[EvictionQueue[TreeNode]] = [EvictionQueue() for _ in range(num_classes)]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._queues[node.num_uses]

    def add(self, node: TreeNode) -> None:
        """Make `node` evictable at its present age; called again after each change of
        `last_access`."""
        self._queues[node.num_uses].add(node)

    def discard(self, node: TreeNode) -> None:
        self._queues[node.num_uses].discard(node)

    @property
    def num_classes(self) -> int:
        """All `num_uses` are below it."""
        return len(self._queues)

    def next_victim(self, now: int) -> TreeNode | None:
        """The first leaf to evict; None if there is none. It stays in the set."""
        return self._queues[0].oldest()

    def num_kept(self, leaf: TreeNode) -> int:
        """Pages of the next victim's edge that stay until another leaf has been chosen."""
        return 0

    def rate(self, num_uses: int, last_access: int, now: int) -> float:
        """The expected rate of use at this number of uses and age, for comparison only."""
        return 1.0 / (now - last_access + 1)

    def begin(self, node: TreeNode) -> list[UseRun]:
        """Return the earlier uses of the tokens of a new edge, which is not in the set yet.

        Returns at least one run, from the top, together the whole edge; `node.num_uses` becomes the
        last run's. The tree splits the edge so that each node has one number.
        """
        return [UseRun(len(node.key), 0)]

    def use(self, node: TreeNode, now: int) -> None:
        """A request uses `node`; `last_access` still holds the previous use."""

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower`'s edge lost its first `upper.end - start` tokens to the new `upper`."""

    def drop(self, leaf: TreeNode, keep_tokens: int, now: int) -> None:
        """`leaf` is about to lose the tokens past `keep_tokens` of its edge."""

    def clear(self) -> None:
        for queue in self._queues:
            queue.clear()

    def audit(self) -> None:
        """Prove that every member is listed at its age; raise `LedgerError` if not."""
        for queue in self._queues:
            queue.audit()

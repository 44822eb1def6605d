"""In which order the prefix tree lets go of its leaves: the contract, and least recently used.

The tree reports each use and each eviction to its policy; the FULL component reports which leaves
are evictable, and asks for the next. A policy decides the order and nothing else: a prefix is found
by its tokens, and what is locked stays, independent of the policy's state.

Ages are of the tree's logical clock, never wall time, so that hosts evict alike.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from sgl_jax.mem_cache.eviction_queue import EvictionQueue
from sgl_jax.mem_cache.tree_node import TreeNode

EVICTION_POLICIES = ("adaptive", "lru")


class UseRun(NamedTuple):
    """Consecutive tokens of a new edge (whole pages), and how often they were used before."""

    num_tokens: int
    num_uses: int


class EvictionPolicy(ABC):
    """A set of leaves that may go, in queues, and what a subclass knows of how they were used.

    What holds between any two calls, and `audit` proves: a node is in the set, at its present
    `last_access` and `num_uses`, exactly if the component last said so by `add` or `discard`.
    """

    def __init__(self, num_classes: int) -> None:
        """`num_uses` of all nodes is below `num_classes`: a queue for each, by age."""
        self._queues: list[EvictionQueue[TreeNode]] = [EvictionQueue() for _ in range(num_classes)]

    def __len__(self) -> int:
        """Leaves that may go."""
        return sum(map(len, self._queues))

    def __contains__(self, node: TreeNode) -> bool:
        """Whether `node` may go."""
        return node in self._queues[node.num_uses]

    def add(self, node: TreeNode) -> None:
        """`node` may go, at the age it has now; called again whenever its `last_access` changed."""
        self._queues[node.num_uses].add(node)

    def discard(self, node: TreeNode) -> None:
        """`node` may not go, or no more."""
        self._queues[node.num_uses].discard(node)

    @property
    def num_classes(self) -> int:
        """All `num_uses` are below it."""
        return len(self._queues)

    @abstractmethod
    def next_victim(self, now: int) -> TreeNode | None:
        """The leaf to take from first; None if none may go. It stays in the set."""

    def num_kept(self, leaf: TreeNode) -> int:
        """Pages of the next victim's edge that stay until another leaf has been chosen."""
        return 0

    @abstractmethod
    def rate(self, num_uses: int, last_access: int, now: int) -> float:
        """How likely something of so many uses and this age is to be used, to compare by."""

    @abstractmethod
    def begin(self, node: TreeNode) -> list[UseRun]:
        """A new edge is on the tree, not in the set yet: how often its tokens were used before.

        Answers at least one run, from the top, together the whole edge; `node.num_uses` becomes
        that of the last. The tree splits the edge so that each node has one number.
        """

    @abstractmethod
    def use(self, node: TreeNode, now: int) -> None:
        """A request found `node` on its path; `last_access` still says when it was used before."""

    @abstractmethod
    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower`'s edge lost its first `upper.end - start` tokens to the new `upper`."""

    @abstractmethod
    def merge(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower`'s edge is about to take over that of `upper`, in front; `num_uses` is equal."""

    @abstractmethod
    def drop(self, leaf: TreeNode, keep_tokens: int, now: int) -> None:
        """`leaf` is about to lose what lies past `keep_tokens` of its edge."""

    def clear(self) -> None:
        """Forget everything, members included."""
        for queue in self._queues:
            queue.clear()

    def audit(self) -> None:
        """Prove that every member is listed at its age; raise `LedgerError` if not."""
        for queue in self._queues:
            queue.audit()


class LruPolicy(EvictionPolicy):
    """Least recently used first; `num_uses` stays 0."""

    def __init__(self) -> None:
        super().__init__(num_classes=1)

    def next_victim(self, now: int) -> TreeNode | None:
        return self._queues[0].oldest()

    def rate(self, num_uses: int, last_access: int, now: int) -> float:
        """The younger, the higher."""
        return 1.0 / (now - last_access + 1)

    def begin(self, node: TreeNode) -> list[UseRun]:
        return [UseRun(len(node.key), 0)]

    def use(self, node: TreeNode, now: int) -> None:
        """The node's age alone counts."""

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Both have their age."""

    def merge(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower` has its age."""

    def drop(self, leaf: TreeNode, keep_tokens: int, now: int) -> None:
        """What is gone is not remembered."""

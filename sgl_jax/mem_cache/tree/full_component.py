"""Full attention on the prefix tree: every token of an edge has its KV, in pages.

A node's value is the int32 array of its edge's pages. A lock holds the whole path from the root,
because attention reads every earlier token. So lock counts never grow downwards, and unlocked pages
can always be freed from the leaves up.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.eviction_policy import EvictionPolicy
from sgl_jax.mem_cache.pages.page_allocator import TREE, PageAllocator
from sgl_jax.mem_cache.tree.tree_component import FirstPages, LeaseOffer, LockedEnd
from sgl_jax.mem_cache.tree.tree_node import TreeNode, front


class FullComponent:
    """Pages of full-attention layers. Implements `TreeComponent`.

    `policy` holds the evictable leaves and their order. `group` is the number of the layers' cache
    group, whose pages are in pool number `pool`.
    """

    def __init__(
        self,
        index: int,
        allocator: PageAllocator,
        page_size: int,
        policy: EvictionPolicy,
        *,
        group: int = 0,
        pool: int = 0,
    ) -> None:
        self.index = index
        self.group = group
        self.pool = pool
        self._allocator = allocator
        self._page_size = page_size
        self._policy = policy
        self.num_evictable = 0  # pages on the tree that no lease has locked
        self.num_protected = 0  # pages on the tree locked by a lease
        self._dropped: list[Int32Array] = []

    def pages_of(self, nodes: Sequence[TreeNode]) -> Int32Array:
        """The pages along `nodes`, in token order."""
        if not nodes:
            return np.zeros(0, np.int32)
        return np.concatenate([node.values[self.index] for node in nodes])

    def absorb(self, node: TreeNode, offer: LeaseOffer) -> None:
        """Take a new node's pages from the offer; an old node has its pages."""
        if node.values[self.index] is not None:
            return
        start = (node.end - len(node.key)) // self._page_size
        pages = offer.pages[self.group, start : node.end // self._page_size].copy()
        self._allocator.give_to_tree(pages, offer.owner)
        node.values[self.index] = pages
        self.num_evictable += len(pages)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Divide the pages; every lock through the lower node passes through the upper one."""
        cut = len(upper.key) // self._page_size
        pages = lower.values[self.index]
        upper.values[self.index] = pages[:cut].copy()
        lower.values[self.index] = pages[cut:].copy()
        upper.locks[self.index] = lower.locks[self.index]

    def may_merge(self, upper: TreeNode, lower: TreeNode) -> bool:
        """Return whether no lock ends at the upper node."""
        return bool(upper.locks[self.index] == lower.locks[self.index])

    def merge(self, upper: TreeNode, lower: TreeNode) -> None:
        lower.values[self.index] = np.concatenate(
            [upper.values[self.index], lower.values[self.index]]
        )

    def lock(self, node: TreeNode, first_pages: FirstPages = None) -> None:
        self._lock_up_to(node, None)

    def _lock_up_to(self, node: TreeNode, above: TreeNode | None) -> None:
        """Lock the nodes from `node` up to `above` (excluded), or up to the root."""
        step: TreeNode | None = node
        while step is not above and step is not None and step.parent is not None:
            step.locks[self.index] += 1
            if step.locks[self.index] == 1:
                self.num_evictable -= len(step.values[self.index])
                self.num_protected += len(step.values[self.index])
                if not step.children:
                    self._policy.discard(step)
            step = step.parent

    def unlock(self, node: TreeNode, first_pages: FirstPages = None) -> None:
        """Undo one lock from `node` up to the root."""
        step: TreeNode | None = node
        while step is not None and step.parent is not None:
            if step.locks[self.index] <= 0:
                raise LedgerError(f"{step!r} is unlocked more often than it was locked")
            step.locks[self.index] -= 1
            if step.locks[self.index] == 0:
                self.num_evictable += len(step.values[self.index])
                self.num_protected -= len(step.values[self.index])
                if not step.children:
                    self._policy.add(step)
            step = step.parent

    def move_lock(self, old: TreeNode, new: TreeNode, first_pages: FirstPages = None) -> None:
        """Visit only the nodes below `old`: locks above it stay as they are."""
        self._lock_up_to(new, old)

    def refresh(self, node: TreeNode) -> None:
        """A leaf without locks can be evicted."""
        if self._is_evictable(node):
            self._policy.add(node)
        else:
            self._policy.discard(node)

    def drop(self, node: TreeNode, keep_tokens: int) -> None:
        """Set aside the pages past `keep_tokens` of the edge for `flush_dropped`."""
        keep = keep_tokens // self._page_size
        pages = node.values[self.index]
        self._dropped.append(pages[keep:])
        self.num_evictable -= len(pages) - keep
        node.values[self.index] = front(pages, keep)
        if keep == 0:
            self._policy.discard(node)

    def flush_dropped(self) -> None:
        if self._dropped:
            self._allocator.free(np.concatenate(self._dropped), TREE)
            self._dropped.clear()

    def pages_to_keep(self, leaf: TreeNode, num_pages: int) -> int:
        """Pages of the edge that stay when the caller needs `num_pages` of it."""
        return max(len(leaf.values[self.index]) - num_pages, 0)

    def audit(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> None:
        """Recompute locks, counts and the eviction set; raise `LedgerError` if off."""
        expected_locks = _locks_along_paths([end.node for end in locks])
        evictable = protected = num_members = 0
        for node in nodes:
            pages, num_locks = node.values[self.index], node.locks[self.index]
            expected = expected_locks.pop(node.node_id, 0)
            if num_locks != expected:
                raise LedgerError(
                    f"{node!r} has {num_locks} locks, live leases account for {expected}", pages
                )
            if len(pages) * self._page_size != len(node.key):
                raise LedgerError(
                    f"{node!r} has {len(pages)} pages for {len(node.key)} tokens", pages
                )
            if (node in self._policy) != self._is_evictable(node):
                raise LedgerError(f"{node!r}: membership of the eviction set is wrong", pages)
            num_members += node in self._policy
            if num_locks:
                protected += len(pages)
            else:
                evictable += len(pages)
        if expected_locks:
            raise LedgerError(f"leases lock nodes {sorted(expected_locks)}, not in the tree")
        if (evictable, protected) != (self.num_evictable, self.num_protected):
            raise LedgerError(
                f"tree counts (evictable, protected) {self.num_evictable, self.num_protected}, "
                f"a walk finds {evictable, protected}"
            )
        if len(self._policy) != num_members:
            raise LedgerError("the eviction set holds nodes that are not in the tree")
        self._policy.audit()

    def _is_evictable(self, node: TreeNode) -> bool:
        return not node.children and node.locks[self.index] == 0 and node.parent is not None


class BareTokens(FullComponent):
    """Component 0 of models without a full layer: paths, their locks and their order, no pages.

    An edge's values are zeros. Its counts are pages of tokens, which take no pool pages.
    """

    def absorb(self, node: TreeNode, offer: LeaseOffer) -> None:
        if node.values[self.index] is None:
            node.values[self.index] = np.zeros(len(node.key) // self._page_size, np.int32)
            self.num_evictable += len(node.values[self.index])

    def flush_dropped(self) -> None:
        self._dropped.clear()


def _locks_along_paths(leaves: Sequence[TreeNode]) -> Counter[int]:
    """Count, by node id, the paths from the root to `leaves` that contain the node."""
    locks: Counter[int] = Counter()
    for leaf in leaves:
        step: TreeNode | None = leaf
        while step is not None and step.parent is not None:
            locks[step.node_id] += 1
            step = step.parent
    return locks

"""Full attention on the prefix tree: every token of an edge has its KV, in pages.

A node's value is the int32 array of its edge's pages. A lock holds the whole path from the root,
because attention reads every earlier token. So lock counts never grow downwards, and unlocked pages
can always be freed from the leaves up.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.eviction_policy import EvictionPolicy
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.tree_component import (
    FirstPages,
    LeaseOffer,
    LockedEnd,
    TreeComponent,
)
from sgl_jax.mem_cache.tree_node import TreeNode, front, joined


class FullComponent(TreeComponent):
    """Pages of full-attention layers. `policy` holds the evictable leaves and their order."""

    def __init__(
        self,
        number: int,
        group: CacheGroup,
        allocator: PageAllocator,
        page_size: int,
        policy: EvictionPolicy,
    ) -> None:
        super().__init__(0, number, group, allocator, page_size)
        self._policy = policy

    def absorb(self, node: TreeNode, offer: LeaseOffer) -> None:
        if node.values[self.index] is not None:
            return
        start = (node.end - len(node.key)) // self._page_size
        pages = offer.pages[self.group, start : node.end // self._page_size].copy()
        self._allocator.give_to_tree(pages, offer.owner)
        node.values[self.index] = pages
        self.num_evictable += len(pages)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        cut = len(upper.key) // self._page_size
        pages = lower.values[self.index]
        upper.values[self.index] = pages[:cut].copy()
        lower.values[self.index] = pages[cut:].copy()
        upper.locks[self.index] = lower.locks[self.index]

    def may_merge(self, upper: TreeNode, lower: TreeNode) -> bool:
        return bool(upper.locks[self.index] == lower.locks[self.index])

    def merge(self, upper: TreeNode, lower: TreeNode) -> None:
        lower.values[self.index] = joined(upper.values[self.index], lower.values[self.index])

    def lock(self, node: TreeNode, first_pages: FirstPages = None) -> None:
        self._count_locks(node, None, 1)

    def unlock(self, node: TreeNode, first_pages: FirstPages = None) -> None:
        self._count_locks(node, None, -1)

    def _count_locks(self, node: TreeNode, above: TreeNode | None, change: int) -> None:
        """Add `change`, 1 or -1, to the locks from `node` up to `above` (excluded) or the root."""
        step: TreeNode | None = node
        while step is not above and step is not None and step.parent is not None:
            before = step.locks[self.index]
            if before + change < 0:
                raise LedgerError(f"{step!r} is unlocked more often than it was locked")
            step.locks[self.index] = before + change
            if before == 0 or before + change == 0:
                self._count_locked(change * len(step.values[self.index]))
                if not step.children:
                    self.refresh(step)
            step = step.parent

    def move_lock(self, old: TreeNode, new: TreeNode, first_pages: FirstPages = None) -> None:
        """Move a lock by visiting only the nodes below `old`: locks above it do not change."""
        self._count_locks(new, old, 1)

    def refresh(self, node: TreeNode) -> None:
        if self._is_evictable(node):
            self._policy.add(node)
        else:
            self._policy.discard(node)

    def drop(self, node: TreeNode, keep_tokens: int) -> None:
        keep = keep_tokens // self._page_size
        pages = node.values[self.index]
        self._dropped.append(pages[keep:])
        self.num_evictable -= len(pages) - keep
        node.values[self.index] = front(pages, keep)
        if keep == 0:
            self._policy.discard(node)

    def pages_to_keep(self, leaf: TreeNode, num_pages: int) -> int:
        """Return how many pages of the edge stay when the caller needs `num_pages` of it."""
        return max(len(leaf.values[self.index]) - num_pages, 0)

    def audit_rest(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> None:
        lost = set(_locks_along_paths([end.node for end in locks]))
        lost -= {node.node_id for node in nodes}
        if lost:
            raise LedgerError(f"leases lock nodes {sorted(lost)}, not in the tree")
        if len(self._policy) != sum(node in self._policy for node in nodes):
            raise LedgerError("the eviction set holds nodes that are not in the tree")
        self._policy.audit()

    def audit_nodes(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> tuple[int, int]:
        expected_locks = _locks_along_paths([end.node for end in locks])
        evictable = protected = 0
        for node in nodes:
            pages, num_locks = node.values[self.index], node.locks[self.index]
            expected = expected_locks[node.node_id]
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
            if num_locks:
                protected += len(pages)
            else:
                evictable += len(pages)
        return evictable, protected

    def _is_evictable(self, node: TreeNode) -> bool:
        return not node.children and node.locks[self.index] == 0 and node.parent is not None


class BareTokens(FullComponent):
    """Component 0 of models without a full layer: paths, their locks and their order, without
    pages. An edge's values are zeros. Its counts are pages of tokens, which take no pool pages."""

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

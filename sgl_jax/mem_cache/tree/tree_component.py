"""The pages of one cache group on the prefix tree.

FULL attention needs every page before a position, a window only its lookback. Component 0 is always
FULL's or, for models without a full layer, `BareTokens`: its locks hold the path itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.pages.pool_records import TREE
from sgl_jax.mem_cache.tree_node import TreeNode

# For each cache group, the first page of its row that a lease still lists and, if the tree owns it,
# has locked. None: no window page was released. Entries of FULL groups are ignored.
FirstPages = Sequence[int] | Int32Array | None

_NO_PAGES = np.zeros(0, np.int32)


class LeaseOffer(NamedTuple):
    """A lease's pages for the prefix [0, len(tokens)), from which components take missing pages."""

    owner: int  # row that owns the pages after `node`
    pages: Int32Array  # [groups, len(tokens) / page_size]; 0 for pages the lease has released
    node: TreeNode | None = None  # locked by the lease; before its end, the tree owns the pages
    namespace: str = ""  # namespace of the lease
    first_pages: FirstPages = None  # first pages locked at `node`, and needed below it


class LockedEnd(NamedTuple):
    """A lease's lock: FULL locks the path to `node`, a window its pages from `first_pages` on."""

    node: TreeNode
    first_pages: FirstPages = None


class TreeComponent(ABC):
    """The pages of one cache group on the tree.

    Args:
        index: index of the component in `values` and `locks` of nodes.
        number: number of the cache group `group` in offers and results.
        allocator: allocator of the pages' pool.
        page_size: page size in tokens.

    Attributes:
        num_evictable, num_protected: pages on the tree without locks, and with locks of leases.
    """

    def __init__(
        self,
        index: int,
        number: int,
        group: CacheGroup,
        allocator: PageAllocator,
        page_size: int,
    ) -> None:
        self.index = index
        self.group = number
        self.pool = group.pool
        self._allocator = allocator
        self._page_size = page_size
        self.num_evictable = 0
        self.num_protected = 0
        self._dropped: list[Int32Array] = []

    def pages_of(self, nodes: Sequence[TreeNode]) -> Int32Array:
        """Return a new array of the pages of all `nodes`."""
        if len(nodes) == 1:  # in less time than `np.concatenate` takes
            pages: Int32Array = nodes[0].values[self.index].copy()
            return pages
        return np.concatenate([_NO_PAGES, *(node.values[self.index] for node in nodes)])

    def _count_locked(self, num_pages: int) -> None:
        """Count `num_pages` more pages on the tree as locked; if negative, as unlocked."""
        self.num_protected += num_pages
        self.num_evictable -= num_pages

    @abstractmethod
    def absorb(self, node: TreeNode, offer: LeaseOffer) -> None:
        """Take missing pages of `node`; it ends at token `node.end` of the offer."""

    @abstractmethod
    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Divide the values and locks of `lower`, after its edge was cut in two. The first
        `len(upper.key)` tokens of the edge belong to the new parent `upper`."""

    def may_merge(self, upper: TreeNode, lower: TreeNode) -> bool:
        """Return whether the component cannot distinguish `upper` from its only child `lower`."""
        return True

    @abstractmethod
    def merge(self, upper: TreeNode, lower: TreeNode) -> None:
        """Join the values of both in `lower`, before `upper`'s edge is prepended to its edge."""

    @abstractmethod
    def lock(self, node: TreeNode, first_pages: FirstPages) -> None:
        """Lock the pages that a lease ending at `node` reads, until `unlock`."""

    @abstractmethod
    def unlock(self, node: TreeNode, first_pages: FirstPages) -> None: ...

    def move_lock(self, old: TreeNode, new: TreeNode, first_pages: FirstPages) -> None:
        """Lock for a lease at `new`, and unlock `old`, which is `new` or above it."""
        self.lock(new, first_pages)
        self.unlock(old, first_pages)

    @abstractmethod
    def refresh(self, node: TreeNode) -> None:
        """Update the eviction sets after a change of `node`'s age, lock or children."""

    @abstractmethod
    def drop(self, node: TreeNode, keep_tokens: int) -> None:
        """Drop the pages past `keep_tokens` of the edge. `flush_dropped` frees them."""

    def flush_dropped(self) -> None:
        if self._dropped:
            pages = self._dropped[0] if len(self._dropped) == 1 else np.concatenate(self._dropped)
            self._allocator.free(np.ascontiguousarray(pages), TREE)
            self._dropped.clear()

    def audit(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> None:
        """Recompute every count and lock from scratch. Raise `LedgerError` if one differs. `nodes`
        are all nodes; `locks` lists the lock of every live lease, with repeats."""
        counted, found = (self.num_evictable, self.num_protected), self.audit_nodes(nodes, locks)
        if found != counted:
            raise LedgerError(f"tree counts (evictable, protected) {counted}, a walk finds {found}")
        self.audit_rest(nodes, locks)

    @abstractmethod
    def audit_nodes(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> tuple[int, int]:
        """Check only these nodes; return the numbers of their evictable and protected pages."""

    @abstractmethod
    def audit_rest(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> None:
        """Check the locks and the eviction set for nodes that are not in the tree."""

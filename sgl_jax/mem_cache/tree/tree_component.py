"""The pages of one cache group on the prefix tree.

The tree core (`tree_shape.py`, `radix_tree.py`) owns tokens, edges and splits. Components, one for
each cache group, own the values of edges: FULL attention needs every page before a position, a
window only its lookback. Each component has its own index in `TreeNode.values` and
`TreeNode.locks`. Component 0 is always FULL's or, for models without a full layer, `BareTokens`
(`full_component.py`): its locks hold the path itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.pages.page_allocator import TREE, PageAllocator
from sgl_jax.mem_cache.tree_node import TreeNode

# For each cache group, the first page of its row that a lease still lists and, if the tree owns it,
# has locked. None: no window page was released. Entries of FULL groups are ignored.
FirstPages = Sequence[int] | Int32Array | None


class LeaseOffer(NamedTuple):
    """The pages that a lease offers for the prefix [0, len(tokens)): components take missing
    ones."""

    owner: int  # row that owns the pages from `owned_from` on
    owned_from: int  # tokens; before it the pages already belong to the tree
    pages: Int32Array  # [groups, len(tokens) / page_size]; 0 for pages the lease has released
    node: TreeNode | None = None  # locked by the lease; `owned_from` is its end
    namespace: str = ""  # the lease's
    first_pages: FirstPages = None  # the first pages locked at `node`, and needed below it


class LockedEnd(NamedTuple):
    """A lease's lock: FULL locks the path to `node`, a window its pages from `first_pages` on."""

    node: TreeNode
    first_pages: FirstPages = None


class TreeComponent(ABC):
    """The pages of one cache group on the tree.

    Args:
        index: of the component in `values` and `locks` of nodes.
        allocator: of the pages' pool, which has the number `pool`.
        page_size: tokens.
        group: the number of the cache group in offers and results.

    Attributes:
        num_evictable: pages on the tree that no lease has locked.
        num_protected: pages on the tree that a lease has locked.
    """

    def __init__(
        self, index: int, allocator: PageAllocator, page_size: int, *, group: int, pool: int
    ) -> None:
        self.index = index
        self.group = group
        self.pool = pool
        self._allocator = allocator
        self._page_size = page_size
        self.num_evictable = 0
        self.num_protected = 0
        self._dropped: list[Int32Array] = []

    def pages_of(self, nodes: Sequence[TreeNode]) -> Int32Array:
        """The values along `nodes`, in token order: a page each, 0 for absent pages."""
        if not nodes:
            return np.zeros(0, np.int32)
        return np.concatenate([node.values[self.index] for node in nodes])

    def _count_locked(self, num_pages: int) -> None:
        """So many pages on the tree have a lock now; below 0: have none now."""
        self.num_protected += num_pages
        self.num_evictable -= num_pages

    @abstractmethod
    def absorb(self, node: TreeNode, offer: LeaseOffer) -> None:
        """Take missing pages of `node` from `offer`; the node ends at token `node.end` of the
        offer."""

    @abstractmethod
    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Divide the values and locks of `lower`, whose edge was cut in two.

        The new parent `upper` has taken over the first `len(upper.key)` tokens of the edge.
        """

    def may_merge(self, upper: TreeNode, lower: TreeNode) -> bool:
        """Return whether nothing in the component distinguishes `upper` from its only child
        `lower`."""
        return True

    @abstractmethod
    def merge(self, upper: TreeNode, lower: TreeNode) -> None:
        """Join the values of both in `lower`, whose edge is about to be extended by `upper`'s in
        front."""

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
        """`node`'s age, lock or children changed: update the eviction sets."""

    @abstractmethod
    def drop(self, node: TreeNode, keep_tokens: int) -> None:
        """Drop the pages past `keep_tokens` of the edge; `flush_dropped` frees them."""

    def flush_dropped(self) -> None:
        """Free all dropped pages, in one call to the allocator."""
        if self._dropped:
            self._allocator.free(np.concatenate(self._dropped), TREE)
            self._dropped.clear()

    @abstractmethod
    def audit(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> None:
        """Recompute every count and lock from scratch; raise `LedgerError` on a difference.

        `nodes` are all nodes; `locks` lists the lock of every live lease, with repeats.
        """

    @abstractmethod
    def audit_nodes(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> tuple[int, int]:
        """Check these nodes of the tree, as `audit` does all; return their evictable and protected
        pages."""

    def _audit_counts(self, evictable: int, protected: int) -> None:
        if (evictable, protected) != (self.num_evictable, self.num_protected):
            raise LedgerError(
                f"tree counts (evictable, protected) {self.num_evictable, self.num_protected}, "
                f"a walk finds {evictable, protected}"
            )

"""Sliding windows on the prefix tree: a position needs only the last pages before it.

A node's value is an int32 array with a page for each page of its edge, 0 for freed pages. Locks are
counted page by page, so they stay exact after any split or merge: a lease that ends at page p holds
`[p - num_pages, p)`, and may release the first of these pages as it continues.

`resumable.py` determines the resumable positions and the pages that they need. This file
stores and counts the pages, and `window_order.py` has the order of eviction.

The component fits anything with a lookback of a fixed number of values. With `num_pages` 1, it
holds states, of which only the last snapshot is needed. FULL is not such a component with an
infinite lookback: counting locks page by page makes a match and insert seven times as slow as
counting them by node.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.pages.pool_records import TREE
from sgl_jax.mem_cache.tree.tree_component import (
    FirstPages,
    LeaseOffer,
    LockedEnd,
    TreeComponent,
)
from sgl_jax.mem_cache.tree.window_order import Levels, StateOrder, WindowOrder
from sgl_jax.mem_cache.tree_node import TreeNode, front

_NO_PAGES = np.zeros(0, np.int32)


def lookback_pages(sliding_window: int, page_size: int) -> int:
    """Return how many pages a window, including the query's token, reads before a page-aligned
    position. Raise `ValueError` for a window below 2 tokens, which reads nothing."""
    if sliding_window < 2:
        raise ValueError(f"a sliding window needs at least 2 tokens, got {sliding_window}")
    return -(-(sliding_window - 1) // page_size)


class WindowComponent(TreeComponent):
    """Pages of layers that read `num_pages` pages, at least 1, before a position. `num_uses` of all
    nodes is below `num_classes`. The values of a recurrent group are snapshots of states."""

    def __init__(
        self,
        index: int,
        number: int,
        group: CacheGroup,
        allocator: PageAllocator,
        page_size: int,
        num_classes: int,
    ) -> None:
        super().__init__(index, number, group, allocator, page_size)
        assert group.sliding_window is not None
        self.num_pages = lookback_pages(group.sliding_window, page_size)
        self.is_recurrent = group.is_recurrent
        self.order: WindowOrder = (
            StateOrder(num_classes)
            if group.is_recurrent
            else WindowOrder(self.num_pages, num_classes)
        )
        self._absorbed: list[tuple[Int32Array, int]] = []  # taken pages that rows still own

    # -- values -----------------------------------------------------------------------------

    def absorb(self, node: TreeNode, offer: LeaseOffer) -> None:
        """Take each offered page that the node lacks. The row owns a page until `flush_dropped`,
        and keeps it if the page is dropped before."""
        end = node.end // self._page_size
        start = end - len(node.key) // self._page_size
        if node.values[self.index] is None:
            node.values[self.index] = np.zeros(end - start, np.int32)
            node.locks[self.index] = np.zeros(end - start, np.int32)
        pages, locks = node.values[self.index], node.locks[self.index]
        offered = offer.pages[self.group, start:end]
        is_new = (pages == 0) & (offered != 0)
        taken = offered[is_new]
        if len(taken):
            self._absorbed.append((taken, offer.owner))
            pages[is_new] = taken
            self.num_evictable += len(taken)
            self._count_locked(int(np.count_nonzero(locks[is_new])))
        self.refresh(node)

    def tombstone(self, node: TreeNode, is_gone: BoolArray) -> None:
        """Drop present, unlocked pages of the edge. `flush_dropped` frees them."""
        pages = node.values[self.index]
        gone = pages[is_gone]
        self._dropped.append(gone)
        self.num_evictable -= len(gone)
        pages[is_gone] = 0
        self.refresh(node)

    def drop(self, node: TreeNode, keep_tokens: int) -> None:
        """Set aside the unlocked pages past `keep_tokens` of the edge. Call `refresh` for the rest
        once the edge is shorter. Raise `LedgerError` if a page is locked."""
        keep = keep_tokens // self._page_size
        pages, locks = node.values[self.index], node.locks[self.index]
        if locks[keep:].any():
            raise LedgerError(f"{node!r} is to be shortened, but a window is locked", pages[keep:])
        gone = pages[keep:]
        gone = gone[gone != 0]
        self._dropped.append(gone)
        self.num_evictable -= len(gone)
        node.values[self.index], node.locks[self.index] = front(pages, keep), front(locks, keep)
        self.order.forget(node)

    def flush_dropped(self) -> None:
        """Free the pages set aside, and give the absorbed pages still present to the tree."""
        dropped = np.concatenate(self._dropped) if self._dropped else _NO_PAGES
        for taken, owner in self._absorbed:
            is_dropped = np.isin(taken, dropped)
            self._allocator.give_to_tree(taken[~is_dropped], owner)
            dropped = np.setdiff1d(dropped, taken[is_dropped])
        self._absorbed.clear()
        self._dropped.clear()
        if len(dropped):
            self._allocator.free(dropped, TREE)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        cut = len(upper.key) // self._page_size
        pages, locks = lower.values[self.index], lower.locks[self.index]
        upper.values[self.index], upper.locks[self.index] = pages[:cut].copy(), locks[:cut].copy()
        lower.values[self.index], lower.locks[self.index] = pages[cut:].copy(), locks[cut:].copy()
        self.refresh(upper)
        self.refresh(lower)

    def merge(self, upper: TreeNode, lower: TreeNode) -> None:
        """Join pages and locks. Call `refresh` for `lower` once its edge is longer."""
        for values in ("values", "locks"):
            above, below = getattr(upper, values), getattr(lower, values)
            below[self.index] = np.concatenate([above[self.index], below[self.index]])
        self.order.forget(upper)
        self.order.forget(lower)

    # -- locks ------------------------------------------------------------------------------

    def lock(self, node: TreeNode, first_pages: FirstPages) -> None:
        self._count_locks(node, *self._interval(node, first_pages), 1)

    def unlock(self, node: TreeNode, first_pages: FirstPages) -> None:
        self._count_locks(node, *self._interval(node, first_pages), -1)

    def unlock_passed(self, node: TreeNode, first: int, end: int) -> None:
        lowest, highest = self._interval(node, None)
        self._count_locks(node, max(first, lowest), min(end, highest), -1)

    def _interval(self, node: TreeNode, first_pages: FirstPages) -> tuple[int, int]:
        end = node.end // self._page_size
        first = max(end - self.num_pages, 0)
        return (first if first_pages is None else max(first, int(first_pages[self.group]))), end

    def _count_locks(self, node: TreeNode, first: int, end: int, change: int) -> None:
        """Add `change` to the locks of pages [first, end) of the path to `node`."""
        for step, low, high in self.edges_between(node, first, end):
            pages, locks = step.values[self.index][low:high], step.locks[self.index][low:high]
            if change < 0 and locks.min() <= 0:
                raise LedgerError(f"{step!r} is unlocked more often than it was locked", pages)
            locks += change
            # Pages that were unlocked before, or are now.
            num_changed = int(np.count_nonzero((pages != 0) & (locks == (change > 0))))
            self._count_locked(change * num_changed)
            self.refresh(step)
        self.refresh(node)  # the set of leases that end there may have changed

    def edges_between(
        self, node: TreeNode, first: int, end: int
    ) -> Iterator[tuple[TreeNode, int, int]]:
        """Iterate upwards over the nodes with pages [first, end), each with its range of them."""
        step: TreeNode | None = node
        while step is not None and step.parent is not None and first < step.end // self._page_size:
            start = (step.end - len(step.key)) // self._page_size
            low, high = max(first - start, 0), min(end, step.end // self._page_size) - start
            if low < high:
                yield step, low, high
            step = step.parent

    # -- eviction ---------------------------------------------------------------------------

    def refresh(self, node: TreeNode) -> None:
        """List the node by the pages that can be taken while it stays on the tree."""
        self.order.place(node, self._may_go(node), self._levels(node))

    def choose(self, node: TreeNode, num_pages: int, level: int) -> BoolArray:
        """Return the first `num_pages` unlocked pages of the level, or all if there are fewer, as a
        mask of the pages of the edge."""
        is_chosen: BoolArray = self._may_go(node) & (self._levels(node) == level)
        is_chosen[np.flatnonzero(is_chosen)[num_pages:]] = False
        return is_chosen

    def _may_go(self, node: TreeNode) -> BoolArray:
        may_go: BoolArray = (node.values[self.index] != 0) & (node.locks[self.index] == 0)
        return may_go

    def _levels(self, node: TreeNode) -> Levels:
        count = len(node.key) // self._page_size
        first = node.end // self._page_size - count
        is_present = node.values[self.index] != 0
        return self.order.levels(first, is_present, self._may_go(node), self._num_to_end(node))

    def _num_to_end(self, node: TreeNode) -> int:
        """Count the pages from the end of `node` to the next end of a leaf or branch, at most
        `num_pages`."""
        count = 0
        while count < self.num_pages and len(node.children) == 1:
            (node,) = node.children.values()
            count += len(node.key) // self._page_size
        return min(count, self.num_pages)

    # -- proof ------------------------------------------------------------------------------

    def audit_rest(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> None:
        known = {node.node_id for node in nodes}
        for node, first_pages in locks:
            for step, _, _ in self.edges_between(node, *self._interval(node, first_pages)):
                if step.node_id not in known:
                    raise LedgerError(f"a lease locks {step!r}, not in the tree")
        self.order.audit([(node, self._may_go(node), self._levels(node)) for node in nodes])

    def audit_nodes(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> tuple[int, int]:
        expected = {node.node_id: np.zeros_like(node.locks[self.index]) for node in nodes}
        for node, first_pages in locks:
            for step, low, high in self.edges_between(node, *self._interval(node, first_pages)):
                if step.node_id in expected:
                    expected[step.node_id][low:high] += 1
        evictable = protected = 0
        for node in nodes:
            pages, counts = node.values[self.index], node.locks[self.index]
            if len(pages) * self._page_size != len(node.key) or len(counts) != len(pages):
                raise LedgerError(f"{node!r} has {len(pages)} pages of a window", pages)
            differs = counts != expected[node.node_id]
            if differs.any():
                raise LedgerError(
                    f"{node!r}: windows are locked {counts.tolist()} times, live leases account "
                    f"for {expected[node.node_id].tolist()}",
                    pages[differs & (pages != 0)],
                )
            may_go = self._may_go(node)
            self.order.audit_node(node, may_go, self._levels(node))
            evictable += int(may_go.sum())
            protected += int(((pages != 0) & (counts > 0)).sum())
        return evictable, protected

"""Sliding windows on the prefix tree: a position needs only the last pages before it.

A node's value is an int32 array with a page for each page of its edge, 0 for freed pages. Locks are
counted page by page, so they stay exact after any split or merge: a lease that ends at page p holds
`[p - num_pages, p)`, and may release the first of these pages as it continues.

`resumable.py` determines the resumable positions and the pages that they need. `WindowComponent`
stores and counts the pages, and `WindowOrder` has the order of eviction.

The component fits anything with a lookback of a fixed number of values. With `num_pages` 1, it
holds states, of which only the last snapshot is needed. FULL is not such a component with an
infinite lookback: counting locks page by page makes a match and insert seven times as slow as
counting them by node.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.eviction_policy import EvictionQueue
from sgl_jax.mem_cache.pages.page_allocator import TREE, PageAllocator
from sgl_jax.mem_cache.tree.tree_component import (
    FirstPages,
    LeaseOffer,
    LockedEnd,
    TreeComponent,
)
from sgl_jax.mem_cache.tree_node import ReadTime, TreeNode, front

SPARE, CHECKPOINT, END = range(3)
WEIGHTS = (0.1, 0.3, 4.0)
_GRID = 16  # windows

Levels = NDArray[np.int8]

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
        self.order = WindowOrder(self.num_pages, num_classes, is_recurrent=group.is_recurrent)
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

    def take(self, node: TreeNode, num_pages: int, level: int) -> None:
        """Drop the first `num_pages` unlocked pages of the level, or all if there are fewer."""
        is_gone = self._may_go(node) & (self._levels(node) == level)
        is_gone[np.flatnonzero(is_gone)[num_pages:]] = False
        self.tombstone(node, is_gone)

    def _may_go(self, node: TreeNode) -> BoolArray:
        may_go: BoolArray = (node.values[self.index] != 0) & (node.locks[self.index] == 0)
        return may_go

    def _levels(self, node: TreeNode) -> Levels:
        count = len(node.key) // self._page_size
        first = node.end // self._page_size - count
        return self.order.levels(first, count, len(node.children))

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


class WindowOrder:
    """The order in which pages of a window are evicted while their tokens stay.

    It lists nodes with pages to take, or with snapshots if the window `is_recurrent`. Each node's
    `num_uses` is below `num_classes`. Pages of an edge have three levels, by their use for later
    prompts:

    - `SPARE`: no known prompt ends or branches at a position that reads them.
    - `CHECKPOINT`: the windows before points that are 1, 2, 4, ... pages before the end of the
      edge, and before each multiple of 16 windows. So a prompt that newly branches off loses at
      most as much as its distance to the end.
    - `END`: the window before the end of the edge, at the end of a prompt or at a branch. If a leaf
      may leave the tree, these pages leave with it, so they are listed only for nodes that stay.

    Snapshots of states are few, and each was kept for a reason. A snapshot at the end of an edge is
    an `END` if several prompts branch there, and `SPARE` if a single prompt has passed it. All
    further snapshots, including ends without a continuation, are checkpoints.

    A node is listed at each level with pages to take, by its number of uses and the time when its
    windows were last read. The policy estimates its rate of use, and a level weights that rate.
    docs/measurements/eviction.md compares further orders and weights.
    """

    def __init__(self, num_pages: int, num_classes: int, *, is_recurrent: bool = False) -> None:
        self._num_pages = num_pages
        self._is_recurrent = is_recurrent
        self._queues: list[list[EvictionQueue[ReadTime]]] = [
            [EvictionQueue() for _ in range(num_classes)] for _ in WEIGHTS
        ]

    def levels(self, first: int, count: int, num_children: int) -> Levels:
        """Return the level of each page of an edge, int8[count]. The edge begins at page `first` of
        its path, and its end has `num_children` children."""
        if self._is_recurrent:
            levels = np.full(count, CHECKPOINT, np.int8)
            levels[-1] = (CHECKPOINT, SPARE, END)[min(num_children, 2)]
            return levels
        if count <= self._num_pages:
            return np.full(count, END, np.int8)
        to_grid = -np.arange(first, first + count) % (_GRID * self._num_pages)
        distances = np.arange(count, 0, -1)  # to the end of the edge
        _, exponents = np.frexp((distances - 1).astype(np.float64))
        to_power = distances - (1 << np.maximum(exponents - 1, 0))
        is_read = (to_grid > 0) & (to_grid <= self._num_pages) | (to_power <= self._num_pages)
        levels = np.where(is_read, CHECKPOINT, SPARE).astype(np.int8)
        levels[-self._num_pages :] = END
        return levels

    def place(self, node: TreeNode, may_go: BoolArray, levels: Levels) -> None:
        for level, is_there in enumerate(_presence(node, may_go, levels)):
            queue = self._queues[level][node.read.num_uses]
            if not is_there:
                queue.discard(node.read)
            elif node.read not in queue:
                queue.add(node.read)

    def forget(self, node: TreeNode) -> None:
        for queues in self._queues:
            queues[node.read.num_uses].discard(node.read)

    def oldest(self) -> Iterator[tuple[int, ReadTime]]:
        for level, queues in enumerate(self._queues):
            for queue in queues:
                item = queue.oldest()
                if item is not None:
                    yield level, item

    def audit_node(self, node: TreeNode, may_go: BoolArray, levels: Levels) -> None:
        """Raise `LedgerError` unless the node is listed at exactly the right places."""
        if node.read.num_uses != node.num_uses:
            raise LedgerError(f"{node!r} is listed for {node.read.num_uses} uses")
        for level, is_there in enumerate(_presence(node, may_go, levels)):
            if (node.read in self._queues[level][node.num_uses]) != is_there:
                raise LedgerError(f"{node!r}: it is listed wrongly for eviction")

    def audit(self, listed: list[tuple[TreeNode, BoolArray, Levels]]) -> None:
        """Raise `LedgerError` if further nodes are listed, or one at a wrong age."""
        num_members = sum(sum(_presence(*each)) for each in listed)
        queues = [queue for of_level in self._queues for queue in of_level]
        if sum(map(len, queues)) != num_members:
            raise LedgerError("windows that are not in the tree are listed for eviction")
        for queue in queues:
            queue.audit()


def _presence(node: TreeNode, may_go: BoolArray, levels: Levels) -> tuple[bool, bool, bool]:
    stays = bool(node.children) or node.locks[0] > 0
    has_any = bool(np.count_nonzero(may_go))
    if not has_any:
        return False, False, False
    of_levels = levels[may_go]
    return (
        bool(np.count_nonzero(of_levels == SPARE)),
        bool(np.count_nonzero(of_levels == CHECKPOINT)),
        stays and bool(np.count_nonzero(of_levels == END)),
    )

"""Sliding windows on the prefix tree: a position needs the last pages before it, and no others.

A node's value is an int32 array of one page for each page of its edge, 0 where it was let go. Locks
are counted page by page, so that they are exact after any split or merge: a lease that ends at page
p holds `[p - num_pages, p)`, of which it may give up the first ones as it goes on.

Which positions can be resumed, and so which pages are needed, is said by `resumable.py`, and which
pages leave first by `window_order.py`; here they are kept and counted.

The component is the same for whatever has a lookback of so many values; `num_pages` 1 is that of a
state whose last snapshot alone is needed.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.page_allocator import TREE, PageAllocator
from sgl_jax.mem_cache.tree_component import FirstPages, LeaseOffer, LockedEnd
from sgl_jax.mem_cache.tree_node import TreeNode, front
from sgl_jax.mem_cache.window_order import Levels, WindowOrder

_NO_PAGES = np.zeros(0, np.int32)


def lookback_pages(sliding_window: int, page_size: int) -> int:
    """Pages before a page-aligned position that a window of so many tokens reads.

    The query's own token is one of the window's. Raises `ValueError` for a window below 2 tokens,
    which reads nothing.
    """
    if sliding_window < 2:
        raise ValueError(f"a sliding window needs at least 2 tokens, got {sliding_window}")
    return -(-(sliding_window - 1) // page_size)


class WindowComponent:
    """Pages of layers that see `num_pages` pages before a position. Implements `TreeComponent`.

    Args:
        index: the component's in `values` and `locks` of nodes; component 0 locks paths.
        group: its number in offers and answers.
        pool: of its pages, whose `allocator` is given.
        num_pages: the lookback, at least 1.
        num_classes: `num_uses` of all nodes is below it.
        is_recurrent: whether the values are snapshots of states.
    """

    def __init__(
        self,
        index: int,
        group: int,
        pool: int,
        allocator: PageAllocator,
        page_size: int,
        num_pages: int,
        num_classes: int,
        *,
        is_recurrent: bool = False,
    ) -> None:
        self.index = index
        self.group = group
        self.pool = pool
        self.num_pages = num_pages
        self._allocator = allocator
        self._page_size = page_size
        self.num_evictable = 0
        self.num_protected = 0
        self.order = WindowOrder(num_pages, num_classes, is_recurrent=is_recurrent)
        self._dropped: list[Int32Array] = []
        self._absorbed: list[tuple[Int32Array, int]] = []  # not the tree's yet, and their owners

    def pages_of(self, nodes: Sequence[TreeNode]) -> Int32Array:
        """The pages along `nodes`, in token order, 0 where there is none."""
        if not nodes:
            return np.zeros(0, np.int32)
        return np.concatenate([node.values[self.index] for node in nodes])

    # -- values -----------------------------------------------------------------------------

    def absorb(self, node: TreeNode, offer: LeaseOffer) -> None:
        """Take each offered page that the node lacks.

        It is the row's until `flush_dropped`, and stays so if it is dropped before.
        """
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
            num_locked = int(np.count_nonzero(locks[is_new]))
            self.num_protected += num_locked
            self.num_evictable += len(taken) - num_locked
        self.refresh(node)

    def tombstone(self, node: TreeNode, is_gone: BoolArray) -> None:
        """Let go of pages of the edge that are there and not locked; for `flush_dropped`."""
        pages = node.values[self.index]
        gone = pages[is_gone]
        self._dropped.append(gone)
        self.num_evictable -= len(gone)
        pages[is_gone] = 0
        self.refresh(node)

    def drop(self, node: TreeNode, keep_tokens: int) -> None:
        """Set aside what is past `keep_tokens` of the edge; nothing of it is locked.

        What is left is to be listed by `refresh` once the edge is shorter.
        """
        keep = keep_tokens // self._page_size
        pages, locks = node.values[self.index], node.locks[self.index]
        if locks[keep:].any():
            raise LedgerError(f"{node!r} is to be shortened, but a window is locked", pages[keep:])
        gone = pages[keep:]
        gone = gone[gone != 0]
        self._dropped.append(gone)
        self.num_evictable -= len(gone)
        node.values[self.index], node.locks[self.index] = front(pages, keep), front(locks, keep)
        self.forget(node)

    def flush_dropped(self) -> None:
        """Free the pages set aside; take over for good what was absorbed and is still there."""
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
        """Divide pages and locks where they lie."""
        cut = len(upper.key) // self._page_size
        pages, locks = lower.values[self.index], lower.locks[self.index]
        upper.values[self.index], upper.locks[self.index] = pages[:cut].copy(), locks[:cut].copy()
        lower.values[self.index], lower.locks[self.index] = pages[cut:].copy(), locks[cut:].copy()
        self.refresh(upper)
        self.refresh(lower)

    def may_merge(self, upper: TreeNode, lower: TreeNode) -> bool:
        """Always: what is known is known page by page."""
        return True

    def merge(self, upper: TreeNode, lower: TreeNode) -> None:
        """Join pages and locks; `lower` is to be listed by `refresh` once its edge is longer."""
        for values in ("values", "locks"):
            above, below = getattr(upper, values), getattr(lower, values)
            below[self.index] = np.concatenate([above[self.index], below[self.index]])
        self.forget(upper)
        self.forget(lower)

    # -- locks ------------------------------------------------------------------------------

    def lock(self, node: TreeNode, first_pages: FirstPages) -> None:
        """Lock the pages before the end of `node` that a lease there reads."""
        self._count_locks(node, *self._interval(node, first_pages), 1)

    def unlock(self, node: TreeNode, first_pages: FirstPages) -> None:
        """Undo one `lock`."""
        self._count_locks(node, *self._interval(node, first_pages), -1)

    def move_lock(self, old: TreeNode, new: TreeNode, first_pages: FirstPages) -> None:
        """Lock what a lease at `new` reads, and undo a lock of `old`."""
        self.lock(new, first_pages)
        self.unlock(old, first_pages)

    def let_go(self, node: TreeNode, first: int, end: int) -> None:
        """A lease that ends at `node` gives up its lock of the pages [first, end)."""
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
            # Those that were free, or are from now on.
            num_changed = int(np.count_nonzero((pages != 0) & (locks == (change > 0))))
            self.num_protected += change * num_changed
            self.num_evictable -= change * num_changed
            self.refresh(step)
        self.refresh(node)  # a lease may end there, or no more

    def edges_between(
        self, node: TreeNode, first: int, end: int
    ) -> Iterator[tuple[TreeNode, int, int]]:
        """The nodes that hold pages [first, end) of the path to `node`, from below, and where in
        their edges."""
        step: TreeNode | None = node
        while step is not None and step.parent is not None and first < step.end // self._page_size:
            start = (step.end - len(step.key)) // self._page_size
            low, high = max(first - start, 0), min(end, step.end // self._page_size) - start
            if low < high:
                yield step, low, high
            step = step.parent

    # -- eviction ---------------------------------------------------------------------------

    def refresh(self, node: TreeNode) -> None:
        """List the node by what may be taken from it while it stays on the tree."""
        self.order.place(node, self._may_go(node), self._levels(node))

    def forget(self, node: TreeNode) -> None:
        """Nothing is to be taken from the node."""
        self.order.forget(node)

    def take(self, node: TreeNode, num_pages: int, level: int) -> None:
        """Let go of the first `num_pages` unlocked pages of the level, or fewer if the edge has
        not so many."""
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

    def audit(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> None:
        """Recompute locks, counts and what is listed; raise `LedgerError` if off."""
        expected = {node.node_id: np.zeros_like(node.locks[self.index]) for node in nodes}
        for node, first_pages in locks:
            for step, low, high in self.edges_between(node, *self._interval(node, first_pages)):
                if step.node_id not in expected:
                    raise LedgerError(f"a lease locks {step!r}, not in the tree")
                expected[step.node_id][low:high] += 1
        evictable = protected = 0
        listed = []
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
            listed.append((node, may_go, self._levels(node)))
            evictable += int(may_go.sum())
            protected += int(((pages != 0) & (counts > 0)).sum())
        if (evictable, protected) != (self.num_evictable, self.num_protected):
            raise LedgerError(
                f"window counts (evictable, protected) {self.num_evictable, self.num_protected}, "
                f"a walk finds {evictable, protected}"
            )
        self.order.audit(listed)

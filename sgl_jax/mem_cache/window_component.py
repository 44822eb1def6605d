"""Sliding windows on the prefix tree: a position needs the last pages before it, and no others.

A node's value is an int32 array of one page for each page of its edge, 0 where it was let go. Locks
are counted page by page, so that they are exact after any split or merge: a lease that ends at page
p holds `[p - num_pages, p)`, of which it may give up the first ones as it goes on.

Which positions can be resumed, and so which pages are needed, is said by `resumable.py`; here pages
are kept, counted, and listed by how useful they are:

- spare: inside an edge, where no lease ended and no branch is, and not on the grid
- other pages of nodes that cannot leave the tree now: they have children, or a lease ends there
- those of leaves that may leave the tree: they go with it, in the order of the eviction policy

The component is the same for whatever has a lookback of so many values; `num_pages` 1 is that of a
state whose last snapshot alone is needed.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction_queue import EvictionQueue
from sgl_jax.mem_cache.page_allocator import TREE, PageAllocator
from sgl_jax.mem_cache.tree_component import FirstPages, LeaseOffer, LockedEnd
from sgl_jax.mem_cache.tree_node import ReadTime, TreeNode, front

_NO_PAGES = np.zeros(0, np.int32)

# A window is kept longer at every multiple of so many times its pages: docs/eviction.md.
_GRID = 8


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
    """

    def __init__(
        self,
        index: int,
        group: int,
        pool: int,
        allocator: PageAllocator,
        page_size: int,
        num_pages: int,
    ) -> None:
        self.index = index
        self.group = group
        self.pool = pool
        self.num_pages = num_pages
        self._allocator = allocator
        self._page_size = page_size
        self._grid = _GRID * num_pages
        self.num_evictable = 0
        self.num_protected = 0
        self.spares: EvictionQueue[ReadTime] = EvictionQueue()
        self.inner: EvictionQueue[ReadTime] = EvictionQueue()
        self._dropped: list[Int32Array] = []
        self._absorbed: list[tuple[Int32Array, int]] = []  # not the tree's yet, and their owners

    def pages_of(self, nodes: Sequence[TreeNode]) -> Int32Array:
        """The pages along `nodes`, in token order, 0 where there is none."""
        if not nodes:
            return np.zeros(0, np.int32)
        return np.concatenate([node.values[self.index] for node in nodes])

    # -- values -----------------------------------------------------------------------------

    def absorb(self, node: TreeNode, offer: LeaseOffer) -> None:
        """Take each page that the node lacks and the offer's row owns.

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
        is_new[: max(offer.owned_from // self._page_size - start, 0)] = False
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
        may_go = self._may_go(node)
        if not np.count_nonzero(may_go):
            self.forget(node)
            return
        _list(self.inner, node.read, bool(node.children) or node.locks[0] > 0)
        _list(self.spares, node.read, bool(np.count_nonzero(may_go & self._is_spare(node))))

    def forget(self, node: TreeNode) -> None:
        """Nothing is to be taken from the node."""
        self.inner.discard(node.read)
        self.spares.discard(node.read)

    def is_listed(self, node: TreeNode) -> bool:
        """Whether anything may be taken from the node while it stays."""
        return node.read in self.inner or node.read in self.spares

    def relist(self, node: TreeNode, now: int) -> None:
        """The node's windows were read: it is as old as `now`."""
        self.forget(node)
        node.read.last_access = now
        self.refresh(node)

    def take(self, node: TreeNode, num_pages: int, *, spares_only: bool) -> None:
        """Let go of the first `num_pages` unlocked pages of the edge, or fewer if it has not so
        many."""
        may_go = self._may_go(node)
        if spares_only:
            may_go &= self._is_spare(node)
        may_go[np.flatnonzero(may_go)[num_pages:]] = False
        self.tombstone(node, may_go)

    def _may_go(self, node: TreeNode) -> BoolArray:
        may_go: BoolArray = (node.values[self.index] != 0) & (node.locks[self.index] == 0)
        return may_go

    def _is_spare(self, node: TreeNode) -> BoolArray:
        """Pages that neither the end of the edge nor a point of the grid reads."""
        end, count = node.end // self._page_size, len(node.key) // self._page_size
        to_grid = -np.arange(end - count, end) % self._grid
        is_spare = (to_grid == 0) | (to_grid > self.num_pages)
        is_spare[-self.num_pages :] = False
        return np.asarray(is_spare, np.bool_)

    # -- proof ------------------------------------------------------------------------------

    def audit(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> None:
        """Recompute locks, counts and what is listed; raise `LedgerError` if off."""
        expected = {node.node_id: np.zeros_like(node.locks[self.index]) for node in nodes}
        for node, first_pages in locks:
            for step, low, high in self.edges_between(node, *self._interval(node, first_pages)):
                if step.node_id not in expected:
                    raise LedgerError(f"a lease locks {step!r}, not in the tree")
                expected[step.node_id][low:high] += 1
        evictable = protected = num_inner = num_spares = 0
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
            is_inner = may_go.any() and (bool(node.children) or node.locks[0] > 0)
            is_spare = bool((may_go & self._is_spare(node)).any())
            if (node.read in self.inner, node.read in self.spares) != (is_inner, is_spare):
                raise LedgerError(f"{node!r}: it is listed wrongly for eviction", pages)
            num_inner += int(is_inner)
            num_spares += int(is_spare)
            evictable += int(may_go.sum())
            protected += int(((pages != 0) & (counts > 0)).sum())
        if (evictable, protected) != (self.num_evictable, self.num_protected):
            raise LedgerError(
                f"window counts (evictable, protected) {self.num_evictable, self.num_protected}, "
                f"a walk finds {evictable, protected}"
            )
        if (num_inner, num_spares) != (len(self.inner), len(self.spares)):
            raise LedgerError("nodes that are not in the tree are listed for eviction")
        self.inner.audit()
        self.spares.audit()


def _list(queue: EvictionQueue[ReadTime], item: ReadTime, is_member: bool) -> None:
    if not is_member:
        queue.discard(item)
    elif item not in queue:
        queue.add(item)

"""The resumable positions of a tree with windows, and the pages that they need.

The end of a page is resumable if, for every window, all pages of its lookback are present, or all
pages since the root; FULL has all of its pages on every path. A window's page is dead if no
resumable position reads it, and so are tokens after a path's last resumable position. Dead pages
are freed at once unless a lease has locked them: after each call of the cache, only leases keep
dead pages on the tree.

Each node stores its resumable positions and, for each window, the run: the number of pages without
a gap before the node's end, at most the lookback. The root's run is the full lookback. So a change
of a node's pages affects only that node, nodes below it within a window's reach, and, for dead
pages, nodes above it within that reach.
"""

from collections.abc import Callable, Sequence

import numpy as np

from sgl_jax.core.step_plan import BoolArray
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.eviction_policy import EvictionPolicy
from sgl_jax.mem_cache.tree.full_component import FullComponent
from sgl_jax.mem_cache.tree.window_component import WindowComponent
from sgl_jax.mem_cache.tree_node import TreeNode, is_on_tree


class Resumable:
    """Keeps `is_usable` and `runs` of all nodes, and frees dead pages in `sweep`. `windows` has at
    least one window; `root` is the root of the tree; `page_size` is in tokens."""

    def __init__(self, windows: Sequence[WindowComponent], root: TreeNode, page_size: int) -> None:
        self.windows = tuple(windows)
        self._page_size = page_size
        self._longest = max(window.num_pages for window in windows)
        self._changed: dict[int, TreeNode] = {}  # nodes that may hold dead pages
        self._remarked: dict[int, TreeNode] = {}  # nodes whose usable positions changed
        self._root = root
        root.runs = tuple(window.num_pages for window in windows)
        root.start_reading()

    # -- reading ----------------------------------------------------------------------------

    def usable_len(self, node: TreeNode, length: int, above: int = 0) -> tuple[int, list[TreeNode]]:
        """Return the length of the longest resumable prefix of at most `length` tokens, and the
        searched nodes, from `node` up to the node where the prefix ends.

        `length` is within the edge of `node`. The search ends at `above` tokens.
        """
        seen = []
        step: TreeNode | None = node
        while step is not None and step.parent is not None and step.end > above:
            seen.append(step)
            start = step.end - len(step.key)
            usable = step.is_usable[: max(length - start, 0) // self._page_size].nonzero()[0]
            if len(usable):
                return max(start + (int(usable[-1]) + 1) * self._page_size, above), seen
            step = step.parent
        return above, seen

    def search(self, node: TreeNode, length: int, start: TreeNode | None) -> int:
        """Return the length of the longest resumable prefix, for a prompt that shares `length`
        tokens with the path to `node`, and continues a lease at `start`. Count for the order of
        snapshots where prompts continue."""
        above = start.end if start else 0
        usable, _ = self.usable_len(node, length, above)
        if length > above:
            is_leaf_end = usable == node.end and not node.children and not node.was_cut
            for window in self.windows:
                window.order.searched(found_end=is_leaf_end)
        return usable

    def can_resume(self, node: TreeNode) -> bool:
        return bool(node.is_usable[-1])

    # -- reports from the tree -------------------------------------------------------------

    def added(self, nodes: Sequence[TreeNode]) -> None:
        """Update `nodes`, consecutive from above, that are new or took or lost pages."""
        for node in nodes:
            self._recompute(node)
            self._changed[node.node_id] = node

    def read(self, node: TreeNode, now: int) -> None:
        end = node.end // self._page_size
        for window in self.windows:
            for step, _, _ in window.edges_between(node, end - window.num_pages, end):
                self._relist(step, now)

    def used(self, node: TreeNode) -> None:
        if node.read.num_uses != node.num_uses:
            self._relist(node, node.read.last_access)

    def _relist(self, node: TreeNode, last_access: int) -> None:
        for window in self.windows:
            window.order.forget(node)
        node.read.last_access, node.read.num_uses = last_access, node.num_uses
        for window in self.windows:
            window.refresh(node)

    def released(self, node: TreeNode) -> None:
        """Record that a lease at `node` has unlocked pages, which may be dead."""
        if node.end and not self.can_resume(node):
            self._changed[node.node_id] = node

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        cut = len(upper.key) // self._page_size
        upper.is_usable = lower.is_usable[:cut].copy()
        lower.is_usable = lower.is_usable[cut:].copy()
        upper.runs = self._positions(upper)[1]
        for nodes in self._changed, self._remarked:
            if lower.node_id in nodes:
                nodes[upper.node_id] = upper

    def merged(self, upper: TreeNode, lower: TreeNode) -> None:
        lower.is_usable = np.concatenate([upper.is_usable, lower.is_usable])
        for nodes in self._changed, self._remarked:
            if nodes.pop(upper.node_id, None) is not None:
                nodes[lower.node_id] = lower
        for window in self.windows:
            window.refresh(lower)

    def trimmed(self, leaf: TreeNode) -> None:
        leaf.is_usable = leaf.is_usable[: len(leaf.key) // self._page_size].copy()
        leaf.runs = self._positions(leaf)[1]
        for window in self.windows:
            window.refresh(leaf)
        self.end_changed(leaf)
        self._changed[leaf.node_id] = leaf

    def end_changed(self, node: TreeNode) -> None:
        """List the nodes above again, up to the next branch: the end of `node` moved, or the number
        of its children changed, and the levels of pages depend on the next end within a window."""
        distance, above = 0, node.parent
        while above is not None and above is not self._root and distance < self._longest:
            if len(above.children) > 1:
                break
            for window in self.windows:
                window.refresh(above)
            distance += len(node.key) // self._page_size
            node, above = above, above.parent

    def left(self, leaf: TreeNode, parent: TreeNode) -> None:
        self._changed.pop(leaf.node_id, None)
        self._remarked.pop(leaf.node_id, None)
        if parent is not self._root:
            self._changed[parent.node_id] = parent

    def take_remarked(self) -> list[TreeNode]:
        remarked = list(self._remarked.values())
        self._remarked.clear()
        return remarked

    # -- eviction --------------------------------------------------------------------------

    def least_useful(
        self, pool: int, leaf: TreeNode | None, policy: EvictionPolicy, now: int
    ) -> tuple[WindowComponent, TreeNode, int] | None:
        """Choose a window, a node and a level to take pages of `pool` from. Return None to take
        them from `leaf`, the eviction policy's choice."""
        least = None
        lowest = None if leaf is None else policy.rate(leaf.num_uses, leaf.last_access, now)
        for window in self.windows:
            if window.pool != pool:
                continue
            for level, item in window.order.oldest():
                rate = window.order.weight(level) * policy.rate(
                    item.num_uses, item.last_access, now
                )
                if lowest is None or rate < lowest:
                    least, lowest = (window, item.node, level), rate
        return least

    def last_reader(self, window: WindowComponent, node: TreeNode, is_gone: BoolArray) -> int:
        """Return the length of the longest resumable prefix ending on the edge of `node` that reads
        pages about to be evicted (bool[pages]); 0 if none does.

        If the pages are snapshots, return the longest resumable prefix: copies of a prefix have all
        of its snapshots, but of a window only the last pages.
        """
        ends = node.is_usable.nonzero()[0] + 1
        if not window.is_recurrent:
            num_gone = np.concatenate(([0], np.cumsum(is_gone)))
            ends = ends[num_gone[ends] > num_gone[np.maximum(ends - window.num_pages, 0)]]
        return node.end - len(node.key) + int(ends[-1]) * self._page_size if len(ends) else 0

    def pages_to_keep(self, leaf: TreeNode, num_pages: int, pool: int, full: FullComponent) -> int:
        """Return how many pages of the edge stay when the caller needs `num_pages` of the pool."""
        count = len(leaf.key) // self._page_size
        held = np.full(count, int(full.pool == pool))
        for window in self.windows:
            if window.pool == pool:
                held += leaf.values[window.index] != 0
        freed = np.cumsum(held[::-1])
        return max(count - int(np.searchsorted(freed, num_pages)) - 1, 0)

    # -- dead pages ------------------------------------------------------------------------

    def sweep(self, trim: Callable[[TreeNode, int], None]) -> None:
        """Free all dead pages without locks in changed nodes. `trim(leaf, keep_tokens)` shortens
        the edge of a leaf and reports that here."""
        while self._changed:
            _, node = self._changed.popitem()
            if not is_on_tree(node):
                continue
            for each in self._with_those_above(node):
                self._free_dead_windows(each)
            if not node.children and not node.locks[0] and not self.can_resume(node):
                trim(node, self._last_usable(node))

    def _with_those_above(self, node: TreeNode) -> list[TreeNode]:
        """Return the node, and the nodes above it within reach of a window from its edge."""
        nodes, start = [node], node.end - len(node.key)
        step = node.parent
        reach = start - self._longest * self._page_size
        while step is not None and step.parent is not None and step.end > reach:
            nodes.append(step)
            step = step.parent
        return nodes

    def _last_usable(self, node: TreeNode) -> int:
        usable = node.is_usable.nonzero()[0]
        return (int(usable[-1]) + 1) * self._page_size if len(usable) else 0

    def _free_dead_windows(self, node: TreeNode) -> None:
        is_changed = False
        for window in self.windows:
            is_dead = self.is_dead(window, node) & (node.locks[window.index] == 0)
            if np.count_nonzero(is_dead):
                window.tombstone(node, is_dead)
                is_changed = True
        if is_changed:
            self._recompute(node)

    def is_dead(self, window: WindowComponent, node: TreeNode) -> BoolArray:
        """Return which pages of the edge are present but read by no resumable position."""
        has_page = node.values[window.index] != 0
        count = len(has_page)
        ends = node.is_usable.nonzero()[0] + 1  # in pages of the edge
        pages = np.arange(count)
        following = np.append(ends, count + self._longest + 1)[
            np.searchsorted(ends, pages, "right")
        ]
        is_dead: BoolArray = has_page & (following - pages > window.num_pages)
        if np.count_nonzero(is_dead[-window.num_pages :]):
            below = count + self._pages_to_usable(node, window.num_pages)
            is_dead &= (following <= count) | (below - pages > window.num_pages)
        return is_dead

    def _pages_to_usable(self, node: TreeNode, limit: int) -> int:
        """Count the pages from the end of `node` to the next resumable position below it. The count
        is above `limit` if there is none within `limit`."""
        nearest = limit + 1
        stack = [(child, 0) for child in node.children.values()]
        while stack:
            child, distance = stack.pop()
            usable = child.is_usable[: nearest - distance].nonzero()[0]
            if len(usable):
                nearest = min(nearest, distance + int(usable[0]) + 1)
                if nearest == 1:
                    break
                continue
            distance += len(child.is_usable)
            if distance + 1 < nearest:
                stack += [(each, distance) for each in child.children.values()]
        return nearest

    # -- positions --------------------------------------------------------------------------

    def _recompute(self, node: TreeNode) -> None:
        stack = [node]
        while stack:
            step = stack.pop()
            is_usable, runs = self._positions(step)
            if not np.array_equal(is_usable, step.is_usable):
                step.is_usable = is_usable
                self._remarked[step.node_id] = step
                self._changed[step.node_id] = step
            if runs != step.runs:
                step.runs = runs
                stack += step.children.values()

    def _positions(self, node: TreeNode) -> tuple[BoolArray, tuple[int, ...]]:
        """Compute `is_usable` and `runs` of a node from its pages and its parent's runs."""
        assert node.parent is not None
        positions = np.arange(1, len(node.key) // self._page_size + 1)
        is_usable = np.ones(len(positions), np.bool_)
        runs = []
        for window, run_above in zip(self.windows, node.parent.runs, strict=True):
            has_page = node.values[window.index] != 0
            last_gap = np.maximum.accumulate(np.where(has_page, 0, positions))
            run = positions - last_gap + run_above * (last_gap == 0)
            is_usable &= run >= window.num_pages
            runs.append(min(int(run[-1]), window.num_pages))
        return is_usable, tuple(runs)

    # -- proof ------------------------------------------------------------------------------

    def audit(self, nodes: Sequence[TreeNode]) -> None:
        """Recompute the positions of `nodes`, and raise `LedgerError` if they differ or if a page
        without locks is dead."""
        if self._changed:
            raise LedgerError(f"nodes not checked for dead pages: {list(self._changed.values())}")
        for node in nodes:
            is_usable, runs = self._positions(node)
            if not np.array_equal(is_usable, node.is_usable) or runs != node.runs:
                raise LedgerError(f"{node!r}: the resumable positions are {is_usable.tolist()}")
            for window in self.windows:
                is_dead = self.is_dead(window, node) & (node.locks[window.index] == 0)
                if is_dead.any():
                    dead = node.values[window.index][is_dead]
                    raise LedgerError(f"{node!r} has pages that nothing can read", dead)
            if not node.children and not node.locks[0] and not self.can_resume(node):
                raise LedgerError(f"the end of leaf {node!r} cannot be resumed")

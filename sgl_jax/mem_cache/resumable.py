"""Which positions of the tree can be resumed, where there are windows, and what is needed for it.

The end of a page can be resumed if, for every window, all pages of its lookback are there, or those
since the root; FULL has all of its pages on every path. A page of a window that no such position
reads is dead, and so are tokens behind the last such position of a path: unless a lease has locked
them, they are freed at once, so that after each call of the cache nothing dead is on the tree but
what a lease holds.

Of each node is kept which of its positions can be resumed, and for each window the run: how many
pages before the node's end are there without a gap, up to the lookback, which the root has. So a
change of a node's pages concerns that node, those below it as far as a window reaches, and for what
is dead those above it as far; never more of the tree.
"""

from collections.abc import Callable, Sequence

import numpy as np

from sgl_jax.core.step_plan import BoolArray, IntpArray
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction_policy import EvictionPolicy
from sgl_jax.mem_cache.full_component import FullComponent
from sgl_jax.mem_cache.tree_component import PathStep
from sgl_jax.mem_cache.tree_node import TreeNode
from sgl_jax.mem_cache.tree_path import matched_len, parent_of
from sgl_jax.mem_cache.window_component import WindowComponent
from sgl_jax.mem_cache.window_order import WEIGHTS


class Resumable:
    """Keeps `is_usable` and `runs` of all nodes; frees what is dead in `sweep`.

    Args:
        windows: at least one.
        root: of the tree.
        page_size: tokens.
    """

    def __init__(self, windows: Sequence[WindowComponent], root: TreeNode, page_size: int) -> None:
        self.windows = tuple(windows)
        self._page_size = page_size
        self._longest = max(window.num_pages for window in windows)
        self._changed: dict[int, TreeNode] = {}  # where something may be dead
        self._remarked: dict[int, TreeNode] = {}  # whose usable positions are others now
        self._root = root
        root.runs = tuple(window.num_pages for window in windows)
        root.start_reading()

    # -- reading ----------------------------------------------------------------------------

    def usable_len(self, node: TreeNode, length: int, above: int = 0) -> tuple[int, list[TreeNode]]:
        """The longest prefix of at most `length` tokens that can be resumed, and where that was
        looked for: the nodes from `node` up to the one in which it ends.

        `length` lies in the edge of `node`. At `above` tokens the search ends.
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

    def kv_len(self, path: Sequence[PathStep], above: int) -> int:
        """The longest prefix of a walk that begins at `above` tokens whose KV is all there: what
        could be resumed if there were snapshots at each position."""
        if not path:
            return above
        length = matched_len(path)
        parent = parent_of(path[0].node)
        is_there = np.ones((length - above) // self._page_size, np.bool_)
        nodes = [step.node for step in path]
        for window, run_above in zip(self.windows, parent.runs, strict=True):
            if not window.is_recurrent:
                has_page = window.pages_of(nodes)[: len(is_there)] != 0
                is_there &= _runs(has_page, run_above) >= window.num_pages
        usable = is_there.nonzero()[0]
        return above + (int(usable[-1]) + 1) * self._page_size if len(usable) else above

    def can_resume(self, node: TreeNode) -> bool:
        """Whether the end of `node`, which is not the root, can be resumed."""
        return bool(node.is_usable[-1])

    # -- what the tree reports --------------------------------------------------------------

    def added(self, nodes: Sequence[TreeNode]) -> None:
        """`nodes`, which follow one another from above, are new or have taken pages."""
        for node in nodes:
            self._recompute(node)
            self._changed[node.node_id] = node

    def read(self, node: TreeNode, now: int) -> None:
        """A lease reads the windows before the end of `node`."""
        end = node.end // self._page_size
        for window in self.windows:
            for step, _, _ in window.edges_between(node, end - window.num_pages, end):
                self._relist(step, now)

    def used(self, node: TreeNode) -> None:
        """The node's `num_uses` may have changed."""
        if node.read.num_uses != node.num_uses:
            self._relist(node, node.read.last_access)

    def _relist(self, node: TreeNode, last_access: int) -> None:
        for window in self.windows:
            window.forget(node)
        node.read.last_access, node.read.num_uses = last_access, node.num_uses
        for window in self.windows:
            window.refresh(node)

    def released(self, node: TreeNode) -> None:
        """A lease that ends at `node` has given up locks: what they held may be dead."""
        if node.end and not self.can_resume(node):
            self._changed[node.node_id] = node

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower` lost the beginning of its edge to the new `upper`."""
        cut = len(upper.key) // self._page_size
        upper.is_usable = lower.is_usable[:cut].copy()
        lower.is_usable = lower.is_usable[cut:].copy()
        upper.runs = self._positions(upper)[1]
        for nodes in self._changed, self._remarked:
            if lower.node_id in nodes:
                nodes[upper.node_id] = upper

    def merged(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower`'s edge begins with that of `upper` now."""
        lower.is_usable = np.concatenate([upper.is_usable, lower.is_usable])
        for nodes in self._changed, self._remarked:
            if nodes.pop(upper.node_id, None) is not None:
                nodes[lower.node_id] = lower
        for window in self.windows:
            window.refresh(lower)

    def trimmed(self, leaf: TreeNode) -> None:
        """`leaf` is shorter."""
        leaf.is_usable = leaf.is_usable[: len(leaf.key) // self._page_size].copy()
        leaf.runs = self._positions(leaf)[1]
        for window in self.windows:
            window.refresh(leaf)
        self._changed[leaf.node_id] = leaf

    def left(self, leaf: TreeNode, parent: TreeNode) -> None:
        """`leaf` is gone, which was below `parent`."""
        self._changed.pop(leaf.node_id, None)
        self._remarked.pop(leaf.node_id, None)
        if parent is not self._root:
            self._changed[parent.node_id] = parent

    def tombstoned(self, node: TreeNode) -> None:
        """Pages of `node` were let go."""
        self._recompute(node)
        self._changed[node.node_id] = node

    def take_remarked(self) -> list[TreeNode]:
        """The nodes whose usable positions have changed since the last call."""
        remarked = list(self._remarked.values())
        self._remarked.clear()
        return remarked

    # -- what may go ------------------------------------------------------------------------

    def least_useful(
        self, pool: int, leaf: TreeNode | None, policy: EvictionPolicy, now: int
    ) -> tuple[WindowComponent, TreeNode, int] | None:
        """Where to take pages of `pool` from, other than from `leaf`, the eviction policy's choice:
        a window, the node, and the level of its pages. None: from the leaf.
        """
        least = None
        lowest = None if leaf is None else policy.rate(leaf.num_uses, leaf.last_access, now)
        for window in self.windows:
            if window.pool != pool:
                continue
            for level, item in window.order.oldest():
                rate = WEIGHTS[level] * policy.rate(item.num_uses, item.last_access, now)
                if lowest is None or rate < lowest:
                    least, lowest = (window, item.node, level), rate
        return least

    def pages_to_keep(self, leaf: TreeNode, num_pages: int, pool: int, full: FullComponent) -> int:
        """Pages of the edge that stay when `num_pages` of the pool are wanted of it."""
        count = len(leaf.key) // self._page_size
        held = np.full(count, int(full.pool == pool))
        for window in self.windows:
            if window.pool == pool:
                held += leaf.values[window.index] != 0
        freed = np.cumsum(held[::-1])
        return max(count - int(np.searchsorted(freed, num_pages)) - 1, 0)

    # -- what is dead -----------------------------------------------------------------------

    def sweep(self, trim: Callable[[TreeNode, int], None]) -> None:
        """Let go of everything dead that no lease holds, where something has changed.

        `trim(leaf, keep_tokens)` shortens the edge of a leaf; it reports that here.
        """
        while self._changed:
            _, node = self._changed.popitem()
            if not _is_on_tree(node):
                continue
            for each in self._with_those_above(node):
                self._free_dead_windows(each)
            if not node.children and not node.locks[0] and not self.can_resume(node):
                trim(node, self._last_usable(node))

    def _with_those_above(self, node: TreeNode) -> list[TreeNode]:
        """The node, and those above it whose pages a window from its edge may reach."""
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
        """Of each page of the edge: it is there, and no position that can be resumed reads it."""
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
        """Pages from the end of `node` to the next position below it that can be resumed; above
        `limit` if there is none so near."""
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
        """Bring the node up to date, and those below it as far as its pages reach."""
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
        """What `is_usable` and `runs` of a node should be, by its pages and its parent's runs."""
        assert node.parent is not None
        is_usable = np.ones(len(node.key) // self._page_size, np.bool_)
        runs = []
        for window, run_above in zip(self.windows, node.parent.runs, strict=True):
            run = _runs(node.values[window.index] != 0, run_above)
            is_usable &= run >= window.num_pages
            runs.append(min(int(run[-1]), window.num_pages))
        return is_usable, tuple(runs)

    # -- proof ------------------------------------------------------------------------------

    def audit(self, nodes: Sequence[TreeNode]) -> None:
        """Prove that all is as a fresh look finds it, and that nothing dead is on the tree but
        what a lease has locked. `nodes` are all, parents first. Raises `LedgerError`."""
        if self._changed:
            raise LedgerError(f"not looked for what is dead: {list(self._changed.values())}")
        for node in nodes:
            is_usable, runs = self._positions(node)
            if not np.array_equal(is_usable, node.is_usable) or runs != node.runs:
                raise LedgerError(f"{node!r}: what can be resumed is {is_usable.tolist()}")
            for window in self.windows:
                is_dead = self.is_dead(window, node) & (node.locks[window.index] == 0)
                if is_dead.any():
                    dead = node.values[window.index][is_dead]
                    raise LedgerError(f"{node!r} has pages that nothing can read", dead)
            if not node.children and not node.locks[0] and not self.can_resume(node):
                raise LedgerError(f"the end of leaf {node!r} cannot be resumed")


def _runs(has_page: BoolArray, run_above: int) -> IntpArray:
    """How many pages are there without a gap before the end of each, with those above."""
    positions = np.arange(1, len(has_page) + 1)
    last_gap = np.maximum.accumulate(np.where(has_page, 0, positions))
    runs: IntpArray = positions - last_gap + run_above * (last_gap == 0)
    return runs


def _is_on_tree(node: TreeNode) -> bool:
    return node.parent is not None and node.parent.children.get(node.child_key) is node

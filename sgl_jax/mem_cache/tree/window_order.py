"""The order in which pages of a window are evicted while their tokens stay.

Pages of an edge have three levels, by their use for later prompts:

- `SPARE`: no known prompt ends or branches at a position that reads them.
- `CHECKPOINT`: the windows before points that are 1, 2, 4, ... pages before the end of the edge,
  and before each multiple of 16 windows. So a prompt that newly branches off loses at most as much
  as its distance to the end.
- `END`: the window before the end of the edge, at the end of a prompt or at a branch. If a leaf may
  leave the tree, these pages leave with it, so they are listed only for nodes that stay.

Snapshots of states are few, and each was kept for a reason. A snapshot at the end of an edge is an
`END` if several prompts branch there, and `SPARE` if a single prompt has passed it. All further
snapshots, including ends without a continuation, are checkpoints.

A node is listed at each level with pages to take, by its number of uses and the time when its
windows were last read. The policy estimates its rate of use, and a level weights that rate.
docs/measurements/eviction.md compares further orders and weights.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.step_plan import BoolArray
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.eviction_queue import EvictionQueue
from sgl_jax.mem_cache.tree_node import ReadTime, TreeNode

SPARE, CHECKPOINT, END = range(3)
WEIGHTS = (0.1, 0.3, 4.0)
_GRID = 16  # windows

Levels = NDArray[np.int8]


class WindowOrder:
    """The nodes with pages of one window to take, or with snapshots if it `is_recurrent`. Each
    node's `num_uses` is below `num_classes`."""

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

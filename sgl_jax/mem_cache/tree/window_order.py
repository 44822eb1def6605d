"""The order in which pages of a window, or snapshots of states, are evicted while tokens stay.

Pages of an edge have four levels, by their use for later prompts:

- `SPARE`: no known prompt ends or branches at a position that reads them.
- `CHECKPOINT`: the windows before points that are 1, 2, 4, ... pages before the end of the edge,
  and before each multiple of 16 windows. So a prompt that newly branches off loses at most as much
  as its distance to the end.
- `PASSED`: the window before the end of an edge where a single path continues.
- `END`: the window before the end of a leaf, or before a branch. If a leaf may leave the tree, its
  pages leave with it, so they are listed only for nodes that stay.

While conversations only continue, all other pages go before any conversation loses its end, because
an order by age would lose all ends at once when conversations take turns. How much the others are
worth in relation to ends is learned from lookups: of the prompts that continue a cached prefix, how
many do so elsewhere than at the end of an earlier prompt.

A node is listed at each level with pages to take, by its number of uses and the time when its
windows were last read. The policy estimates its rate of use, and a level weights that rate.
docs/measurements/eviction.md compares further orders and weights.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.step_plan import BoolArray
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.eviction_policy import EvictionQueue
from sgl_jax.mem_cache.tree_node import ReadTime, TreeNode

SPARE, CHECKPOINT, PASSED, END = range(4)
WEIGHTS = (0.1, 0.3, 4.0, 4.0)
_GRID = 16  # windows
# Prior counts: at the start, ends are kept.
_INSIDE, _AT_END = 0.001, 1.0
_INSIDE_COUNT = 0.5  # a prompt that branches leaves its windows there for the next prompt
_HALVED_AFTER = 500  # lookups

Levels = NDArray[np.int8]


class WindowOrder:
    """The nodes with pages of a window of `num_pages` pages to take.

    Each node's `num_uses` is below `num_classes`. `weights` has the weight of each level; pages of
    the last level leave with their leaf. The other weights are multiplied by the learned ratio, at
    most `max_ratio`.
    """

    def __init__(
        self,
        num_pages: int,
        num_classes: int,
        weights: tuple[float, ...] = WEIGHTS,
        max_ratio: float = 1.0,
    ) -> None:
        self._num_pages = num_pages
        self._weights = weights
        self._max_ratio = max_ratio
        self._num_inside, self._num_at_end = _INSIDE, _AT_END
        self._queues: list[list[EvictionQueue[ReadTime]]] = [
            [EvictionQueue() for _ in range(num_classes)] for _ in weights
        ]

    def weight(self, level: int) -> float:
        """Return the factor of the rate of use of nodes that are listed at the level."""
        if level == len(self._weights) - 1:
            return self._weights[level]
        return self._weights[level] * min(self._num_inside / self._num_at_end, self._max_ratio)

    def levels(self, first: int, is_present: BoolArray, may_go: BoolArray, to_end: int) -> Levels:
        """Return the level of each page of an edge, int8[pages].

        The edge begins at page `first` of its path, and `to_end` pages after it is the next leaf's
        end or branch. The masks, bool[pages], tell which pages are present, and which of them can
        be taken.
        """
        count, num_ends = len(may_go), max(self._num_pages - to_end, 0)
        to_grid = -np.arange(first, first + count) % (_GRID * self._num_pages)
        distances = np.arange(count, 0, -1)  # to the end of the edge
        _, exponents = np.frexp((distances - 1).astype(np.float64))
        to_power = distances - (1 << np.maximum(exponents - 1, 0))
        is_read = (to_grid > 0) & (to_grid <= self._num_pages) | (to_power <= self._num_pages)
        levels = np.where(is_read, CHECKPOINT, SPARE).astype(np.int8)
        levels[-self._num_pages :] = PASSED
        levels[max(count - num_ends, 0) :] = END
        return levels

    def searched(self, *, found_end: bool) -> None:
        """Record that a prompt was looked up, and whether it continues where another one ended."""
        if found_end:
            self._num_at_end += 1.0
        else:
            self._num_inside += _INSIDE_COUNT
        if self._num_inside + self._num_at_end > _HALVED_AFTER:
            self._num_inside /= 2.0
            self._num_at_end /= 2.0

    def place(self, node: TreeNode, may_go: BoolArray, levels: Levels) -> None:
        """List the node by its evictable pages."""
        for level, is_there in enumerate(self._presence(node, may_go, levels)):
            queue = self._queues[level][node.read.num_uses]
            if not is_there:
                queue.discard(node.read)
            elif node.read not in queue:
                queue.add(node.read)

    def forget(self, node: TreeNode) -> None:
        for queues in self._queues:
            queues[node.read.num_uses].discard(node.read)

    def oldest(self) -> Iterator[tuple[int, ReadTime]]:
        """Yield the least recently read node of each level and number of uses."""
        for level, queues in enumerate(self._queues):
            for queue in queues:
                item = queue.oldest()
                if item is not None:
                    yield level, item

    def audit_node(self, node: TreeNode, may_go: BoolArray, levels: Levels) -> None:
        """Raise `LedgerError` unless the node is listed at exactly the right places."""
        if node.read.num_uses != node.num_uses:
            raise LedgerError(f"{node!r} is listed for {node.read.num_uses} uses")
        for level, is_there in enumerate(self._presence(node, may_go, levels)):
            if (node.read in self._queues[level][node.num_uses]) != is_there:
                raise LedgerError(f"{node!r}: it is listed wrongly for eviction")

    def audit(self, listed: list[tuple[TreeNode, BoolArray, Levels]]) -> None:
        """Raise `LedgerError` if further nodes are listed, or one at a wrong age."""
        num_members = sum(sum(self._presence(*each)) for each in listed)
        queues = [queue for of_level in self._queues for queue in of_level]
        if sum(map(len, queues)) != num_members:
            raise LedgerError("windows that are not in the tree are listed for eviction")
        for queue in queues:
            queue.audit()

    def _presence(self, node: TreeNode, may_go: BoolArray, levels: Levels) -> list[bool]:
        """Return, for each level, whether there are pages to take."""
        counts = np.bincount(levels[may_go] + 1, minlength=1 + len(self._weights))
        present: list[bool] = (counts[1:] > 0).tolist()
        present[-1] &= bool(node.children) or node.locks[0] > 0
        return present


_NUM_INNER = 10  # levels of inner snapshots; the worth doubles from one to the next
_BRANCH = _NUM_INNER
_NOT_LISTED = -1
_UNIT = 128  # the value of a snapshot with worth 1, in integers: all hosts compute the same levels
_WEIGHTS = (*(2.0 ** (level - 7) for level in range(_NUM_INNER)), 4.0)
_MAX_RATIO = 8.0


class StateOrder(WindowOrder):
    """The order in which snapshots of states are evicted while their tokens stay.

    A snapshot saves the tokens back to the one before it, for each prompt that continues between it
    and the next one. So an edge always offers the inner snapshot that leaves the smallest gap in
    relation to its path, and the snapshots that stay are spread over the path. The snapshot at the
    end of a leaf leaves with its leaf: as long as conversations only continue, all inner snapshots
    go before any conversation loses its end, because an order by age would lose all ends at once
    when conversations take turns. A snapshot where prompts branch stays longest.

    How much inner snapshots are worth in relation to ends is learned from lookups. Each node's
    `num_uses` is below `num_classes`.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__(1, num_classes, _WEIGHTS, _MAX_RATIO)

    def levels(self, first: int, is_present: BoolArray, may_go: BoolArray, to_end: int) -> Levels:
        """Return the level of the least useful inner snapshot and of one at the end of the edge;
        all others are -1."""
        count = len(may_go)
        levels = np.full(count, _NOT_LISTED, np.int8)
        places = is_present.nonzero()[0]
        if not len(places):
            return levels
        num_inner = len(places)
        if places[-1] == count - 1 and not to_end:
            levels[-1] = _BRANCH
            num_inner -= 1
        # A snapshot before the edge is assumed at its start: prompts branch there.
        bounds = np.concatenate(([-1], places, [count]))
        gaps = bounds[1:] - bounds[:-1]
        saved = gaps[:-1] * gaps[1:]
        listed = may_go[places[:num_inner]].nonzero()[0]
        if len(listed):
            least = listed[np.argmin(saved[listed])]
            to_last = max(count - 1 - int(places[num_inner - 1]), 1)
            worth = int(saved[least]) * _UNIT // ((first + count) * to_last)
            levels[places[least]] = min(worth.bit_length(), _NUM_INNER) - 1 if worth else 0
        return levels

"""`audit_cache` for long runs: a state of a node that was found right is not recomputed.

What the audits of windows and of resumable positions say of a node follows from a few facts about
it and the nodes next to it. They are all in the key under which its verdict is remembered: each
step reads them anew for every node, and a node with facts not met before is audited in full. All
that needs the whole tree is counted anew after each step.
"""

from collections.abc import Sequence

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.tree.cache_walk import audit_shape
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.tree_component import FirstPages, LockedEnd
from sgl_jax.mem_cache.tree.window_component import WindowComponent
from sgl_jax.mem_cache.tree_node import TreeNode

Facts = tuple[object, ...]
# Of each window: pages without and with locks, and levels at which the node is listed.
Counts = list[tuple[int, int, int]]


class AuditOnce:
    """Audits trees of one layout and page size."""

    def __init__(self) -> None:
        self._judged: dict[Facts, Counts] = {}

    def audit(self, cache: RadixCache, locks: Sequence[tuple[TreeNode, FirstPages]]) -> None:
        """Raise if anything is wrong, as `audit_cache` does."""
        tree, nodes, ends = cache.tree, cache.nodes(), [LockedEnd(*lock) for lock in locks]
        windows = () if tree.resumable is None else tree.resumable.windows
        for component in tree.components:
            if component not in windows:
                component.audit(nodes, ends)
        cache.cursors.audit()
        audit_shape(tree, nodes)
        if tree.resumable is None:
            return
        assert not tree.resumable._changed
        known = {node.node_id for node in nodes}
        expected = [expected_locks(window, ends, known) for window in windows]
        totals = np.zeros((len(windows), 3), np.int64)
        for node in nodes:
            facts = self._facts(cache, node, expected)
            counts = self._judged.get(facts)
            if counts is None:
                counts = self._judged[facts] = self._judge(cache, node, ends)
            totals += counts
        for window, (evictable, protected, num_listed) in zip(
            windows, totals.tolist(), strict=True
        ):
            assert (window.num_evictable, window.num_protected) == (evictable, protected)
            queues = [each for level in window.order._queues for each in level if each.members]
            assert sum(len(queue.members) for queue in queues) == num_listed
            for queue in queues:
                queue.audit()

    def _facts(
        self, cache: RadixCache, node: TreeNode, expected: list[dict[int, Int32Array]]
    ) -> Facts:
        """All that verdicts on a node follow from."""
        resumable = cache.tree.resumable
        assert resumable is not None
        assert node.parent is not None
        facts: list[object] = [
            node.end,
            len(node.key),
            bool(node.children),
            node.locks[0] > 0,
            node.read.num_uses == node.num_uses,
            node.runs,
            node.parent.runs,
            node.is_usable.tobytes(),
        ]
        for window, of_leases in zip(resumable.windows, expected, strict=True):
            pages, of_node = node.values[window.index], of_leases.get(node.node_id)
            facts += (
                (pages != 0).tobytes(),
                node.locks[window.index].tobytes(),
                None if of_node is None else of_node.tobytes(),
                window._num_to_end(node),
                resumable._pages_to_usable(node, window.num_pages),
            )
            facts += [
                node.node_id in queues[node.num_uses].members for queues in window.order._queues
            ]
        return tuple(facts)

    def _judge(self, cache: RadixCache, node: TreeNode, ends: list[LockedEnd]) -> Counts:
        """Recompute all that is known of a node."""
        assert cache.tree.resumable is not None
        cache.tree.resumable.audit([node])
        counts = []
        for window in cache.tree.resumable.windows:
            evictable, protected = window.audit_nodes([node], ends)
            presence = window.order._presence(node, window._may_go(node), window._levels(node))
            counts.append((evictable, protected, sum(presence)))
        return counts


def expected_locks(
    window: WindowComponent, ends: list[LockedEnd], known: set[int]
) -> dict[int, Int32Array]:
    """The locks of the pages of nodes that leases have locked, by node id."""
    expected: dict[int, Int32Array] = {}
    for node, first_pages in ends:
        for step, low, high in window.edges_between(node, *window._interval(node, first_pages)):
            assert step.node_id in known, "a lease locks a node that is not in the tree"
            count = len(step.key) // window._page_size
            locks = expected.setdefault(step.node_id, np.zeros(count, np.int32))
            locks[low:high] += 1
    return expected

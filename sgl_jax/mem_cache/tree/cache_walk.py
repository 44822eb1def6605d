"""Checks of a prefix cache: all at once, or in slices between which the cache may change.

They change nothing. A slice compares only records that it reads at one moment: the locks and the
place of each of its nodes, and the owner of each of their pages. Two facts need the whole tree:
that no two nodes have a page, and that each page of the tree is in some node. For these, the walk
notes which node had a page. A note of an earlier slice is compared only if the node still has the
page, and a page is reported as missing only if the tree has owned it since before the walk. So no
change of the cache is reported as a defect.

Parents are visited before their children. A page moves within the tree only with a split, upwards
to a new node, or with a merge, downwards to a child. So none can move from a node that the walk has
yet to visit to a node that it has visited.
"""

from collections.abc import Sequence

import numpy as np

from sgl_jax.core.step_plan import Int32Array, IntpArray
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.pages.pool_records import NULL_PAGE, TREE
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.radix_tree import RadixTree
from sgl_jax.mem_cache.tree.tree_component import FirstPages, LockedEnd, TreeComponent
from sgl_jax.mem_cache.tree_node import TreeNode, is_on_tree, parent_of

_NODES = 128  # per slice

_NOT_SEEN = 0


def audit_cache(cache: RadixCache, locks: Sequence[tuple[TreeNode, FirstPages]]) -> None:
    """Raise `LedgerError` unless counts, locks and the eviction set are right, edges are
    contiguous, and no two nodes should be merged.

    Each path must belong to one namespace, and its edges must be listed under the keys of lookups.
    Only locks may keep tokens that are not resumable. `locks` has an entry, with first pages, for
    each lock of the live leases.
    """
    nodes, ends = cache.nodes(), [LockedEnd(*lock) for lock in locks]
    for component in cache.tree.components:
        component.audit(nodes, ends)
    cache.cursors.audit()
    _audit_places(cache.tree, nodes)


def _audit_places(tree: RadixTree, nodes: Sequence[TreeNode]) -> None:
    """Check the resumable positions of nodes, and their places on the tree."""
    if tree.resumable is not None:
        tree.resumable.audit(nodes)
    audit_shape(tree, nodes)


def audit_shape(tree: RadixTree, nodes: Sequence[TreeNode]) -> None:
    """Check the places of nodes on the tree."""
    for node in nodes:
        if node.parent is None or node.end != node.parent.end + len(node.key):
            raise LedgerError(
                f"{node!r} does not continue its parent {node.parent!r}", node.values[0]
            )
        if not tree.is_listed(node):
            raise LedgerError(
                f"{node!r} is not where lookups of its tokens and namespace end, or is of another "
                f"namespace than its parent {node.parent!r}",
                node.values[0],
            )
        if tree.may_merge(node.parent, node):
            raise LedgerError(f"{node!r} is not merged with {node.parent!r}", node.values[0])


class CacheWalk:
    """One walk over the nodes of `cache`."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._allocators = allocators = cache.allocators
        self._num_moved = [allocator.num_moved for allocator in allocators]
        # By pool and page: a number for the component and the visited node that had the page.
        self._seen: list[IntpArray] = [
            np.zeros(allocator.num_pages, np.intp) for allocator in allocators
        ]
        self._visited: list[TreeNode] = []
        self._visited_ids = {cache.tree.root.node_id}
        self._next = list(cache.tree.root.children.values())

    @property
    def has_nodes(self) -> bool:
        return bool(self._next)

    def check_some(self, locks: Sequence[tuple[TreeNode, FirstPages]]) -> None:
        """Check the next nodes, or raise `LedgerError`. `locks` has each lease's present lock."""
        first = len(self._visited)
        for _ in range(min(_NODES, len(self._next))):
            self._visit(self._next.pop())
        nodes = self._visited[first:]
        ends = [LockedEnd(*lock) for lock in locks]
        components = self._cache.tree.components
        in_pools = [each for each in components if 0 <= each.pool < len(self._allocators)]
        # Note the pages of all nodes before any check: else they would be reported as missing.
        noted = [self._note_pages(each, nodes, first) for each in in_pools]
        for component, pages in zip(in_pools, noted, strict=True):
            self._check_pages(component.pool, *pages)
        for component in components:
            component.audit_nodes(nodes, ends)
        _audit_places(self._cache.tree, nodes)

    def check_rest(self, pool: int) -> None:
        """Raise `LedgerError` if the tree owns a page that no node has; call it after all nodes."""
        is_missed = self._allocators[pool].given_before(self._num_moved[pool])
        is_missed &= self._seen[pool] == _NOT_SEEN
        self._refuse(is_missed.nonzero()[0], pool, "the tree owns pages that no node has")

    def _visit(self, node: TreeNode) -> None:
        """Visit `node`, or the highest unvisited node above it, and list its children."""
        if node.node_id in self._visited_ids:
            return
        if not is_on_tree(node):
            # It was removed, without children, or merged into its only child. Before that, a part
            # of its edge may have moved to a new node above it.
            self._visited_ids.add(node.node_id)
            self._next.extend((*node.children.values(), parent_of(node)))
            return
        while node.parent is not None and node.parent.node_id not in self._visited_ids:
            node = node.parent
        self._visited_ids.add(node.node_id)
        self._visited.append(node)
        self._next.extend(node.children.values())

    def _note_pages(
        self, component: TreeComponent, nodes: Sequence[TreeNode], first: int
    ) -> tuple[Int32Array, IntpArray, IntpArray]:
        """Return the pages of `nodes`, their numbers, which are noted, and the numbers noted
        before. `first` is the index of the first of `nodes` in the list of visited nodes."""
        seen, pages = self._seen[component.pool], component.pages_of(nodes)
        lens = [len(node.values[component.index]) for node in nodes]
        places = np.repeat(np.arange(first, first + len(nodes)), lens)[pages != 0]
        pages = pages[pages != 0]
        numbers = places * len(self._cache.tree.components) + component.index + 1
        existing = np.where((pages > 0) & (pages < len(seen)), pages, NULL_PAGE)
        before = seen[existing]
        seen[existing] = numbers
        return pages, numbers, before

    def _check_pages(
        self, pool: int, pages: Int32Array, numbers: IntpArray, before: IntpArray
    ) -> None:
        """Check that the tree owns each page, and that no other node has it."""
        seen = self._seen[pool]
        if len(pages) and not 0 < pages.min() <= pages.max() < len(seen):
            raise LedgerError(f"the tree has pages that do not exist: {pages.min(), pages.max()}")
        owned = self._allocators[pool].owners_of(pages)
        self._refuse(pages[owned != TREE], pool, "nodes have pages that the tree does not own")
        self._check_seen(pages, before, pool)
        self._refuse(pages[seen[pages] != numbers], pool, "two nodes have the same pages")

    def _check_seen(self, pages: Int32Array, before: IntpArray, pool: int) -> None:
        num_components = len(self._cache.tree.components)
        for number in np.unique(before[before != _NOT_SEEN]).tolist():
            place, index = divmod(number - 1, num_components)
            other = self._visited[place]
            if is_on_tree(other):
                shared = np.intersect1d(pages[before == number], other.values[index])
                self._refuse(shared, pool, f"{other!r} and another node have the same pages")

    def _refuse(self, pages: Int32Array | IntpArray, pool: int, what: str) -> None:
        if len(pages):
            text = self._allocators[pool].describe(pages.astype(np.int32))
            raise LedgerError(f"{what}: {text}", pages.tolist())

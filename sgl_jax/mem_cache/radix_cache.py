"""The prefix cache on the radix tree, for models whose layers all attend to every token."""

from collections.abc import Sequence

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.adaptive_policy import AdaptivePolicy
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction_policy import EVICTION_POLICIES, EvictionPolicy, LruPolicy
from sgl_jax.mem_cache.full_component import FullComponent
from sgl_jax.mem_cache.page_allocator import PageAllocator
from sgl_jax.mem_cache.prefix_cache import PrefixCache, PrefixMatch
from sgl_jax.mem_cache.prefix_cursor import PrefixCursor
from sgl_jax.mem_cache.radix_tree import RadixTree
from sgl_jax.mem_cache.tree_component import LeaseOffer
from sgl_jax.mem_cache.tree_node import TreeNode


class RadixCache(PrefixCache):
    """A radix tree with one component, FULL. What the methods do is said in `PrefixCache`.

    `num_evicted` starts above 0 where the cache takes the place of another. `eviction_policy` is
    one of `EVICTION_POLICIES`; raises `ValueError` if it is not.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        num_evicted: int = 0,
        *,
        eviction_policy: str = "adaptive",
    ) -> None:
        self._policy = _make_policy(eviction_policy, allocator.num_pages, page_size)
        self._full = FullComponent(0, allocator, page_size, self._policy)
        self.tree = RadixTree(page_size, [self._full], self._policy)
        self._num_evicted = num_evicted

    @property
    def num_evicted(self) -> int:
        return self._num_evicted

    @property
    def num_evictable(self) -> int:
        return self._full.num_evictable

    @property
    def num_protected(self) -> int:
        return self._full.num_protected

    @property
    def num_locks(self) -> int:
        return self.tree.num_locks

    @property
    def num_locked_tokens(self) -> int:
        return self.tree.num_locked_tokens

    def peek(self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None) -> int:
        _, length = self.tree.peek(_contiguous(tokens), namespace, start)
        return length

    def follow(
        self, tokens: Int32Array, namespace: str, tag: int, below: TreeNode | None = None
    ) -> PrefixCursor:
        return self.tree.cursors.follow(_contiguous(tokens), namespace, tag, below)

    def unfollow(self, cursor: PrefixCursor) -> None:
        self.tree.cursors.unfollow(cursor)

    def take_moved(self) -> Sequence[PrefixCursor]:
        return self.tree.cursors.take_moved()

    @property
    def followed_nodes(self) -> Sequence[TreeNode | None]:
        return self.tree.cursors.nodes

    def next_key(self, node: TreeNode | None, tokens: Int32Array, namespace: str) -> bytes | None:
        return self.tree.child_key(node or self.tree.root, tokens, namespace)

    def is_awaited(self, node: TreeNode | None, next_key: bytes | None) -> bool:
        parent = node or self.tree.root
        return next_key in parent.children or self.tree.cursors.has_filed(parent, next_key)

    def match_prefix(
        self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None
    ) -> PrefixMatch:
        # Read before the lock moves: `start` may then become one with what follows it.
        first = 0 if start is None else start.end // self.tree.page_size
        node = self.tree.match(_contiguous(tokens), namespace, start)
        if node is None:
            return PrefixMatch(0, np.zeros(0, np.int32), None)
        return PrefixMatch(node.end, self.pages_to(node)[first:], node)

    def accept(self, tokens: Int32Array, offer: LeaseOffer) -> PrefixMatch | None:
        start = offer.node
        node = self.tree.insert(_contiguous(tokens), offer, start)
        # Before the lock moves: `start` may then become one with what follows it.
        pages = self._full.pages_of(self.tree.path_to(node, start))
        if start is None:
            self.tree.lock(node)
        else:
            self.tree.move_lock(start, node)
        return PrefixMatch(node.end, pages, node)

    def unlock(self, node: TreeNode) -> None:
        self.tree.unlock(node)

    def evict(self, num_pages: int) -> int:
        evicted = self.tree.evict(self._full, num_pages)
        self._num_evicted += evicted
        return evicted

    def reset(self) -> None:
        if self.num_protected:
            raise LedgerError(f"cannot reset: {self.num_protected} pages are locked")
        self.evict(self.num_evictable)
        self._policy.clear()

    def pages_to(self, node: TreeNode) -> Int32Array:
        return self._full.pages_of(self.tree.path_to(node))

    def nodes(self) -> Sequence[TreeNode]:
        return list(self.tree.nodes())

    def held_pages(self) -> Int32Array:
        return self._full.pages_of(self.nodes())

    def audit(self, locked_nodes: Sequence[TreeNode]) -> None:
        """Prove counts, locks and the eviction set, that edges follow one another, and that none
        are apart that should be one.

        Each path must be of one namespace, and its edges listed under the keys that lookups use.
        """
        nodes = self.nodes()
        self._full.audit(nodes, locked_nodes)
        self.tree.cursors.audit()
        for node in nodes:
            if node.parent is None or node.end != node.parent.end + len(node.key):
                raise LedgerError(
                    f"{node!r} does not continue its parent {node.parent!r}", node.values[0]
                )
            if not self.tree.is_listed(node):
                raise LedgerError(
                    f"{node!r} is not where lookups of its tokens and namespace end, or is of "
                    f"another namespace than its parent {node.parent!r}",
                    node.values[0],
                )
            if self.tree.may_merge(node.parent, node):
                raise LedgerError(f"{node!r} is not merged with {node.parent!r}", node.values[0])


def _make_policy(name: str, num_pages: int, page_size: int) -> EvictionPolicy:
    if name not in EVICTION_POLICIES:
        raise ValueError(f"eviction_policy must be one of {EVICTION_POLICIES}, got {name!r}")
    return AdaptivePolicy(num_pages, page_size) if name == "adaptive" else LruPolicy()


def _contiguous(tokens: Int32Array) -> Int32Array:
    return np.ascontiguousarray(tokens, dtype=np.int32)

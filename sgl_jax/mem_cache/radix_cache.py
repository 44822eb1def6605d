"""The prefix cache of a rank: it remembers the KV of token prefixes between requests.

Matching is split in two: `peek` only reads (routing, admission), `match_prefix` locks what it
found and needs one `unlock` for each call. A prefix is kept under a namespace, "" by default, and
found under that namespace alone. `ChunkCache` keeps nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.adaptive_policy import AdaptivePolicy
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction_policy import EVICTION_POLICIES, LruPolicy
from sgl_jax.mem_cache.full_component import FullComponent
from sgl_jax.mem_cache.page_allocator import PageAllocator
from sgl_jax.mem_cache.radix_tree import RadixTree
from sgl_jax.mem_cache.tree_component import LeaseOffer
from sgl_jax.mem_cache.tree_node import TreeNode


class PrefixMatch(NamedTuple):
    """A locked prefix: its length in tokens (whole pages), its pages, and the node locked.

    If a lock has moved there from a node on the way, `pages` are those behind that node.
    """

    length: int
    pages: Int32Array  # [length / page_size], less those in front of that node
    node: TreeNode | None  # None if length is 0: then nothing is locked


class RadixCache:
    """A radix tree with one component, FULL, for models whose layers all attend to every token.

    Counts are pages. Where a `start` is given, it is a node that the asking lease has locked, and
    known to lie on the path of the tokens: only what is below it is looked at.

    Args:
        allocator: of the rank.
        page_size: tokens.
        num_evicted: above 0 where the cache takes the place of another.
        eviction_policy: one of `EVICTION_POLICIES`; raises `ValueError` if it is not.

    Attributes:
        tree: the core, which counts the locks taken and not yet undone.
        cursors: keep track of how much of some tokens the cache holds.
        num_evicted: pages given back by eviction since the start.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        num_evicted: int = 0,
        *,
        eviction_policy: str = "adaptive",
    ) -> None:
        if eviction_policy not in EVICTION_POLICIES:
            raise ValueError(
                f"eviction_policy must be one of {EVICTION_POLICIES}, got {eviction_policy!r}"
            )
        is_adaptive = eviction_policy == "adaptive"
        self._policy = (
            AdaptivePolicy(allocator.num_pages, page_size) if is_adaptive else LruPolicy()
        )
        self._full = FullComponent(0, allocator, page_size, self._policy)
        self.tree = RadixTree(page_size, [self._full], self._policy)
        self.cursors = self.tree.cursors
        self.num_evicted = num_evicted

    @property
    def num_evictable(self) -> int:
        """Pages the cache could give back now."""
        return self._full.num_evictable

    @property
    def num_protected(self) -> int:
        """Pages of the cache that live leases have locked."""
        return self._full.num_protected

    def peek(self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None) -> int:
        """How many tokens `match_prefix` would find. Changes nothing, not even ages."""
        _, length = self.tree.peek(_contiguous(tokens), namespace, start)
        return length

    def next_key(self, node: TreeNode | None, tokens: Int32Array, namespace: str) -> bytes | None:
        """The `next_key` of a cursor that ends at `node` (None: nothing matched), where `tokens`,
        at least a page, come next."""
        return self.tree.child_key(node or self.tree.root, tokens, namespace)

    def is_awaited(self, node: TreeNode | None, next_key: bytes | None) -> bool:
        """Whether what `next_key` tells to come behind `node` would be of use if it were accepted.

        So it is if the walk of a cursor ends there for want of it; or if the cache has it from
        elsewhere by now.
        """
        parent = node or self.tree.root
        return next_key in parent.children or self.cursors.has_filed(parent, next_key)

    def match_prefix(
        self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None
    ) -> PrefixMatch:
        """Find and lock the longest cached prefix of `tokens`; a lock of `start` moves there."""
        # Read before the lock moves: `start` may then become one with what follows it.
        first = 0 if start is None else start.end // self.tree.page_size
        node = self.tree.match(_contiguous(tokens), namespace, start)
        if node is None:
            return PrefixMatch(0, np.zeros(0, np.int32), None)
        return PrefixMatch(node.end, self.pages_to(node)[first:], node)

    def accept(self, tokens: Int32Array, offer: LeaseOffer) -> PrefixMatch | None:
        """Keep `tokens` (whole pages), taking over the offered pages that are new to the cache.

        Answers the prefix as the cache now holds it, or None if it keeps nothing. It is locked:
        the lock of `offer.node` moves there, if there is one, and `pages` are those behind it.
        """
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
        """Undo one lock taken by `match_prefix` or `accept`."""
        self.tree.unlock(node)

    def evict(self, num_pages: int) -> int:
        """Free exactly `num_pages`, or all that are not locked; returns how many."""
        evicted = self.tree.evict(self._full, num_pages)
        self.num_evicted += evicted
        return evicted

    def reset(self) -> None:
        """Evict everything, and forget how it was used. Raises `LedgerError` if a lock is held."""
        if self.num_protected:
            raise LedgerError(f"cannot reset: {self.num_protected} pages are locked")
        self.evict(self.num_evictable)
        self._policy.clear()

    def pages_to(self, node: TreeNode) -> Int32Array:
        """The pages of the prefix that ends at `node`, in token order."""
        return self._full.pages_of(self.tree.path_to(node))

    def nodes(self) -> Sequence[TreeNode]:
        """All nodes that hold something, parents before children."""
        return list(self.tree.nodes())

    def held_pages(self) -> Int32Array:
        """All pages the cache holds, in no particular order."""
        return self._full.pages_of(self.nodes())

    def audit(self, locked_nodes: Sequence[TreeNode]) -> None:
        """Prove counts, locks and the eviction set, that edges follow one another, and that none
        are apart that should be one. Raises `LedgerError` on a difference.

        Each path must be of one namespace, and its edges listed under the keys that lookups use.
        `locked_nodes` are those of the live leases, one for each lock.
        """
        nodes = self.nodes()
        self._full.audit(nodes, locked_nodes)
        self.cursors.audit()
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


class ChunkCache(RadixCache):
    """Keeps nothing between requests: its tree stays empty, and every lease owns all its pages."""

    def next_key(self, node: TreeNode | None, tokens: Int32Array, namespace: str) -> bytes | None:
        """None: no cursor goes on."""
        return None

    def is_awaited(self, node: TreeNode | None, next_key: bytes | None) -> bool:
        """Never: nothing is accepted."""
        return False

    def accept(self, tokens: Int32Array, offer: LeaseOffer) -> PrefixMatch | None:
        """None: nothing is kept."""
        return None


def _contiguous(tokens: Int32Array) -> Int32Array:
    return np.ascontiguousarray(tokens, dtype=np.int32)

"""The prefix cache of a rank: it keeps the KV of token prefixes between requests.

`peek` is read-only (for routing and admission). `match_prefix` locks its match and needs one
`unlock` for each call. A prefix is stored under a namespace, "" by default, and found only under
that namespace. `ChunkCache` keeps nothing.

Pages are int32[groups, n], a row for each cache group of the model. A match ends at a resumable
position: FULL groups have all its pages, a window the pages that the next token reads. A lease
locks these, and unlocks a window's pages as its tokens fill the window (`unlock_passed`). Its
`first_pages` give, for each group, the first page that its row still lists.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.cache_groups import CacheGroup
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.adaptive_policy import AdaptivePolicy
from sgl_jax.mem_cache.eviction.eviction_policy import EVICTION_POLICIES, EvictionPolicy
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.full_component import BareTokens, FullComponent
from sgl_jax.mem_cache.tree.prefix_cursor import common_prefix_len
from sgl_jax.mem_cache.tree.radix_tree import RadixTree
from sgl_jax.mem_cache.tree.tree_component import FirstPages, LeaseOffer, LockedEnd
from sgl_jax.mem_cache.tree.window_component import WindowComponent, lookback_pages
from sgl_jax.mem_cache.tree_node import TreeNode

_IN_NO_POOL = -1


class PrefixMatch(NamedTuple):
    """A locked prefix: its length in tokens (whole pages), its pages, and the locked node.

    If a lock moved there from a node on the path, `pages` are the pages after that node. For
    windows, `match_prefix` returns the locked pages, with 0 before them; `accept` returns all
    present pages.
    """

    length: int
    pages: Int32Array  # [groups, length / page_size], excluding pages before that node
    node: TreeNode | None  # None if length is 0: nothing is locked


class RadixCache:
    """A radix tree with a component for each cache group, at most one of them FULL.

    Counts are in pages. A `start` argument is a node on the path of the tokens that the calling
    lease has locked: only nodes below it are visited.

    Args:
        groups: cache groups of the model, at least one.
        allocators: allocators by pool number. Groups may share one.
        page_size: page size in tokens.
        num_evicted: initial count; above 0 if the cache replaces another.
        eviction_policy: one of `EVICTION_POLICIES`. Raise `ValueError` otherwise, or for invalid
            `groups`.

    Attributes:
        tree: the core, which counts the locks taken and not yet undone.
        cursors: track the cached length of waiting prompts.
        num_evicted: pages evicted since the start, in all pools.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        allocators: Sequence[PageAllocator],
        page_size: int,
        num_evicted: int = 0,
        *,
        eviction_policy: str = "adaptive",
    ) -> None:
        if eviction_policy not in EVICTION_POLICIES:
            raise ValueError(
                f"eviction_policy must be one of {EVICTION_POLICIES}, got {eviction_policy!r}"
            )
        full_groups = [number for number, each in enumerate(groups) if each.sliding_window is None]
        if not groups or len(full_groups) > 1:
            raise ValueError(
                f"a prefix tree has at least one cache group and at most one without a window, got "
                f"{[each.sliding_window for each in groups]}"
            )
        self._num_groups = len(groups)
        self._allocators = allocators
        # Evict tokens by the policy of FULL's pool, or of the first pool.
        num_pages = allocators[groups[full_groups[0]].pool if full_groups else 0].num_pages
        self._policy = (
            AdaptivePolicy(num_pages, page_size)
            if eviction_policy == "adaptive"
            else EvictionPolicy()
        )
        self._full: FullComponent
        if full_groups:
            number, pool = full_groups[0], groups[full_groups[0]].pool
            self._full = FullComponent(
                0, allocators[pool], page_size, self._policy, group=number, pool=pool
            )
        else:
            self._full = BareTokens(0, allocators[0], page_size, self._policy, pool=_IN_NO_POOL)
        windows: list[WindowComponent] = []
        for number, group in enumerate(groups):
            if group.sliding_window is not None:
                windows.append(
                    WindowComponent(
                        len(windows) + 1,
                        allocators[group.pool],
                        page_size,
                        lookback_pages(group.sliding_window, page_size),
                        self._policy.num_classes,
                        group=number,
                        pool=group.pool,
                        is_recurrent=group.is_recurrent,
                    )
                )
        self._windows = tuple(windows)
        self.tree = RadixTree(page_size, self._full, self._policy, windows)
        self.cursors = self.tree.cursors
        self.num_evicted = num_evicted

    @property
    def num_evictable(self) -> list[int]:
        """Return how many pages of each pool the cache could free now."""
        if not self._windows:
            return [self._full.num_evictable]
        return [self.tree.num_evictable(pool) for pool in range(len(self._allocators))]

    @property
    def num_protected(self) -> list[int]:
        """Return how many pages of each pool the cache holds and live leases have locked."""
        if not self._windows:
            return [self._full.num_protected]
        components = self.tree.components
        return [
            sum(each.num_protected for each in components if each.pool == pool)
            for pool in range(len(self._allocators))
        ]

    def peek(self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None) -> int:
        """Return how many tokens `match_prefix` would find, without changing even ages."""
        _, length = self.tree.peek(_contiguous(tokens), namespace, start)
        return length

    def next_key(self, node: TreeNode | None, tokens: Int32Array, namespace: str) -> bytes | None:
        """Return the key of `node`'s (None: the root's) child for `tokens`, a page or more."""
        return self.tree.child_key(node or self.tree.root, tokens, namespace)

    def is_awaited(self, node: TreeNode | None, next_key: bytes | None) -> bool:
        """Return whether a child under `next_key` after `node` would be useful if accepted: a
        cursor's walk ends there without it, or another request has cached it by now."""
        parent = node or self.tree.root
        if parent.is_withdrawn:
            return False
        is_there = next_key in parent.children
        return is_there or self.cursors.waiting_for(parent, next_key) is not None

    def awaited_lens(
        self, node: TreeNode | None, next_key: bytes | None, tokens: Int32Array, most: int
    ) -> list[int]:
        """Return how many of `tokens`, in whole pages, each of at most `most` cursors awaits after
        `node`. Their walks end there because the child under `next_key` is missing."""
        parent = node or self.tree.root
        return [
            common_prefix_len(cursor.tokens[parent.end :], tokens)
            // self.tree.page_size
            * self.tree.page_size
            for cursor in self.cursors.filed(parent, next_key, most)
        ]

    def match_prefix(
        self,
        tokens: Int32Array,
        namespace: str = "",
        start: TreeNode | None = None,
        first_pages: FirstPages = None,
    ) -> PrefixMatch:
        """Lock the longest resumable prefix of `tokens`; any lock of `start` moves to its end.
        `first_pages` are the lease's first pages for that lock."""
        # Read before the lock moves, since `start` may then merge with the next node.
        first = 0 if start is None else start.end // self.tree.page_size
        node = self.tree.match(_contiguous(tokens), namespace, start, first_pages)
        if node is None:
            return PrefixMatch(0, np.zeros((self._num_groups, 0), np.int32), None)
        length, pages = node.end, self._pages_behind(node, first)
        self.drop_unread(pages)
        self.tree.settle()
        return PrefixMatch(length, pages, node)

    def drop_unread(self, pages: Int32Array) -> None:
        """Zero the pages that the token after a prefix does not read, since no lock covers them.
        `pages` int32[groups, n] are the prefix's last pages."""
        for window in self._windows:
            num_unread = pages.shape[1] - window.num_pages
            pages[window.group, : max(num_unread, 0)] = 0

    def accept(self, tokens: Int32Array, offer: LeaseOffer) -> PrefixMatch | None:
        """Keep `tokens` (whole pages), and take the offered pages that the cache lacks.

        Return the prefix as the cache now holds it, or None if it keeps nothing, because it cannot
        or `offer.node` is withdrawn. The prefix is locked: any lock of `offer.node` moves there,
        and `pages` are the pages after that node. If the returned page differs from the offered
        page, or is 0, the offered page stays with the lease.
        """
        start = offer.node
        node = self.tree.insert(_contiguous(tokens), offer, start)
        if node is None:
            return None
        # Read before the lock moves, since `start` may then merge with the next node.
        first = 0 if start is None else start.end // self.tree.page_size
        if start is None:
            self.tree.lock(node, offer.first_pages)
        else:
            self.tree.move_lock(start, node, offer.first_pages)
        self.tree.settle()  # some of the taken pages may be dead
        return PrefixMatch(node.end, self._pages_behind(node, first), node)

    def withdraw(self, tokens: Int32Array, namespace: str, length: int) -> None:
        """Withdraw the prefix `tokens` past its first `length` tokens, in whole pages, from
        matches. Pages after that, also of longer prefixes, are freed once no lease locks them."""
        page_size = self.tree.page_size
        self.tree.withdraw(_contiguous(tokens), namespace, length // page_size * page_size)
        self.tree.settle()

    def finds(self, node: TreeNode | None) -> bool:
        """Return whether matches find the prefix that ends at `node`, which a lease has locked."""
        return node is None or not node.is_withdrawn

    def unlock(self, node: TreeNode, first_pages: FirstPages = None) -> None:
        """Undo one lock of `match_prefix` or `accept`, except what `unlock_passed` unlocked."""
        self.tree.unlock(node, first_pages)
        self.tree.settle()

    def unlock_passed(self, node: TreeNode, group: int, first: int, end: int) -> None:
        """Unlock pages [first, end) of a sliding-window group, for a lease that ends at `node`.
        Skip pages that it has not locked, before its window or past its end."""
        for window in self._windows:
            if window.group == group:
                window.unlock_passed(node, first, end)
        self.tree.unlock_passed(node)
        self.tree.settle()

    def evict(self, num_pages: int, pool: int = 0) -> int:
        """Free `num_pages` of the pool, or all unlocked pages; return the number freed. With
        windows, up to one more page of tokens, and tokens not resumable any more, may be freed."""
        before = sum(self.num_evictable)
        evicted = self.tree.evict(num_pages, pool)
        self.num_evicted += before - sum(self.num_evictable)
        return evicted

    def make_room(self, counts: Sequence[int], num_ahead: Sequence[int] | None = None) -> bool:
        """Evict until each pool has `counts[pool]` free pages; return whether it has.

        If a pool has too few pages to evict, evict nothing of it and of the pools after it. If a
        pool lacks pages, `num_ahead[pool]` more than it lacks are evicted.
        """
        for pool, (count, allocator) in enumerate(zip(counts, self._allocators, strict=True)):
            deficit = count - allocator.num_free
            if deficit > self.num_evictable[pool]:
                return False
            if deficit > 0:
                self.evict(deficit + (num_ahead[pool] if num_ahead else 0), pool)
        return all(
            count <= allocator.num_free
            for count, allocator in zip(counts, self._allocators, strict=True)
        )

    def reset(self) -> None:
        """Evict everything and reset the policy. Raise `LedgerError` if a lock is held."""
        if self.tree.num_locks:
            raise LedgerError(f"cannot reset: {sum(self.num_protected)} pages are locked")
        # Do not save these pages to a lower tier.
        before_eviction, self.tree.before_eviction = self.tree.before_eviction, None
        for pool, num_pages in enumerate(self.num_evictable):
            self.evict(num_pages, pool)
        self.tree.before_eviction = before_eviction
        self._policy.clear()
        if self.tree.block_log is not None:
            self.tree.block_log.cleared()

    def pages_to(self, node: TreeNode) -> Int32Array:
        """Return the prefix's pages up to `node` in token order: int32[groups, n], 0 if absent."""
        return self._pages_of(self.tree.path_to(node))

    def _pages_behind(self, node: TreeNode, first: int) -> Int32Array:
        nodes, step = [], node
        while step.parent is not None and step.end > first * self.tree.page_size:
            nodes.append(step)
            step = step.parent
        num_pages = node.end // self.tree.page_size - first
        held = self._pages_of(nodes[::-1])
        pages: Int32Array = held[:, held.shape[1] - num_pages :]
        return pages

    def _pages_of(self, nodes: Sequence[TreeNode]) -> Int32Array:
        if not self._windows:
            return self._full.pages_of(nodes)[None]
        of_group = {window.group: window.pages_of(nodes) for window in self._windows}
        rows = [of_group.get(group) for group in range(self._num_groups)]
        pages: Int32Array = np.stack(
            [self._full.pages_of(nodes) if row is None else row for row in rows]
        )
        return pages

    def nodes(self) -> Sequence[TreeNode]:
        """Return all nodes but the root, parents before children."""
        return list(self.tree.nodes())

    def held_blocks(self) -> set[int]:
        """Return the hashes of all pages of tokens that matches find, as named in `BlockLog`."""
        found = (node for node in self.nodes() if not node.is_withdrawn)
        return {block for node in found for block in node.page_hashes.tolist()}

    def held_pages(self, pool: int = 0) -> Int32Array:
        """Return all pages of the pool that the cache holds, in no particular order."""
        nodes = self.nodes()
        parts = [each.pages_of(nodes) for each in self.tree.components if each.pool == pool]
        pages = np.concatenate([np.zeros(0, np.int32), *parts])
        held: Int32Array = pages[pages != 0]
        return held

    def audit(self, locks: Sequence[tuple[TreeNode, FirstPages]]) -> None:
        """Raise `LedgerError` unless counts, locks and the eviction set are right, edges are
        contiguous, and no two nodes should be merged.

        Each path must belong to one namespace, and its edges must be listed under the keys of
        lookups. Only locks may keep tokens that are not resumable. `locks` has an entry, with first
        pages, for each lock of the live leases.
        """
        nodes, ends = self.nodes(), [LockedEnd(*lock) for lock in locks]
        for component in self.tree.components:
            component.audit(nodes, ends)
        self.cursors.audit()
        self._audit_shape(nodes)

    def audit_nodes(
        self, nodes: Sequence[TreeNode], locks: Sequence[tuple[TreeNode, FirstPages]]
    ) -> None:
        """Check only these nodes in the way of `audit`, without the sums over all nodes."""
        ends = [LockedEnd(*lock) for lock in locks]
        for component in self.tree.components:
            component.audit_nodes(nodes, ends)
        self._audit_shape(nodes)

    def _audit_shape(self, nodes: Sequence[TreeNode]) -> None:
        """Check the resumable positions of nodes, and their places on the tree."""
        if self.tree.resumable is not None:
            self.tree.resumable.audit(nodes)
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
        return None

    def is_awaited(self, node: TreeNode | None, next_key: bytes | None) -> bool:
        return False

    def awaited_lens(
        self, node: TreeNode | None, next_key: bytes | None, tokens: Int32Array, most: int
    ) -> list[int]:
        return []

    def accept(self, tokens: Int32Array, offer: LeaseOffer) -> PrefixMatch | None:
        """Return None and keep nothing: the lease still owns all pages that it offered."""
        return None


def _contiguous(tokens: Int32Array) -> Int32Array:
    return np.ascontiguousarray(tokens, dtype=np.int32)

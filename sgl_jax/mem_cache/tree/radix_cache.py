"""The prefix cache of a rank: it keeps the KV of token prefixes between requests.

A prefix is stored under a namespace, "" by default, and found only under that namespace.

Pages are int32[groups, n], a row for each cache group of the model. A match ends at a resumable
position: FULL groups have all its pages, a window the pages that the next token reads. A lease
locks these, and unlocks a window's pages as its tokens fill the window (`unlock_passed`). Its
`first_pages` give, for each group, the first page that its row still lists.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.adaptive_policy import AdaptivePolicy
from sgl_jax.mem_cache.eviction.eviction_policy import EVICTION_POLICIES, EvictionPolicy
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.full_component import BareTokens, FullComponent
from sgl_jax.mem_cache.tree.prompt_tree import PromptTree, RankPrompts
from sgl_jax.mem_cache.tree.radix_tree import RadixTree
from sgl_jax.mem_cache.tree.tree_component import FirstPages, LeaseOffer
from sgl_jax.mem_cache.tree.window_component import WindowComponent
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
        prompts: the prompts that wait for all ranks; by default, only this cache follows them.

    Attributes:
        tree: the nodes and edges.
        cursors: track the cached length of waiting prompts.
        num_locks: locks not yet undone.
        num_locked_tokens: sum over these locks of the tokens from the root to the locked node. Both
            must equal the sums over the live leases.
        num_evicted: pages evicted since the start, in all pools.
        before_eviction: if set, gets each prefix that `evict` is about to make unusable: a node,
            and the prefix's length in tokens of the path to it.
    """

    before_eviction: Callable[[TreeNode, int], object] | None = None

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        allocators: Sequence[PageAllocator],
        page_size: int,
        num_evicted: int = 0,
        *,
        eviction_policy: str = "adaptive",
        prompts: RankPrompts | None = None,
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
        self.allocators = allocators
        # Evict tokens by the policy of FULL's pool, or of the first pool.
        pool = groups[full_groups[0]].pool if full_groups else 0
        policy = EvictionPolicy()
        if eviction_policy == "adaptive":
            most_cached = self._most_cached if len(groups) == len(full_groups) else None
            policy = AdaptivePolicy(allocators[pool].num_pages, page_size, most_cached)
        number = full_groups[0] if full_groups else 0
        group = groups[number] if full_groups else CacheGroup(None, _IN_NO_POOL)
        kind = FullComponent if full_groups else BareTokens
        self._full = kind(number, group, allocators[pool], page_size, policy)
        in_windows = [each for each in enumerate(groups) if each[0] not in full_groups]
        self._windows = tuple(
            WindowComponent(
                index, number, group, allocators[group.pool], page_size, policy.num_classes
            )
            for index, (number, group) in enumerate(in_windows, 1)
        )
        prompts = prompts or RankPrompts(PromptTree(page_size, 1), 0)
        self.tree = RadixTree(page_size, self._full, policy, prompts, self._windows)
        self.cursors = self.tree.cursors
        self.num_locks = 0
        self.num_locked_tokens = 0
        self.num_evicted = num_evicted

    def _most_cached(self) -> int:
        """Return how many pages the tree could hold: all but those that only rows hold."""
        return self.allocators[0].num_free + self._full.num_evictable + self._full.num_protected

    @property
    def num_evictable(self) -> list[int]:
        if not self._windows:
            return [self._full.num_evictable]
        components = self.tree.components
        return [
            sum(each.num_evictable for each in components if each.pool == pool)
            for pool in range(len(self.allocators))
        ]

    @property
    def num_protected(self) -> list[int]:
        """Return how many pages of each pool the cache holds and live leases have locked."""
        return [
            sum(each.num_protected for each in self.tree.components if each.pool == pool)
            for pool in range(len(self.allocators))
        ]

    # -- lookups ----------------------------------------------------------------------------

    def peek(self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None) -> int:
        """Return how many tokens `match_prefix` would find, without changing even ages."""
        return self.find(tokens, namespace, start)[1]

    def find(
        self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None
    ) -> tuple[TreeNode, int]:
        """Return a node with the longest resumable prefix on its path, and the prefix's length.
        Read-only."""
        node, length = self.tree.walk(_contiguous(tokens), namespace, start)
        if self.tree.resumable is not None:
            above = start.end if start else 0
            length, _ = self.tree.resumable.usable_len(node, length, above)
        return node, length

    def match_prefix(
        self,
        tokens: Int32Array,
        namespace: str = "",
        start: TreeNode | None = None,
        first_pages: FirstPages = None,
    ) -> PrefixMatch:
        """Lock the longest resumable prefix of `tokens` until `unlock`.

        Nothing is locked if nothing matches. A lock of `start` moves to the end of the prefix;
        `first_pages` are the lease's first pages for that lock.
        """
        tree = self.tree
        node, length = tree.walk(_contiguous(tokens), namespace, start)
        if tree.resumable is not None:
            length = tree.resumable.search(node, length, start)
        if length == 0:
            return PrefixMatch(0, np.zeros((tree.num_groups, 0), np.int32), None)
        # Read before the lock moves, since `start` may then merge with the next node.
        first = 0 if start is None else start.end // tree.page_size
        if start is not None and length == start.end:
            node = start
        else:
            node = tree.node_at(node, length)
            tree.touch(node, start)
            if tree.resumable is not None:
                tree.resumable.read(node, tree.clock)
            if start is None:
                self._lock(node)
                tree.merge_path(node)
            else:
                tree.merge_path(node, start)
                self._move_lock(start, node, first_pages)
            tree.settle()
        pages = self.tree.pages_after(node, first)
        self.drop_unread(pages)
        return PrefixMatch(length, pages, node)

    def drop_unread(self, pages: Int32Array) -> None:
        """Zero the pages that the token after a prefix does not read, since no lock covers them.
        `pages` int32[groups, n] are the prefix's last pages."""
        for window in self._windows:
            num_unread = pages.shape[1] - window.num_pages
            pages[window.group, : max(num_unread, 0)] = 0

    def next_key(self, node: TreeNode | None, tokens: Int32Array, namespace: str) -> bytes | None:
        """Return the key of `node`'s (None: the root's) child for `tokens`, a page or more."""
        return self.tree.key_at(node.end if node else 0, tokens, namespace)

    def finds(self, node: TreeNode | None) -> bool:
        """Return whether matches find the prefix that ends at `node`, which a lease has locked."""
        return node is None or not node.is_withdrawn

    # -- changes ----------------------------------------------------------------------------

    def accept(self, tokens: Int32Array, offer: LeaseOffer) -> PrefixMatch | None:
        """Keep `tokens` (whole pages), and take the offered pages that the cache lacks.

        Return the prefix as the cache now holds it, or None if it keeps nothing, because it cannot
        or `offer.node` is withdrawn. The prefix is locked: any lock of `offer.node` moves there,
        and `pages` are the pages after that node. If the returned page differs from the offered
        page, or is 0, the offered page stays with the lease.
        """
        start = offer.node
        if start is not None and start.is_withdrawn:
            return None
        node, is_new = self._insert(_contiguous(tokens), offer, start or self.tree.root)
        # Read before the lock moves, since `start` may then merge with the next node.
        first = 0 if start is None else start.end // self.tree.page_size
        if start is None:
            self._lock(node, offer.first_pages)
        else:
            self._move_lock(start, node, offer.first_pages)
        self.tree.settle()  # some of the taken pages may be dead
        pages = offer.pages[:, first:] if is_new else self.tree.pages_after(node, first)
        return PrefixMatch(node.end, pages, node)

    def _insert(
        self, tokens: Int32Array, offer: LeaseOffer, start: TreeNode
    ) -> tuple[TreeNode, bool]:
        """Make `tokens` a path. Return its last node, not locked, and whether all pages after
        `start` were taken from the offer.

        Components take the pages that they lack. Only nodes below `start` are visited, so a long
        conversation costs no more to continue than a short one.
        """
        tree = self.tree
        node, length = tree.walk(tokens, offer.namespace, start)
        node = tree.node_at(node, length)
        tree.touch(node, start)
        is_new = length < len(tokens)
        node.was_cut &= is_new
        if is_new:
            node = tree.add_child(node, tokens[length:].copy(), offer.namespace)
        # An old node may lack only window pages.
        added = [node] if tree.resumable is None else tree.path_to(node, start)
        for step in added:
            for component in tree.components:
                component.absorb(step, offer)
        if tree.resumable is not None:
            tree.resumable.added(added)
        if is_new:
            tree.recall_uses(node)
        tree.merge_path(node, start)
        return node, length == start.end and not self._windows

    def withdraw(self, tokens: Int32Array, namespace: str, length: int) -> None:
        """Withdraw the prefix `tokens` past its first `length` tokens, in whole pages, from
        matches. Pages after that, also of longer prefixes, are freed once no lease locks them."""
        page_size = self.tree.page_size
        self.tree.withdraw(_contiguous(tokens), namespace, length // page_size * page_size)
        self.tree.settle()

    def withdraw_all(self) -> None:
        """Withdraw all prefixes. Their pages are freed once no lease locks them."""
        for top in list(self.tree.root.children.values()):
            if not top.is_withdrawn:
                self.tree.withdraw(top.key, top.namespace, 0)
        self.tree.settle()

    def _lock(self, node: TreeNode, first_pages: FirstPages = None) -> None:
        self.num_locks += 1
        self.num_locked_tokens += node.end
        for component in self.tree.components:
            component.lock(node, first_pages)

    def _move_lock(self, old: TreeNode, new: TreeNode, first_pages: FirstPages = None) -> None:
        """Move one lock from `old` to `new`, which is `old` or below it. If the lock was its last,
        `old` may then be removed."""
        self.num_locked_tokens += new.end - old.end
        for component in self.tree.components:
            component.move_lock(old, new, first_pages)
        if self.tree.resumable is not None:
            self.tree.resumable.released(old)
        self.tree.merge_into_only_child(old)

    def unlock(self, node: TreeNode, first_pages: FirstPages = None) -> None:
        """Undo one lock of `match_prefix` or `accept`, except what `unlock_passed` unlocked."""
        for component in self.tree.components:
            component.unlock(node, first_pages)
        self.num_locks -= 1
        self.num_locked_tokens -= node.end
        if self.tree.resumable is not None:
            self.tree.resumable.released(node)
        self.tree.merge_into_only_child(node)
        self.tree.settle()

    def unlock_passed(self, node: TreeNode, group: int, first: int, end: int) -> None:
        """Unlock pages [first, end) of a sliding-window group, for a lease that ends at `node`.
        Skip pages that it has not locked, before its window or past its end."""
        for window in self._windows:
            if window.group == group:
                window.unlock_passed(node, first, end)
        if self.tree.resumable is not None:
            self.tree.resumable.released(node)
        self.tree.settle()

    # -- eviction ---------------------------------------------------------------------------

    def evict(self, num_pages: int, pool: int = 0) -> int:
        """Free `num_pages` of the pool, or all unlocked pages; return the number freed.

        The last victim's edge is shortened, so without windows the number is exact. With a page of
        tokens, its window pages are freed too, and so are tokens not resumable any more.
        """
        before = self.num_evictable
        target = max(before[pool] - num_pages, 0)
        while (present := self.num_evictable[pool]) > target:
            if not self._evict_some(present - target, pool):
                break
            self.tree.settle()
        self.tree.flush_dropped()
        after = self.num_evictable
        self.num_evicted += sum(before) - sum(after)
        return before[pool] - after[pool]

    def _evict_some(self, num_pages: int, pool: int) -> bool:
        """Free up to `num_pages` of the least useful pages; return False if there are none."""
        tree = self.tree
        leaf = tree.policy.next_victim(tree.clock)
        if tree.resumable is not None:
            # A pool of windows has no ages of tokens.
            least = tree.resumable.least_useful(pool, leaf, tree.policy, tree.clock)
            if least is not None:
                window, node, level = least
                is_gone = window.choose(node, num_pages, level)
                if self.before_eviction is not None:
                    length = tree.resumable.last_reader(window, node, is_gone)
                    if length:
                        self.before_eviction(node, length)
                window.tombstone(node, is_gone)
                tree.resumable.added([node])
                return True
        if leaf is None:
            return False
        if self.before_eviction is not None:
            self.before_eviction(leaf, leaf.end)
        keep = self._full.pages_to_keep(leaf, num_pages)
        if tree.resumable is not None:
            keep = tree.resumable.pages_to_keep(leaf, num_pages, pool, self._full)
        tree.trim(leaf, max(keep, tree.policy.num_kept(leaf)) * tree.page_size)
        return True

    def make_room(self, counts: Sequence[int], num_ahead: Sequence[int] | None = None) -> bool:
        """Evict until each pool has `counts[pool]` free pages, and `num_ahead[pool]` more if any
        lack. If a pool has too few pages to evict, evict nothing of it and return False."""
        for pool, (count, allocator) in enumerate(zip(counts, self.allocators, strict=True)):
            deficit = count - allocator.num_free
            if deficit > self.num_evictable[pool]:
                return False
            if deficit > 0:
                self.evict(deficit + (num_ahead[pool] if num_ahead else 0), pool)
        return True

    def reset(self) -> None:
        """Evict everything and reset the policy. Raise `LedgerError` if a lock is held."""
        if self.num_locks:
            raise LedgerError(f"cannot reset: {sum(self.num_protected)} pages are locked")
        # Do not save these pages to a lower tier.
        before_eviction, self.before_eviction = self.before_eviction, None
        for pool, num_pages in enumerate(self.num_evictable):
            self.evict(num_pages, pool)
        self.before_eviction = before_eviction
        self.tree.policy.clear()
        if self.tree.block_log is not None:
            self.tree.block_log.cleared()

    def nodes(self) -> Sequence[TreeNode]:
        return list(self.tree.nodes())


class ChunkCache(RadixCache):
    """Keeps nothing between requests: its tree stays empty, and every lease owns all its pages."""

    def next_key(self, node: TreeNode | None, tokens: Int32Array, namespace: str) -> bytes | None:
        return None

    def accept(self, tokens: Int32Array, offer: LeaseOffer) -> PrefixMatch | None:
        """Return None and keep nothing: the lease still owns all pages that it offered."""
        return None


def _contiguous(tokens: Int32Array) -> Int32Array:
    return np.ascontiguousarray(tokens, dtype=np.int32)

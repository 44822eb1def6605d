"""An eviction order that resists scans: the leaf least likely to be used again goes first.

Leaves with an equal number of uses form a class, which has a queue by age and counts its reused and
evicted pages. The estimated rate of use is the reused share divided by a power of the age. Among
the oldest leaves of all classes, the leaf with the lowest rate goes. So pages read once, as in a
scan, leave before pages read often. If use does not depend on the past, the order equals LRU.

Evicted pages are remembered for a while by a hash of their prefix (`ghost_pages.py`). A page that
returns enters the next class, as if it had stayed. So pages that return repeatedly are finally
kept, even if no cache could hold them from one use to the next. A return counts as a fraction of a
use: the fraction depends on how much longer a stay would have served it.

Shadow caches (`shadow_caches.py`) count the hits of this order, LRU, LFU and the order of expected
returns (`path_records.py`). Once another order leads, the cache follows it: leaves in the leading
shadow are evicted last. In the order of expected returns, paths that a client wants kept change
places with others of the same client (`retained_paths.py`).
"""

from collections.abc import Callable, Sequence
from math import sqrt

import numpy as np

from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.eviction_policy import EvictionPolicy, EvictionQueue, UseRun
from sgl_jax.mem_cache.eviction.ghost_pages import (
    GhostPages,
    Int64Array,
    RecalledPages,
)
from sgl_jax.mem_cache.eviction.path_records import (
    EXCHANGED,
    FIRST_CLASS,
    NUM_RETURN_CLASSES,
    PAUSE_S,
    REPLACED,
    PathEnd,
    PathRecords,
)
from sgl_jax.mem_cache.eviction.retained_paths import Rank, RetainedPaths, retention_of
from sgl_jax.mem_cache.eviction.shadow_caches import GHOSTS_PER_PAGE, ShadowCaches
from sgl_jax.mem_cache.eviction.shadow_pages import (
    ADAPTIVE,
    HALVED_AFTER,
    LRU,
    MAX_USES,
    NUM_CLASSES,
    RETURN,
)
from sgl_jax.mem_cache.tree_node import TreeNode


class AdaptivePolicy(EvictionPolicy):
    """The adaptive order for a cache of `num_pages` pages, including the null page.

    `most_cached` returns how many pages the tree could hold now; None: hits are not only limited by
    pages, and are not compared with those of LRU's shadow.
    """

    def __init__(
        self, num_pages: int, page_size: int, most_cached: Callable[[], int] | None = None
    ) -> None:
        # Queues by number of uses or, while the cache follows expected returns, by their class.
        super().__init__(2 * NUM_RETURN_CLASSES)
        self._by_return = False
        self._records = PathRecords()
        self._retained = RetainedPaths()
        self._num_pages = num_pages
        self._page_size = page_size
        self._ghosts = GhostPages(GHOSTS_PER_PAGE * num_pages)
        self._shadows = ShadowCaches(num_pages - 1, most_cached)  # without the null page
        self._path_end: TreeNode | None = None  # the last node that was used
        # Leaves in the leading shadow, evicted last: by number of uses, and by hash.
        self._kept: list[EvictionQueue[TreeNode]] = [EvictionQueue() for _ in range(MAX_USES + 1)]
        self._kept_by_hash: dict[int, tuple[TreeNode, int]] = {}
        # Leaves among these that the shadow lacks, by the hashes of those evicted in their place.
        self._exchanged: dict[int, TreeNode] = {}
        self._forget_counts()

    def _forget_counts(self) -> None:
        self._num_reused = [1.0] * NUM_CLASSES  # pages, including fractions for returns
        self._num_left = [1.0] * NUM_CLASSES  # pages
        self._num_left_since_halved = 0

    def __len__(self) -> int:
        return super().__len__() + len(self._kept_by_hash)

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._queue_of(node) or self._is_kept(node)

    def _queue_of(self, node: TreeNode) -> EvictionQueue[TreeNode]:
        return self._queues[node.return_class if self._by_return else node.num_uses]

    @property
    def num_classes(self) -> int:
        return NUM_CLASSES

    def add(self, node: TreeNode) -> None:
        if self._kept_by_hash:
            self._release(node)
        self._queue_of(node).add(node)
        if self._by_return:
            self._retained.add(node, self.now_s)

    def discard(self, node: TreeNode) -> None:
        if self._kept_by_hash:
            self._release(node)
        self._queue_of(node).discard(node)
        if self._by_return:
            self._retained.discard(node)

    def next_victim(self, now: int) -> TreeNode | None:
        """Return the first leaf of the order, or another one that is exchanged for it."""
        leaf = self._first_of_all(now)
        while leaf is not None and self._by_return:
            other = self._retained.exchange(leaf, self.now_s)
            if isinstance(other, TreeNode):
                return other
            self._give(leaf, other)
            leaf = self._first_of_all(now)
        return leaf

    def _give(self, leaf: TreeNode, rank: Rank) -> None:
        """Give the leaf the rank of one that was evicted in its place, also in the leading shadow,
        which still has that one."""
        self._expect(leaf, EXCHANGED + rank.return_class % EXCHANGED)
        leaf.used_s = rank.used_s
        num_uses = self._shadows.num_uses(rank.page_hash)
        if num_uses is not None:
            self._keep(leaf, num_uses)
            self._exchanged[rank.page_hash] = leaf

    def _first_of_all(self, now: int) -> TreeNode | None:
        """Return the first leaf that the leading shadow lacks; if it lacks none, the first leaf."""
        if self._shadows.has_changed or self._shadows.is_due:
            self._follow(self._shadows.read())
        leaf = self._first(self._queues, now)
        if not self._shadows.has_changed:
            return leaf
        while leaf is not None:
            if leaf.last_access >= self._shadows.path_used_at:
                self._end_path()  # a leaf has no locks, so its path has ended
                self._follow(self._shadows.read())
            num_uses = self._shadows.num_uses(_last_hash(leaf))
            if num_uses is None:
                return leaf
            self._keep(leaf, num_uses)
            leaf = self._first(self._queues, now)
        return self._first(self._kept, now)

    def num_kept(self, leaf: TreeNode) -> int:
        """Count the pages up to the last page with more uses in the leading shadow than the leaf's
        end; if the shadow lacks the end, up to the last page in it."""
        if not self._shadows.has_changed or leaf is self._retained.given:
            return 0
        num_uses = self._kept_by_hash[_last_hash(leaf)][1] if self._is_kept(leaf) else -1
        return self._shadows.num_used_more(leaf.page_hashes, num_uses)

    def _first(self, queues: list[EvictionQueue[TreeNode]], now: int) -> TreeNode | None:
        leaves = [leaf for queue in queues if queue.members and (leaf := queue.oldest())]
        if self._shadows.leading_policy == ADAPTIVE:
            return min(
                leaves,
                key=lambda leaf: self.rate(leaf.num_uses, leaf.last_access, now),
                default=None,
            )
        if self._shadows.leading_policy == LRU:
            return min(leaves, key=lambda leaf: (leaf.last_access, leaf.node_id), default=None)
        if self._shadows.leading_policy == RETURN:
            return max(leaves, key=self._pause_key, default=None)
        return leaves[0] if leaves else None

    def _pause_key(self, leaf: TreeNode) -> tuple[float, float, int]:
        """Order leaves by their expected pause, of equal ones the first used last."""
        return self._pause_s(leaf), -leaf.used_s, -leaf.last_access

    def _pause_s(self, node: TreeNode) -> float:
        return max(float(PAUSE_S[node.return_class]), self.now_s - node.used_s)

    def expected_pause_s(self, node: TreeNode) -> float | None:
        return self._pause_s(node) if self._by_return else None

    @property
    def retained_pages(self) -> dict[str, int]:
        paths = self._retained
        return {
            "retained_pages_exchanged": paths.num_exchanged,
            "retained_pages_evicted": paths.num_evicted,
        }

    def _is_kept(self, leaf: TreeNode) -> bool:
        if not len(leaf.page_hashes):
            return False  # the root
        return self._kept_by_hash.get(_last_hash(leaf), (None, 0))[0] is leaf

    def _keep(self, leaf: TreeNode, num_uses: int) -> None:
        self._queue_of(leaf).discard(leaf)
        self._kept[num_uses].add(leaf)
        self._kept_by_hash[_last_hash(leaf)] = leaf, num_uses

    def _release(self, leaf: TreeNode) -> None:
        if self._is_kept(leaf):
            self._kept[self._kept_by_hash.pop(_last_hash(leaf))[1]].discard(leaf)

    def _follow(self, gone: Int64Array | None) -> None:
        """Move leaves with hashes `gone`, or all if None, back to the normal queues; if the order
        changed, put all leaves into its queues."""
        for page_hash in list(self._kept_by_hash) if gone is None else gone.tolist():
            if page_hash in self._kept_by_hash:
                self.add(self._kept_by_hash[page_hash][0])
            leaf = self._exchanged.pop(page_hash, None)
            if leaf is not None and self._is_kept(leaf):
                self.add(leaf)
        if gone is None:
            self._exchanged.clear()
        follows_returns = self._shadows.leading_policy == RETURN
        if follows_returns != self._by_return:
            leaves = [leaf for queue in self._queues for leaf in queue.members.values()]
            super().clear()
            self._retained.clear()
            self._by_return = follows_returns
            for leaf in leaves:
                self.add(leaf)

    def rate(self, num_uses: int, last_access: int, now: int) -> float:
        reused, left = self._num_reused[num_uses], self._num_left[num_uses]
        age = now - last_access + 1
        # age ** 1.25 by square roots only: their results are the same on every host.
        return reused / (reused + left) / (age * sqrt(sqrt(age)))

    def begin(self, node: TreeNode) -> list[UseRun]:
        node.return_class = FIRST_CLASS
        self._go_along(node, node.last_access, was_cached=False)
        pages = self._ghosts.recall(node.page_hashes)
        if pages is None:
            return [UseRun(len(node.key), 0)]
        self._count_returned(pages, node.last_access)
        num_uses = np.zeros(len(node.page_hashes), np.int64)
        num_uses[pages.is_ghost] = np.minimum(pages.num_uses + 1, NUM_CLASSES - 1)
        # A use of a page also uses all pages before it, even if fewer of their uses are remembered.
        num_uses = np.maximum.accumulate(num_uses[::-1])[::-1]
        node.num_uses = int(num_uses[-1])
        return _runs(num_uses, self._page_size)

    def _count_returned(self, pages: RecalledPages, now: int) -> None:
        """Count each return as a fraction of a use.

        To serve a return at age b, a page evicted at age a would have had to stay b / a times as
        long. The return counts as (a / b) ** 3 of a use. A smaller fraction is too little for large
        caches; a larger fraction is too much for small caches.
        """
        self.num_returned += len(pages.num_uses)
        share = (pages.left_at - pages.last_access + 1) / (now - pages.last_access + 1)
        returned = np.bincount(pages.num_uses, share * share * share, NUM_CLASSES)
        for num_uses, count in enumerate(returned.tolist()):
            self._num_reused[num_uses] += count

    def use(self, node: TreeNode, now: int) -> None:
        """Count a reuse and move the node to the next class."""
        self._go_along(node, now, was_cached=True)
        if node.return_class == REPLACED or node.return_class >= EXCHANGED:
            self._expect(node, FIRST_CLASS)
        self._num_reused[node.num_uses] += len(node.page_hashes)
        if node.num_uses < NUM_CLASSES - 1:
            if not node.children:
                self.discard(node)
            node.num_uses += 1

    def _go_along(self, node: TreeNode, now: int, *, was_cached: bool) -> None:
        """Add `node` to the open path if its parent was used last; otherwise start another path."""
        if node.parent is not self._path_end:
            self._end_path()
            if self._shadows.is_due:
                self._follow(self._shadows.read())
        self._shadows.use(node.page_hashes, now, self.now_s, was_cached=was_cached)
        node.used_s = self.now_s
        self._path_end = node

    def _end_path(self) -> None:
        if self._path_end is not None:
            self._shadows.end_path()
            self._path_end = None

    def ended(self, path: Sequence[TreeNode], num_prompt: int, end: PathEnd) -> None:
        own = retention_of(end.holder, end.keep_s, self.now_s)
        for node in path:
            node.retention = own.joined(node.retention)
        if not end.is_expected:
            return
        self._end_path()
        hashes = np.concatenate([node.page_hashes for node in path]).view(np.int64)
        expected = self._records.ended(hashes, num_prompt, path[-1], end, self.now_s)
        rest = expected.former
        if rest is not None and rest in self:
            on_path = {node.node_id for node in path}
            while (
                rest is not None
                and rest.node_id not in on_path
                and len(rest.children) < 2
                and rest.holder is not None
            ):
                self._expect(rest, REPLACED)
                rest = rest.parent
        num_shared = _num_shared(path, is_last=end.is_last)
        for number, node in enumerate(path):
            is_own = number >= num_shared
            if end.is_last and is_own:
                node.retention = own
            self._expect(node, expected.return_class if is_own else expected.measured_class)
        replaced = _own_part(expected.replaced, expected.former)
        if len(replaced):
            self._shadows.expect(replaced, REPLACED)
        num_pages = sum(len(node.page_hashes) for node in path[:num_shared])
        if num_pages:
            self._shadows.expect(hashes[:num_pages], expected.measured_class)
        self._shadows.expect(hashes[num_pages:], expected.return_class)

    def _expect(self, node: TreeNode, return_class: int) -> None:
        is_listed = node in self
        if is_listed:
            self.discard(node)
        node.return_class = return_class
        if is_listed:
            self.add(node)

    def drop(self, leaf: TreeNode, keep_tokens: int, now: int) -> None:
        if keep_tokens and self._is_kept(leaf):
            self.add(leaf)  # the leading shadow may not hold the new end
        keep = keep_tokens // self._page_size
        gone = leaf.page_hashes[keep:]
        self._retained.dropped(leaf, gone, self.now_s)
        self._ghosts.remember(gone, leaf.num_uses, leaf.last_access, now)
        self._num_left[leaf.num_uses] += len(gone)
        self._num_left_since_halved += len(gone)
        if self._num_left_since_halved >= HALVED_AFTER * self._num_pages:
            self._num_left_since_halved = 0
            # To 1, not to 0: a rate of 0 would never change the order again.
            self._num_reused = [(count + 1) / 2 for count in self._num_reused]
            self._num_left = [(count + 1) / 2 for count in self._num_left]

    def audit(self) -> None:
        super().audit()
        for queue in self._kept:
            queue.audit()
        self._retained.audit()
        if sum(map(len, self._kept)) != len(self._kept_by_hash):
            raise LedgerError("leaves that the leading shadow keeps are not listed by their hash")

    def clear(self) -> None:
        super().clear()
        for queue in self._kept:
            queue.clear()
        self._kept_by_hash.clear()
        self._exchanged.clear()
        self._ghosts.clear()
        self._shadows.clear()
        self._records.clear()
        self._retained.clear()
        self._by_return = False
        self._path_end = None
        self._forget_counts()


def _last_hash(node: TreeNode) -> int:
    """Return the hash of the prefix up to the edge's end, the leaf's key in the shadows."""
    return int(node.page_hashes.view(np.int64)[-1])


def _own_part(hashes: Int64Array, leaf: TreeNode | None) -> Int64Array:
    """Return the hashes of a path's end after the last node, from `leaf` up, with other holders'
    paths."""
    node = leaf
    while node is not None and node.parent is not None:
        if node.holder is None:
            found = np.flatnonzero(hashes == _last_hash(node))
            return hashes[found[-1] + 1 :] if len(found) else hashes
        node = node.parent
    return hashes


def _num_shared(path: Sequence[TreeNode], *, is_last: bool) -> int:
    """Count the nodes of a path up to the last one on which its hints do not count: one with paths
    of other holders or, if the conversation ended, with any other path."""
    for number in range(len(path), 0, -1):
        node, is_end = path[number - 1], number == len(path)
        if node.holder is None or (is_last and len(node.children) > (not is_end)):
            return number
    return 0


def _runs(num_uses: Int64Array, page_size: int) -> list[UseRun]:
    ends = np.append(np.flatnonzero(np.diff(num_uses)) + 1, len(num_uses))
    lengths = np.diff(ends, prepend=0) * page_size
    return list(map(UseRun, lengths.tolist(), num_uses[ends - 1].tolist()))

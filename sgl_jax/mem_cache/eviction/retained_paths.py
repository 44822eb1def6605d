"""Evicts other paths of the same holder in place of a path that the holder wants kept.

Clients may ask for a path to be kept for a time. If such a path is to be evicted within its time,
it is *exchanged*: the holder's least recently used path with a shorter retention loses as many
pages in its place, and the kept path takes the rank that the other one had. So the pages that a
holder has do not depend on its hints, and other holders lose nothing by them. A holder that wants
all of its paths kept equally long changes nothing. After its time, a path is like one without a
retention.
"""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.eviction_policy import EvictionQueue
from sgl_jax.mem_cache.eviction.ghost_pages import UInt64Array
from sgl_jax.mem_cache.tree_node import Retention, TreeNode

MAX_KEEP_S = 3600.0
_LEVELS_S = (0.0, 300.0)  # a longer retention than each of these has a higher level
_NUM_LEVELS = len(_LEVELS_S) + 1
_LEAST_ENDS = 64


def retention_of(holder: Hashable, keep_s: float, now_s: float) -> Retention:
    """Return the retention of a path whose client wants it kept for `keep_s` from now on."""
    keep_s = min(keep_s, MAX_KEEP_S)
    return Retention(holder, sum(keep_s > level_s for level_s in _LEVELS_S), now_s + keep_s)


class Rank(NamedTuple):
    """The place of a leaf in the order of expected returns, and the hash of its end."""

    return_class: int
    used_s: float
    page_hash: int


class _Holder:
    """The evictable leaves of a holder by level; the number of pages that it lost for retained
    ones, and the ranks of the first and of the last of them."""

    __slots__ = ("first", "last", "num_paid", "queues")

    first: Rank
    last: Rank

    def __init__(self) -> None:
        self.queues = [EvictionQueue[TreeNode]() for _ in range(_NUM_LEVELS)]
        self.num_paid = 0


class _Listed(NamedTuple):
    """A leaf in the queue `level` of `holder`; until `until_s` if the level is above 0."""

    leaf: TreeNode
    holder: Hashable
    level: int
    until_s: float


class RetainedPaths:
    """The evictable leaves of all holders."""

    def __init__(self) -> None:
        self._holders: dict[Hashable, _Holder] = {}
        self._listed: dict[int, _Listed] = {}  # by a leaf's id
        # Ends of retentions and ids of their leaves, the next end first; some are out of date.
        self._ends: list[tuple[float, int]] = []
        self.given: TreeNode | None = None  # the leaf to evict in place of another one
        self.num_exchanged = 0  # pages evicted in place of retained ones
        self.num_evicted = 0  # retained pages evicted because their holder had no others

    def add(self, leaf: TreeNode, now_s: float) -> None:
        self.discard(leaf)
        kept = leaf.retention
        if kept is not None and kept.holder is not None:
            level = kept.level if kept.until_s > now_s else 0
            self._listed[leaf.node_id] = _Listed(leaf, kept.holder, level, kept.until_s)
            self._holders.setdefault(kept.holder, _Holder()).queues[level].add(leaf)
            if level:
                heappush(self._ends, (kept.until_s, leaf.node_id))
                if len(self._ends) > 2 * len(self._listed) + _LEAST_ENDS:
                    listed = self._listed.items()
                    self._ends = [(each.until_s, key) for key, each in listed if each.level]
                    heapify(self._ends)

    def discard(self, leaf: TreeNode) -> None:
        listed = self._listed.pop(leaf.node_id, None)
        if listed is not None:
            holder = self._holders[listed.holder]
            holder.queues[listed.level].discard(leaf)
            if not any(map(len, holder.queues)):
                del self._holders[listed.holder]

    def _expire(self, now_s: float) -> None:
        """Put the leaves whose retention has ended among those without one."""
        while self._ends and self._ends[0][0] <= now_s:
            until_s, node_id = heappop(self._ends)
            listed = self._listed.get(node_id)
            if listed is not None and listed.level and listed.until_s == until_s:
                queues = self._holders[listed.holder].queues
                queues[listed.level].discard(listed.leaf)
                queues[0].add(listed.leaf)
                self._listed[node_id] = listed._replace(level=0)

    def exchange(self, victim: TreeNode, now_s: float) -> TreeNode | Rank:
        """Return the leaf to evict in place of `victim`, or `victim`; or, if its holder has lost as
        many pages in its place, the rank to give to it."""
        self._expire(now_s)
        self.given = None
        kept = victim.retention
        holder = self._holders.get(kept.holder) if kept and kept.until_s > now_s else None
        if kept is None or holder is None:
            return victim
        num_pages = _num_pages(victim)
        if holder.num_paid >= num_pages:
            holder.num_paid -= num_pages
            rank, holder.first = holder.first, holder.last
            return rank
        for queue in holder.queues[: kept.level]:
            while (leaf := queue.oldest()) is not None:
                if leaf.retention is not None and leaf.retention.holder == kept.holder:
                    self.given = leaf
                    return leaf
                self.discard(leaf)  # merged with pages of others
        return victim

    def dropped(self, leaf: TreeNode, pages: UInt64Array, now_s: float) -> None:
        """Count the pages that a leaf is about to lose, with these hashes."""
        kept = leaf.retention
        if kept is None or kept.holder is None:
            return
        if leaf is self.given:
            holder = self._holders.get(kept.holder)
            if holder is not None:
                page_hash = int(pages.view(np.int64)[-1])
                holder.last = Rank(leaf.return_class, leaf.used_s, page_hash)
                if not holder.num_paid:
                    holder.first = holder.last
                holder.num_paid += len(pages)
            self.num_exchanged += len(pages)
        elif kept.level and kept.until_s > now_s:
            self.num_evicted += len(pages)

    def clear(self) -> None:
        self._holders.clear()
        self._listed.clear()
        self._ends.clear()
        self.given = None

    def audit(self) -> None:
        """Raise `LedgerError` if a leaf is not listed at its age, or a retention has no end."""
        ends = set(self._ends)
        if any(
            each.level and (each.until_s, key) not in ends for key, each in self._listed.items()
        ):
            raise LedgerError("a leaf stays retained after its time")
        for holder in self._holders.values():
            for queue in holder.queues:
                queue.audit()


def _num_pages(leaf: TreeNode) -> int:
    """Count the pages that stay as long as a leaf does: up to those that other paths use."""
    num_pages, node = 0, leaf
    while node.parent is not None:
        num_pages += len(node.page_hashes)
        node = node.parent
        if len(node.children) > 1:
            break
    return num_pages

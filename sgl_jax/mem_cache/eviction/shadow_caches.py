"""Four caches of hashes that count the hits of four eviction orders.

A shadow sees all requests. It has the size of the real cache or, if that is large, of a sample:
only pages with a hash that ends in zeros, in a proportionally smaller cache (Waldspurger et al.
2015). The shadow with the most hits over the last few turnovers becomes the `leading_policy`, once
it leads clearly. If the cache itself has fewer hits than the shadow of LRU, LRU becomes it.

- `ADAPTIVE`: the order of `adaptive_policy.py`, with separate counts and ghosts.
- `LRU`: least recently used first.
- `LFU`: fewest uses since the page entered the cache first; among equals, least recently used.
- `RETURN`: the longest of expected pause and age first, and before all replaced rests of paths
  (`path_records.py`). New pages of a running request have the first class.

All shadows see the same uses, so a page has the same age in each. Every page read is admitted. The
pages of a path are appended from its end, so that the end is evicted first; the shadows do not use
the tree.
"""

from collections.abc import Callable
from itertools import accumulate

import numpy as np

from sgl_jax.mem_cache.eviction.ghost_pages import Int64Array, UInt64Array
from sgl_jax.mem_cache.eviction.shadow_pages import (
    ADAPTIVE,
    NONE,
    NUM_SHADOWS,
    PAGE,
    STATE,
    num_used_more,
    num_uses_of,
    read_paths,
)

GHOSTS_PER_PAGE = 4
MAX_SAMPLED = 2048  # pages of a shadow
UNREAD_PART = 16  # 1 / 16 of the cache's pages may wait to be read
HELD_PART = 3  # losses count while rows hold at most 1 / 3 of the pages: LRU's shadow has them all
_NO_HASHES = np.zeros(0, np.int64)


class ShadowCaches:
    """Shadows of a cache with `num_pages` pages, of which `most_cached` returns how many may be
    cached now: rows hold the others.

    `leading_policy`, one of `ADAPTIVE`, `LRU`, `LFU` and `RETURN`, is the order to follow.
    `has_changed` becomes True at its first change: until then the cache follows its adaptive order.
    """

    leading_policy: int
    has_changed: bool

    def __init__(self, num_pages: int, most_cached: Callable[[], int] | None = None) -> None:
        self._most_cached = most_cached
        self._enough_cached = num_pages - num_pages // HELD_PART
        bits = max((num_pages - 1).bit_length() - (MAX_SAMPLED - 1).bit_length(), 0)
        self._mask = (1 << bits) - 1
        size = max(num_pages >> bits, 1)
        num_ghosts = GHOSTS_PER_PAGE * size
        num_known = NUM_SHADOWS * size + num_ghosts + 1
        self._pages = np.zeros(num_known, PAGE)
        self._states = np.zeros(1, STATE)
        self._states["size"], self._states["num_ghosts"] = size, num_ghosts
        self._states["num_buckets"] = 1 << num_known.bit_length() - 1
        # Unread edges; the last may belong to an open path. For each ended path: the number of
        # edges up to its end, the pages at its beginning that were cached, the time of its use,
        # also in seconds, and its class of expected return, or `NONE` if it was used.
        self._edges: list[UInt64Array] = []
        self._ends: list[int] = []
        self._cached: list[int] = []
        self._times: list[int] = []
        self._seconds: list[float] = []
        self._classes: list[int] = []
        self._num_unread = 0  # pages
        self._num_cached = 0  # pages of the open path
        # Reading this many pages at once costs little more than reading a few.
        self._most_unread = num_pages // UNREAD_PART
        self.path_used_at = 0
        self._used_s = 0.0
        self.clear()

    def clear(self) -> None:
        self._edges.clear()
        self._forget_ends()
        self._num_unread = self._num_cached = 0
        state, pages = self._states[0], self._pages
        state.queues, state.counts = NONE, 1.0
        state.num_pages = state.hits = 0
        state.free = state.num_left = state.num_seen = state.num_paths = 0
        state.leading_policy = state.num_changes = 0
        state.num_lost = state.most_lost = 0
        state.num_failures = 0
        pages["num_uses"] = pages["bucket"] = pages["ghost"] = NONE
        pages["next"] = np.arange(1, len(pages) + 1)
        pages["next"][-1] = NONE
        self.leading_policy, self.has_changed = ADAPTIVE, False

    def _forget_ends(self) -> None:
        for ended in (self._ends, self._cached, self._times, self._seconds, self._classes):
            ended.clear()

    @property
    def is_due(self) -> bool:
        return self._num_unread > self._most_unread

    def use(
        self, hashes: UInt64Array, now: int, now_s: float = 0.0, *, was_cached: bool = False
    ) -> None:
        """Extend the open path by pages with these prefixes. A path is read as a whole: otherwise
        LFU would evict some of its new pages for the rest."""
        self._edges.append(hashes)
        self._num_unread += len(hashes)
        if was_cached:
            self._num_cached += len(hashes)
        self.path_used_at, self._used_s = now, now_s

    def end_path(self) -> None:
        """End the open path, which must have pages. Later pages belong to another path."""
        self._end(NONE)

    def expect(self, hashes: Int64Array, return_class: int) -> None:
        """Give the pages with these hashes a class of expected return. No path may be open."""
        self._edges.append(hashes.view(np.uint64))
        self._num_unread += len(hashes)
        self._end(return_class)

    def _end(self, return_class: int) -> None:
        self._ends.append(len(self._edges))
        self._cached.append(self._num_cached)
        self._num_cached = 0
        self._times.append(self.path_used_at)
        self._seconds.append(self._used_s)
        self._classes.append(return_class)

    def read(self) -> Int64Array | None:
        """Read the ended paths; return hashes that left the leading shadow, None if it changed."""
        if not self._ends:
            return _NO_HASHES
        num_changes = self._states["num_changes"][0]
        edges, self._edges = self._edges[: self._ends[-1]], self._edges[self._ends[-1] :]
        num_pages = np.array(list(accumulate(map(len, edges), initial=0)))
        self._num_unread -= int(num_pages[-1])
        columns = (self._cached, self._times, self._seconds, self._classes)
        ends, (cached, times, seconds, classes) = num_pages[self._ends], map(np.array, columns)
        may_compare = self._most_cached is not None and self._most_cached() >= self._enough_cached
        cached = cached if may_compare else np.full_like(cached, NONE)
        self._forget_ends()
        hashes = np.concatenate(edges).view(np.int64)
        gone = read_paths(
            *(hashes, ends, cached, times, seconds, classes),
            *(self._mask, self._pages, self._states),
        )
        if self._states["num_changes"][0] == num_changes:
            return gone
        self.leading_policy, self.has_changed = int(self._states["leading_policy"][0]), True
        return None

    def num_uses(self, page_hash: int) -> int | None:
        """Return the leading shadow's count; None if the page is absent or not in the sample."""
        num_uses = num_uses_of(page_hash, self.leading_policy, self._pages, self._states)
        return None if num_uses == NONE else num_uses

    def num_used_more(self, hashes: UInt64Array, num_uses: int) -> int:
        """Count the pages up to the last with more than `num_uses` uses in the leading shadow."""
        of_path = hashes.view(np.int64)
        return int(num_used_more(of_path, num_uses, self.leading_policy, self._pages, self._states))

"""Three caches of hashes, which count the hits of each order of eviction.

A shadow sees the requests and has the size of the real cache, or, if that is large, of a sample:
pages whose hash ends in zeros, in a proportionally smaller cache (Waldspurger et al. 2015). The
adaptive order, LRU and LFU each have one. The shadow with the most hits over the last few turnovers
becomes the favourite, once it leads clearly.

- `ADAPTIVE`: as `adaptive_policy.py`, with counts and ghosts of its own.
- `LRU`: least recently used first.
- `LFU`: least used first since it entered the cache, the least recently used of equals.

All see the same uses, so a page's age is the same in each. A page is admitted whenever it is read.
Pages of a path are appended from its end, so that the end leaves first; the shadows do not use the
tree.
"""

from itertools import accumulate

import numpy as np

from sgl_jax.mem_cache.eviction.ghost_pages import Int64Array, UInt64Array
from sgl_jax.mem_cache.eviction.shadow_pages import (
    ADAPTIVE,
    CHAIN,
    CLASS,
    FAVOURITE,
    MAX_USES,
    NONE,
    NUM_CHANGES,
    NUM_CLASSES,
    NUM_COLUMNS,
    NUM_COUNTERS,
    SIZE,
    find,
    num_used_more,
    read_paths,
)

GHOSTS_PER_PAGE = 4
MAX_SAMPLED = 2048  # pages of a shadow
_NO_HASHES = np.zeros(0, np.int64)


class ShadowCaches:
    """For a cache of `num_pages` pages.

    `favourite`, one of `ADAPTIVE`, `LRU` and `LFU`, is the order with the most hits. `has_changed`
    becomes True at its first change: until then the cache follows its own order.
    """

    favourite: int
    has_changed: bool

    def __init__(self, num_pages: int) -> None:
        bits = max((num_pages - 1).bit_length() - (MAX_SAMPLED - 1).bit_length(), 0)
        self._mask = (1 << bits) - 1
        size = max(num_pages >> bits, 1)
        num_known = (3 + GHOSTS_PER_PAGE) * size + 1
        self._pages = np.zeros((num_known, NUM_COLUMNS), np.int64)
        self._buckets = np.zeros(1 << num_known.bit_length(), np.int64)
        self._queues = np.zeros((3, MAX_USES + 1, 2), np.int64)  # the oldest and the youngest
        self._ghosts = np.zeros(GHOSTS_PER_PAGE * size, np.int64)
        self._counters = np.zeros(NUM_COUNTERS, np.int64)
        self._counts = np.zeros((2, NUM_CLASSES))  # pages used again, and pages evicted
        self._state = (
            *(self._pages, self._buckets, self._queues, self._ghosts),
            *(self._counters, self._counts),
        )
        self._counters[SIZE] = size
        # Unread edges, the last of them of an open path. For each ended path: the edges up to its
        # end, and the time of its use.
        self._edges: list[UInt64Array] = []
        self._ends: list[int] = []
        self._times: list[int] = []
        self.path_used_at = 0
        self.clear()

    def clear(self) -> None:
        for unread in (self._edges, self._ends, self._times):
            unread.clear()
        size = self._counters[SIZE]
        self._counters[:] = 0
        self._counters[SIZE] = size
        self._counts[:] = 1.0
        for array in (self._buckets, self._queues, self._ghosts):
            array[:] = NONE
        self._pages[:] = 0
        self._pages[:, CLASS : CLASS + 3] = NONE
        self._pages[:, CHAIN] = np.arange(1, len(self._pages) + 1)
        self._pages[-1, CHAIN] = NONE
        self.favourite, self.has_changed = ADAPTIVE, False

    @property
    def num_unread(self) -> int:
        return len(self._ends)

    def use(self, hashes: UInt64Array, now: int) -> None:
        """Extend the open path by pages with these prefixes.

        A path is read as a whole: otherwise LFU would evict its new pages for one another.
        """
        self._edges.append(hashes)
        self.path_used_at = now

    def end_path(self) -> None:
        """End the open path, which has pages; later pages belong to another path."""
        self._ends.append(len(self._edges))
        self._times.append(self.path_used_at)

    def read(self) -> Int64Array | None:
        """Read the ended paths: hashes of pages that left the favourite, None if the favourite has
        changed."""
        if not self._ends:
            return _NO_HASHES
        num_changes = self._counters[NUM_CHANGES]
        edges, self._edges = self._edges[: self._ends[-1]], self._edges[self._ends[-1] :]
        num_pages = np.array(list(accumulate(map(len, edges), initial=0)))
        ends, times = num_pages[self._ends], np.array(self._times)
        self._ends.clear()
        self._times.clear()
        hashes = np.concatenate(edges).view(np.int64)
        gone = read_paths(hashes, ends, times, self._mask, *self._state)
        if self._counters[NUM_CHANGES] == num_changes:
            return gone
        self.favourite, self.has_changed = int(self._counters[FAVOURITE]), True
        return None

    def num_uses(self, page_hash: int) -> int | None:
        """By the favourite's count; None if the page is absent or outside the sample."""
        page = find(page_hash, self._pages, self._buckets)
        num_uses = int(self._pages[page, CLASS + self.favourite])
        return num_uses if page != NONE and num_uses >= 0 else None

    def num_used_more(self, hashes: UInt64Array, num_uses: int) -> int:
        """Pages up to the last one that the favourite has with more than `num_uses` uses."""
        column = CLASS + self.favourite
        pages, buckets = self._pages, self._buckets
        return int(num_used_more(hashes.view(np.int64), num_uses, column, pages, buckets))

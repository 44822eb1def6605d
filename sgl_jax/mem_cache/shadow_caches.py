"""Three caches that hold hashes only: what each order of eviction would have served.

A shadow has the requests and the size of the real cache, or where that is large, those of a sample:
pages whose hash ends in zeros, in a cache that is smaller by as much (Waldspurger et al. 2015). The
adaptive order, LRU and LFU each have one. Of the last few turnovers, the shadow with the most hits
is the favourite, once it leads clearly.

- `ADAPTIVE`: as `adaptive_policy.py`, with counts and ghosts of its own.
- `LRU`: least recently used first.
- `LFU`: least used first since it entered the cache, the least recently used of equals.

All see the same uses, so a page's age is the same in each. A page is admitted whenever it
is read. Pages of a path are appended from its end, so that the end leaves first; the tree is not
known here.
"""

from itertools import accumulate
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.mem_cache.ghost_pages import Int64Array, UInt64Array

ADAPTIVE, LRU, LFU = range(3)
MAX_SAMPLED = 8192  # pages of a shadow
NUM_CLASSES = 5  # uses after the first: 0, 1, 2, 3, and 4 or more
GHOSTS_PER_PAGE = 4
MAX_USES = 63  # that LFU tells apart
HALVED_AFTER = 8  # turnovers until hits, and the adaptive shadow's counts, fade by half
# A new favourite leads by this part of the cache, and by more after a few changes: equal shadows
# may hold different pages, and each change costs the hits of a cache that has to be filled again.
_EARLY_LEAD, _LATE_LEAD, _NUM_EARLY_CHANGES = 0.2, 0.67, 2

# Columns of a page: its hash, the next of its bucket (or of the free ones), when it was used, and
# in which call; when it left the adaptive shadow, as which in order, and its class then.
_HASH, _CHAIN, _LAST, _CALL, _LEFT_AT, _LEFT_AS, _GHOST_CLASS = range(7)
# Then for each shadow: its class, or -1 if it is absent, and its neighbours in the queue of it.
_CLASS, _OLDER, _YOUNGER = 7, 10, 13
_NUM_COLUMNS = 16
# Counters: pages in each shadow and hits of each, from their first place on; then single ones.
_USED, _HITS = 0, 3
_SIZE, _FREE, _NUM_LEFT, _NUM_SEEN, _CALLS, _FAVOURITE, _NUM_CHANGES = range(6, 13)
_NUM_COUNTERS = 13
_NONE = -1

_NO_HASHES = np.zeros(0, np.int64)
Float64Array = NDArray[np.float64]


_STATE = "int64[:, ::1], int64[::1], int64[:, :, ::1], int64[::1], int64[::1], float64[:, ::1]"


class ShadowCaches:
    """Of a cache of `num_pages` pages.

    `favourite`, one of `ADAPTIVE`, `LRU` and `LFU`, is the order that would have served most.
    `has_changed` is False until it is another for the first time: the cache has its own order.
    """

    favourite: int
    has_changed: bool

    def __init__(self, num_pages: int) -> None:
        bits = max((num_pages - 1).bit_length() - (MAX_SAMPLED - 1).bit_length(), 0)
        self._mask = (1 << bits) - 1
        size = max(num_pages >> bits, 1)
        num_known = (3 + GHOSTS_PER_PAGE) * size + 1
        self._pages = np.zeros((num_known, _NUM_COLUMNS), np.int64)
        self._buckets = np.zeros(1 << num_known.bit_length(), np.int64)
        self._queues = np.zeros((3, MAX_USES + 1, 2), np.int64)  # the oldest and the youngest
        self._ghosts = np.zeros(GHOSTS_PER_PAGE * size, np.int64)
        self._counters = np.zeros(_NUM_COUNTERS, np.int64)
        self._counts = np.zeros((2, NUM_CLASSES))  # pages used again, and those that left
        self._state = (
            *(self._pages, self._buckets, self._queues, self._ghosts),
            *(self._counters, self._counts),
        )
        self._counters[_SIZE] = size
        # Edges that are not read yet, the last of them of an open path. Of each path that has
        # ended: the edges up to its end, and when it was used.
        self._edges: list[UInt64Array] = []
        self._ends: list[int] = []
        self._times: list[int] = []
        self.path_used_at = 0
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        for unread in (self._edges, self._ends, self._times):
            unread.clear()
        size = self._counters[_SIZE]
        self._counters[:] = 0
        self._counters[_SIZE] = size
        self._counts[:] = 1.0
        for array in (self._buckets, self._queues, self._ghosts):
            array[:] = _NONE
        self._pages[:] = 0
        self._pages[:, _CLASS : _CLASS + 3] = _NONE
        self._pages[:, _CHAIN] = np.arange(1, len(self._pages) + 1)
        self._pages[-1, _CHAIN] = _NONE
        self.favourite, self.has_changed = ADAPTIVE, False

    @property
    def num_unread(self) -> int:
        """Paths that have ended and are not read yet."""
        return len(self._ends)

    def use(self, hashes: UInt64Array, now: int) -> None:
        """The open path goes on along pages of these prefixes.

        It is read as a whole: in LFU, its new pages would else push one another out.
        """
        self._edges.append(hashes)
        self.path_used_at = now

    def end_path(self) -> None:
        """The next pages are those of another path; the open one has some."""
        self._ends.append(len(self._edges))
        self._times.append(self.path_used_at)

    def read(self) -> Int64Array | None:
        """Read the paths that have ended: hashes of pages that left the favourite, None if that
        has changed."""
        if not self._ends:
            return _NO_HASHES
        num_changes = self._counters[_NUM_CHANGES]
        edges, self._edges = self._edges[: self._ends[-1]], self._edges[self._ends[-1] :]
        num_pages = np.array(list(accumulate(map(len, edges), initial=0)))
        ends, times = num_pages[self._ends], np.array(self._times)
        self._ends.clear()
        self._times.clear()
        hashes = np.concatenate(edges).view(np.int64)
        gone = _read_paths(hashes, ends, times, self._mask, *self._state)
        if self._counters[_NUM_CHANGES] == num_changes:
            return gone
        self.favourite, self.has_changed = int(self._counters[_FAVOURITE]), True
        return None

    def num_uses(self, page_hash: int) -> int | None:
        """By the favourite's count; None if it does not have the page, or that is no sample."""
        page = _find(page_hash, self._pages, self._buckets)
        num_uses = int(self._pages[page, _CLASS + self.favourite])
        return num_uses if page != _NONE and num_uses >= 0 else None

    def num_used_more(self, hashes: UInt64Array, num_uses: int) -> int:
        """Pages up to the last that the favourite has, with more uses than `num_uses`."""
        column = _CLASS + self.favourite
        pages, buckets = self._pages, self._buckets
        return int(_num_used_more(hashes.view(np.int64), num_uses, column, pages, buckets))


@compiled("(int64, int64[:, ::1], int64[::1])")
def _find(page_hash: int, pages: Int64Array, buckets: Int64Array) -> np.int64:
    """The page of this hash, or `_NONE`."""
    page: np.int64 = buckets[(page_hash >> 20) & (len(buckets) - 1)]
    while page != _NONE and pages[page, _HASH] != page_hash:
        page = pages[page, _CHAIN]
    return page


@compiled("(int64[::1], int64, int64, int64[:, ::1], int64[::1])")
def _num_used_more(
    hashes: Int64Array, num_uses: int, column: int, pages: Int64Array, buckets: Int64Array
) -> int:
    """See `ShadowCaches.num_used_more`."""
    for i in range(len(hashes) - 1, -1, -1):
        page = _find(hashes[i], pages, buckets)
        if page != _NONE and pages[page, column] > num_uses:
            return i + 1
    return 0


@compiled("(int64, int64[:, ::1], int64[::1], int64[::1])")
def _place(
    page_hash: int, pages: Int64Array, buckets: Int64Array, counters: Int64Array
) -> np.int64:
    """The page of this hash, which is made if there is none; `_NONE` if all are taken."""
    page = _find(page_hash, pages, buckets)
    if page != _NONE or counters[_FREE] == _NONE:
        return page
    page = np.int64(counters[_FREE])
    counters[_FREE] = pages[page, _CHAIN]
    bucket = (page_hash >> 20) & (len(buckets) - 1)
    pages[page, _HASH] = page_hash
    pages[page, _CHAIN] = buckets[bucket]
    pages[page, _LAST] = 0
    pages[page, _CALL] = 0
    pages[page, _LEFT_AS] = 0
    buckets[bucket] = page
    return page


@compiled("(int64, int64[:, ::1], int64[::1], int64[::1])")
def _is_ghost(page: int, pages: Int64Array, ghosts: Int64Array, counters: Int64Array) -> bool:
    """Whether the adaptive shadow remembers the page."""
    left_as = pages[page, _LEFT_AS]
    return bool(left_as > 0 and counters[_NUM_LEFT] - left_as < len(ghosts))


@compiled("(int64, int64[:, ::1], int64[::1], int64[::1], int64[::1])")
def _free(
    page: int, pages: Int64Array, buckets: Int64Array, ghosts: Int64Array, counters: Int64Array
) -> None:
    """Forget the page if it is in no shadow, and no ghost."""
    for shadow in range(3):
        if pages[page, _CLASS + shadow] >= 0:
            return
    if _is_ghost(page, pages, ghosts, counters):
        return
    bucket = (pages[page, _HASH] >> 20) & (len(buckets) - 1)
    following = pages[page, _CHAIN]
    if buckets[bucket] == page:
        buckets[bucket] = following
    else:
        before = buckets[bucket]
        while pages[before, _CHAIN] != page:
            before = pages[before, _CHAIN]
        pages[before, _CHAIN] = following
    pages[page, _CHAIN] = counters[_FREE]
    counters[_FREE] = page


@compiled("(int64, int64, int64[:, ::1], int64[:, :, ::1])")
def _unlink(page: int, shadow: int, pages: Int64Array, queues: Int64Array) -> None:
    """Take the page out of its queue."""
    queue = queues[shadow, pages[page, _CLASS + shadow]]
    older, younger = pages[page, _OLDER + shadow], pages[page, _YOUNGER + shadow]
    if older == _NONE:
        queue[0] = younger
    else:
        pages[older, _YOUNGER + shadow] = younger
    if younger == _NONE:
        queue[1] = older
    else:
        pages[younger, _OLDER + shadow] = older


@compiled("(int64, int64, int64, int64[:, ::1], int64[:, :, ::1])")
def _append(page: int, shadow: int, num_uses: int, pages: Int64Array, queues: Int64Array) -> None:
    """Make the page the youngest of a class."""
    queue = queues[shadow, num_uses]
    older = queue[1]
    pages[page, _CLASS + shadow] = num_uses
    pages[page, _OLDER + shadow] = older
    pages[page, _YOUNGER + shadow] = _NONE
    if older == _NONE:
        queue[0] = page
    else:
        pages[older, _YOUNGER + shadow] = page
    queue[1] = page


@compiled("(int64, int64, int64[:, ::1], int64[:, :, ::1], float64[:, ::1])")
def _victim(
    shadow: int, now: int, pages: Int64Array, queues: Int64Array, counts: Float64Array
) -> int:
    """The page to take from the shadow next, `_NONE` if all were used now."""
    victim, lowest = _NONE, 0.0
    for num_uses in range(NUM_CLASSES if shadow == ADAPTIVE else MAX_USES + 1):
        page = queues[shadow, num_uses, 0]
        if page == _NONE or pages[page, _LAST] == now:
            continue
        if shadow != ADAPTIVE:
            return int(page)
        reused, left = counts[0, num_uses], counts[1, num_uses]
        age = float(now - pages[page, _LAST] + 1)
        rate = reused / (reused + left) / (age * sqrt(sqrt(age)))
        if victim == _NONE or rate < lowest:
            victim, lowest = page, rate
    return victim


@compiled(f"(int64, int64, {_STATE})")
def _make_room(
    shadow: int,
    now: int,
    pages: Int64Array,
    buckets: Int64Array,
    queues: Int64Array,
    ghosts: Int64Array,
    counters: Int64Array,
    counts: Float64Array,
) -> int:
    """Room for a page in the shadow: the page that left, or `_NONE`.

    The adaptive one counts it, and makes it a ghost.
    """
    if counters[_USED + shadow] < counters[_SIZE]:
        return _NONE
    page = _victim(shadow, now, pages, queues, counts)
    if page == _NONE:
        return _NONE
    num_uses = pages[page, _CLASS + shadow]
    _unlink(page, shadow, pages, queues)
    pages[page, _CLASS + shadow] = _NONE
    counters[_USED + shadow] -= 1
    if shadow != ADAPTIVE:
        return page
    counts[1, num_uses] += 1
    place = counters[_NUM_LEFT] % len(ghosts)
    forgotten = ghosts[place]
    ghosts[place] = page
    counters[_NUM_LEFT] += 1
    pages[page, _LEFT_AT] = now
    pages[page, _LEFT_AS] = counters[_NUM_LEFT]
    pages[page, _GHOST_CLASS] = num_uses
    if forgotten != _NONE and pages[forgotten, _CALL] != counters[_CALLS]:
        _free(forgotten, pages, buckets, ghosts, counters)
    if counters[_NUM_LEFT] % (HALVED_AFTER * counters[_SIZE]) == 0:
        for each in range(NUM_CLASSES):
            counts[0, each] = (counts[0, each] + 1) / 2
            counts[1, each] = (counts[1, each] + 1) / 2
    return page


@compiled("(int64[::1],)")
def _choose(counters: Int64Array) -> None:
    """Change the favourite if another leads clearly; hits fade."""
    best = counters[_FAVOURITE]
    for shadow in range(3):
        if counters[_HITS + shadow] > counters[_HITS + best]:
            best = shadow
    lead = counters[_HITS + best] - counters[_HITS + counters[_FAVOURITE]]
    is_early = counters[_NUM_CHANGES] < _NUM_EARLY_CHANGES
    if lead > counters[_SIZE] * (_EARLY_LEAD if is_early else _LATE_LEAD):
        counters[_FAVOURITE] = best
        counters[_NUM_CHANGES] += 1
    if counters[_NUM_SEEN] >= HALVED_AFTER * counters[_SIZE]:
        counters[_NUM_SEEN] = 0
        for shadow in range(3):
            counters[_HITS + shadow] //= 2


@compiled(f"(int64, int64[::1], int64[::1], int64, {_STATE})")
def _read(
    shadow: int,
    read: Int64Array,
    last_uses: Int64Array,
    now: int,
    pages: Int64Array,
    buckets: Int64Array,
    queues: Int64Array,
    ghosts: Int64Array,
    counters: Int64Array,
    counts: Float64Array,
) -> Int64Array:
    """One shadow reads pages that were last used then: hashes of those that left it."""
    num_uses = np.zeros(len(read), np.int64)
    is_new = np.zeros(len(read), np.bool_)
    for i in range(len(read)):
        page = read[i]
        uses = pages[page, _CLASS + shadow]
        if uses >= 0:
            _unlink(page, shadow, pages, queues)
            counters[_USED + shadow] -= 1
            counters[_HITS + shadow] += 1
            if shadow == ADAPTIVE:
                counts[0, uses] += 1
                num_uses[i] = min(uses + 1, NUM_CLASSES - 1)
            elif shadow == LFU:
                num_uses[i] = min(uses + 1, MAX_USES)
            continue
        is_new[i] = True
        if shadow == ADAPTIVE and _is_ghost(page, pages, ghosts, counters):
            stayed = float(pages[page, _LEFT_AT] - last_uses[i] + 1)
            share = stayed / float(now - last_uses[i] + 1)
            uses = pages[page, _GHOST_CLASS]
            counts[0, uses] += share * share * share
            num_uses[i] = min(uses + 1, NUM_CLASSES - 1)
    left = np.empty(len(read), np.int64)
    num_left = 0
    most_uses = 0  # of the new pages from here on
    for i in range(len(read) - 1, -1, -1):
        page, uses = read[i], num_uses[i]
        if is_new[i]:
            most_uses = max(most_uses, uses)
            uses = most_uses
        leaving = _make_room(shadow, now, pages, buckets, queues, ghosts, counters, counts)
        if leaving != _NONE:
            left[num_left] = pages[leaving, _HASH]
            num_left += 1
            _free(leaving, pages, buckets, ghosts, counters)
        if counters[_USED + shadow] < counters[_SIZE]:
            _append(page, shadow, uses, pages, queues)
            counters[_USED + shadow] += 1
        else:
            pages[page, _CLASS + shadow] = _NONE
    return left[:num_left]


@compiled(f"(int64[::1], int64[::1], int64[::1], int64, {_STATE})")
def _read_paths(
    hashes: Int64Array,
    ends: Int64Array,
    times: Int64Array,
    mask: int,
    pages: Int64Array,
    buckets: Int64Array,
    queues: Int64Array,
    ghosts: Int64Array,
    counters: Int64Array,
    counts: Float64Array,
) -> Int64Array:
    """See `ShadowCaches.read`; one path after another."""
    assert len(ends) == len(times)
    assert ends[-1] == len(hashes)
    left = np.empty(len(hashes), np.int64)
    num_left = start = 0
    for path in range(len(ends)):
        end, now = ends[path], times[path]
        counters[_CALLS] += 1
        read = np.empty(end - start, np.int64)
        last_uses = np.empty(end - start, np.int64)
        num_read = 0
        for page_hash in hashes[start:end]:
            if page_hash & mask:
                continue
            page = _place(page_hash, pages, buckets, counters)
            # Two prefixes of one hash in one path would be one page twice in a queue.
            if page == _NONE or pages[page, _CALL] == counters[_CALLS]:
                continue
            read[num_read], last_uses[num_read] = page, pages[page, _LAST]
            pages[page, _CALL], pages[page, _LAST] = counters[_CALLS], now
            num_read += 1
        start = end
        read, last_uses = read[:num_read], last_uses[:num_read]
        for shadow in range(3):
            gone = _read(
                shadow, read, last_uses, now, pages, buckets, queues, ghosts, counters, counts
            )
            if shadow == counters[_FAVOURITE]:
                left[num_left : num_left + len(gone)] = gone
                num_left += len(gone)
        for page in read:
            _free(page, pages, buckets, ghosts, counters)
        counters[_NUM_SEEN] += num_read
        _choose(counters)
    return left[:num_left]

"""The pages of the shadow caches, in columns, and the loops over them (`shadow_caches.py`)."""

from math import sqrt

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.mem_cache.eviction.ghost_pages import Int64Array

ADAPTIVE, LRU, LFU = range(3)
NUM_CLASSES = 5  # uses after the first: 0, 1, 2, 3, and 4 or more
MAX_USES = 63  # distinguished by LFU
HALVED_AFTER = 8  # turnovers until hits, and the adaptive shadow's counts, fade by half
# A new favourite leads by this part of the cache, and by more after a few changes: equal shadows
# may hold different pages, and each change costs the hits of a cache that must fill again.
_EARLY_LEAD, _LATE_LEAD, _NUM_EARLY_CHANGES = 0.2, 0.67, 2

# Columns of a page: its hash, the next page in its bucket (or in the free list), the time and call
# of its last use; the time and order in which it left the adaptive shadow, and its class then.
_HASH, CHAIN, _LAST, _CALL, _LEFT_AT, _LEFT_AS, _GHOST_CLASS = range(7)
# Then for each shadow: its class, or -1 if absent, and its neighbours in the class's queue.
CLASS, _OLDER, _YOUNGER = 7, 10, 13
NUM_COLUMNS = 16
# Counters: first the pages in each shadow and the hits of each; then single counters.
_USED, _HITS = 0, 3
SIZE, _FREE, _NUM_LEFT, _NUM_SEEN, _CALLS, FAVOURITE, NUM_CHANGES = range(6, 13)
NUM_COUNTERS = 13
NONE = -1

Float64Array = NDArray[np.float64]
_STATE = "int64[:, ::1], int64[::1], int64[:, :, ::1], int64[::1], int64[::1], float64[:, ::1]"


@compiled("(int64, int64[:, ::1], int64[::1])")
def find(page_hash: int, pages: Int64Array, buckets: Int64Array) -> np.int64:
    page: np.int64 = buckets[(page_hash >> 20) & (len(buckets) - 1)]
    while page != NONE and pages[page, _HASH] != page_hash:
        page = pages[page, CHAIN]
    return page


@compiled("(int64[::1], int64, int64, int64[:, ::1], int64[::1])")
def num_used_more(
    hashes: Int64Array, num_uses: int, column: int, pages: Int64Array, buckets: Int64Array
) -> int:
    for i in range(len(hashes) - 1, -1, -1):
        page = find(hashes[i], pages, buckets)
        if page != NONE and pages[page, column] > num_uses:
            return i + 1
    return 0


@compiled("(int64, int64[:, ::1], int64[::1], int64[::1])")
def _place(
    page_hash: int, pages: Int64Array, buckets: Int64Array, counters: Int64Array
) -> np.int64:
    """Find or create the page of this hash; `NONE` if no page is free."""
    page = find(page_hash, pages, buckets)
    if page != NONE or counters[_FREE] == NONE:
        return page
    page = np.int64(counters[_FREE])
    counters[_FREE] = pages[page, CHAIN]
    bucket = (page_hash >> 20) & (len(buckets) - 1)
    pages[page, _HASH] = page_hash
    pages[page, CHAIN] = buckets[bucket]
    pages[page, _LAST] = 0
    pages[page, _CALL] = 0
    pages[page, _LEFT_AS] = 0
    buckets[bucket] = page
    return page


@compiled("(int64, int64[:, ::1], int64[::1], int64[::1])")
def _is_ghost(page: int, pages: Int64Array, ghosts: Int64Array, counters: Int64Array) -> bool:
    left_as = pages[page, _LEFT_AS]
    return bool(left_as > 0 and counters[_NUM_LEFT] - left_as < len(ghosts))


@compiled("(int64, int64[:, ::1], int64[::1], int64[::1], int64[::1])")
def _free(
    page: int, pages: Int64Array, buckets: Int64Array, ghosts: Int64Array, counters: Int64Array
) -> None:
    """Free the page if no shadow holds it and it is no ghost."""
    for shadow in range(3):
        if pages[page, CLASS + shadow] >= 0:
            return
    if _is_ghost(page, pages, ghosts, counters):
        return
    bucket = (pages[page, _HASH] >> 20) & (len(buckets) - 1)
    following = pages[page, CHAIN]
    if buckets[bucket] == page:
        buckets[bucket] = following
    else:
        before = buckets[bucket]
        while pages[before, CHAIN] != page:
            before = pages[before, CHAIN]
        pages[before, CHAIN] = following
    pages[page, CHAIN] = counters[_FREE]
    counters[_FREE] = page


@compiled("(int64, int64, int64[:, ::1], int64[:, :, ::1])")
def _unlink(page: int, shadow: int, pages: Int64Array, queues: Int64Array) -> None:
    queue = queues[shadow, pages[page, CLASS + shadow]]
    older, younger = pages[page, _OLDER + shadow], pages[page, _YOUNGER + shadow]
    if older == NONE:
        queue[0] = younger
    else:
        pages[older, _YOUNGER + shadow] = younger
    if younger == NONE:
        queue[1] = older
    else:
        pages[younger, _OLDER + shadow] = older


@compiled("(int64, int64, int64, int64[:, ::1], int64[:, :, ::1])")
def _append(page: int, shadow: int, num_uses: int, pages: Int64Array, queues: Int64Array) -> None:
    queue = queues[shadow, num_uses]
    older = queue[1]
    pages[page, CLASS + shadow] = num_uses
    pages[page, _OLDER + shadow] = older
    pages[page, _YOUNGER + shadow] = NONE
    if older == NONE:
        queue[0] = page
    else:
        pages[older, _YOUNGER + shadow] = page
    queue[1] = page


@compiled("(int64, int64, int64[:, ::1], int64[:, :, ::1], float64[:, ::1])")
def _victim(
    shadow: int, now: int, pages: Int64Array, queues: Int64Array, counts: Float64Array
) -> int:
    """The page to evict next from the shadow; `NONE` if all were used now."""
    victim, lowest = NONE, 0.0
    for num_uses in range(NUM_CLASSES if shadow == ADAPTIVE else MAX_USES + 1):
        page = queues[shadow, num_uses, 0]
        if page == NONE or pages[page, _LAST] == now:
            continue
        if shadow != ADAPTIVE:
            return int(page)
        reused, left = counts[0, num_uses], counts[1, num_uses]
        age = float(now - pages[page, _LAST] + 1)
        rate = reused / (reused + left) / (age * sqrt(sqrt(age)))
        if victim == NONE or rate < lowest:
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
    """Make room for a page in the shadow; return the evicted page, or `NONE`.

    The adaptive shadow counts it, and makes it a ghost.
    """
    if counters[_USED + shadow] < counters[SIZE]:
        return NONE
    page = _victim(shadow, now, pages, queues, counts)
    if page == NONE:
        return NONE
    num_uses = pages[page, CLASS + shadow]
    _unlink(page, shadow, pages, queues)
    pages[page, CLASS + shadow] = NONE
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
    if forgotten != NONE and pages[forgotten, _CALL] != counters[_CALLS]:
        _free(forgotten, pages, buckets, ghosts, counters)
    if counters[_NUM_LEFT] % (HALVED_AFTER * counters[SIZE]) == 0:
        for each in range(NUM_CLASSES):
            counts[0, each] = (counts[0, each] + 1) / 2
            counts[1, each] = (counts[1, each] + 1) / 2
    return page


@compiled("(int64[::1],)")
def _choose(counters: Int64Array) -> None:
    """Change the favourite if another leads clearly; hits fade."""
    best = counters[FAVOURITE]
    for shadow in range(3):
        if counters[_HITS + shadow] > counters[_HITS + best]:
            best = shadow
    lead = counters[_HITS + best] - counters[_HITS + counters[FAVOURITE]]
    is_early = counters[NUM_CHANGES] < _NUM_EARLY_CHANGES
    if lead > counters[SIZE] * (_EARLY_LEAD if is_early else _LATE_LEAD):
        counters[FAVOURITE] = best
        counters[NUM_CHANGES] += 1
    if counters[_NUM_SEEN] >= HALVED_AFTER * counters[SIZE]:
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
    """One shadow reads pages with this time of use; returns hashes of evicted pages."""
    num_uses = np.zeros(len(read), np.int64)
    is_new = np.zeros(len(read), np.bool_)
    for i in range(len(read)):
        page = read[i]
        uses = pages[page, CLASS + shadow]
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
        if leaving != NONE:
            left[num_left] = pages[leaving, _HASH]
            num_left += 1
            _free(leaving, pages, buckets, ghosts, counters)
        if counters[_USED + shadow] < counters[SIZE]:
            _append(page, shadow, uses, pages, queues)
            counters[_USED + shadow] += 1
        else:
            pages[page, CLASS + shadow] = NONE
    return left[:num_left]


@compiled(f"(int64[::1], int64[::1], int64[::1], int64, {_STATE})")
def read_paths(
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
            # Two prefixes with one hash in one path would put one page in a queue twice.
            if page == NONE or pages[page, _CALL] == counters[_CALLS]:
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
            if shadow == counters[FAVOURITE]:
                left[num_left : num_left + len(gone)] = gone
                num_left += len(gone)
        for page in read:
            _free(page, pages, buckets, ghosts, counters)
        counters[_NUM_SEEN] += num_read
        _choose(counters)
    return left[:num_left]

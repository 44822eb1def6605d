"""The pages of the shadow caches, as records, and the loops over them (`shadow_caches.py`).

There are only two arrays of records, `pages` and `state` (one record), because a call from one loop
to another costs time for each array argument.
"""

from functools import partial
from math import sqrt
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.mem_cache.eviction.ghost_pages import Int64Array
from sgl_jax.mem_cache.eviction.path_records import (
    FIRST_CLASS,
    NUM_RETURN_CLASSES,
    PAUSE_S,
    REPLACED,
)

NUM_SHADOWS = 4
ADAPTIVE, LRU, LFU, RETURN = range(NUM_SHADOWS)
NUM_CLASSES = 5  # by uses after the first: 0, 1, 2, 3, and 4 or more
MAX_USES = NUM_RETURN_CLASSES - 1  # distinguished by LFU
HALVED_AFTER = 8  # turnovers after which hits, and the adaptive shadow's counts, are halved
# A new leading policy must lead by the first part of the cache size, and by more after each change,
# up to the last part. Equal shadows may hold different pages, and each change costs the hits of a
# cache that must fill again.
_FIRST_LEAD, _GROWTH, _MOST_LEAD = 0.17, 1.5, 0.58
# The cache returns to LRU when it has `_MOST_LOST` of its size fewer hits than LRU's shadow, and
# later when it has lost another `_MORE_LOST`. Gains count up to `_MOST_GAINED`.
_MOST_LOST, _MORE_LOST, _MOST_GAINED = 0.07, 0.065, 1.0
NONE = -1

_PAGE_FIELDS = [
    ("hash", np.int64),
    ("next", np.int64),  # next page of the bucket or of the free list
    ("last_use", np.int64),  # time
    ("used_s", np.float64),  # seconds at the last use
    ("last_path", np.int64),  # number of the path
    # At the page's last eviction from the adaptive shadow: time, number of evicted pages, class.
    *(("left_at", np.int64), ("left_as", np.int64), ("ghost_uses", np.int64)),
    # By shadow: the page's class, or `NONE` if absent, and its neighbours in the class's queue.
    *((name, np.int64, NUM_SHADOWS) for name in ("num_uses", "older", "younger")),
    # Not this page's, but at its index: the first page of a bucket, an entry of the ghost ring.
    *(("bucket", np.int64), ("ghost", np.int64)),
]
_STATE_FIELDS = [
    # By shadow and class: oldest and youngest page.
    ("queues", np.int64, (NUM_SHADOWS, MAX_USES + 1, 2)),
    ("counts", np.float64, (2, NUM_CLASSES)),  # pages used again, and pages evicted
    *(("num_pages", np.int64, NUM_SHADOWS), ("hits", np.int64, NUM_SHADOWS)),  # of each shadow
    ("now_s", np.float64),  # at the last use
    ("size", np.int64),  # maximum pages of a shadow
    *(("num_buckets", np.int64), ("num_ghosts", np.int64)),  # the former is a power of two
    ("free", np.int64),  # the first free page
    ("num_left", np.int64),  # pages evicted from the adaptive shadow
    ("num_seen", np.int64),  # pages since hits were halved
    *(("num_paths", np.int64), ("leading_policy", np.int64), ("num_changes", np.int64)),
    # Hits of LRU's shadow that the cache did not have, from how many it follows LRU, and how often
    # it returned to LRU from each order.
    *(("num_lost", np.int64), ("most_lost", np.int64)),
    ("num_failures", np.int64, NUM_SHADOWS),
]
PAGE, STATE = np.dtype((np.record, _PAGE_FIELDS)), np.dtype((np.record, _STATE_FIELDS))
Record: TypeAlias = Any
Float64Array = NDArray[np.float64]
Records = NDArray[Any]

_compiled = partial(compiled, page=PAGE, state=STATE)


@_compiled("(int64, page[::1], state)")
def _find(page_hash: int, pages: Records, state: Record) -> np.int64:
    page: np.int64 = pages[(page_hash >> 20) & (state.num_buckets - 1)].bucket
    while page != NONE and pages[page].hash != page_hash:
        page = pages[page].next
    return page


@_compiled("(int64, int64, page[::1], state[::1])")
def num_uses_of(page_hash: int, shadow: int, pages: Records, states: Records) -> int:
    page = _find(page_hash, pages, states[0])
    return NONE if page == NONE else int(pages[page].num_uses[shadow])


@_compiled("(int64[::1], int64, int64, page[::1], state[::1])")
def num_used_more(
    hashes: Int64Array, num_uses: int, shadow: int, pages: Records, states: Records
) -> int:
    for i in range(len(hashes) - 1, -1, -1):
        page = _find(hashes[i], pages, states[0])
        if page != NONE and pages[page].num_uses[shadow] > num_uses:
            return i + 1
    return 0


@_compiled("(int64, page[::1], state)")
def _place(page_hash: int, pages: Records, state: Record) -> np.int64:
    """Find or create the page of this hash; `NONE` if no page is free."""
    page = _find(page_hash, pages, state)
    if page != NONE or state.free == NONE:
        return page
    page = np.int64(state.free)
    state.free = pages[page].next
    bucket = (page_hash >> 20) & (state.num_buckets - 1)
    pages[page].hash, pages[page].next = page_hash, pages[bucket].bucket
    pages[page].last_use = pages[page].last_path = pages[page].left_as = 0
    pages[bucket].bucket = page
    return page


@_compiled("(int64, page[::1], state)")
def _is_ghost(page: int, pages: Records, state: Record) -> bool:
    left_as = pages[page].left_as
    return bool(left_as > 0 and state.num_left - left_as < state.num_ghosts)


@_compiled("(int64, page[::1], state)")
def _free(page: int, pages: Records, state: Record) -> None:
    for shadow in range(NUM_SHADOWS):
        if pages[page].num_uses[shadow] >= 0:
            return
    if _is_ghost(page, pages, state):
        return
    bucket = (pages[page].hash >> 20) & (state.num_buckets - 1)
    following = pages[page].next
    if pages[bucket].bucket == page:
        pages[bucket].bucket = following
    else:
        before = pages[bucket].bucket
        while pages[before].next != page:
            before = pages[before].next
        pages[before].next = following
    pages[page].next = state.free
    state.free = page


@_compiled("(int64, int64, page[::1], state)")
def _unlink(page: int, shadow: int, pages: Records, state: Record) -> None:
    queue = state.queues[shadow, pages[page].num_uses[shadow]]
    older, younger = pages[page].older[shadow], pages[page].younger[shadow]
    if older == NONE:
        queue[0] = younger
    else:
        pages[older].younger[shadow] = younger
    if younger == NONE:
        queue[1] = older
    else:
        pages[younger].older[shadow] = older


@_compiled("(int64, int64, int64, page[::1], state)")
def _append(page: int, shadow: int, num_uses: int, pages: Records, state: Record) -> None:
    queue = state.queues[shadow, num_uses]
    older = queue[1]
    pages[page].num_uses[shadow] = num_uses
    pages[page].older[shadow] = older
    pages[page].younger[shadow] = NONE
    if older == NONE:
        queue[0] = page
    else:
        pages[older].younger[shadow] = page
    queue[1] = page


@_compiled("(int64, page[::1], state)")
def _last_to_return(now: int, pages: Records, state: Record) -> int:
    victim, longest = NONE, 0.0
    for return_class in range(NUM_RETURN_CLASSES):
        page = state.queues[RETURN, return_class, 0]
        if page == NONE or pages[page].last_use == now:
            continue
        pause_s = max(PAUSE_S[return_class], state.now_s - pages[page].used_s)
        if pause_s > longest:
            victim, longest = page, pause_s
    return victim


@_compiled("(int64, int64, page[::1], state)")
def _victim(shadow: int, now: int, pages: Records, state: Record) -> int:
    victim, lowest = NONE, 0.0
    if shadow == RETURN:
        return _last_to_return(now, pages, state)
    for num_uses in range(NUM_CLASSES if shadow == ADAPTIVE else MAX_USES + 1):
        page = state.queues[shadow, num_uses, 0]
        if page == NONE or pages[page].last_use == now:
            continue
        if shadow != ADAPTIVE:
            return int(page)
        reused, left = state.counts[0, num_uses], state.counts[1, num_uses]
        age = float(now - pages[page].last_use + 1)
        rate = reused / (reused + left) / (age * sqrt(sqrt(age)))
        if victim == NONE or rate < lowest:
            victim, lowest = page, rate
    return victim


@_compiled("(int64, int64, page[::1], state)")
def _make_room(shadow: int, now: int, pages: Records, state: Record) -> int:
    """Make room for a page in the shadow; return the evicted page, or `NONE`. The adaptive shadow
    counts it, and makes it a ghost."""
    if state.num_pages[shadow] < state.size:
        return NONE
    page = _victim(shadow, now, pages, state)
    if page == NONE:
        return NONE
    num_uses = pages[page].num_uses[shadow]
    _unlink(page, shadow, pages, state)
    pages[page].num_uses[shadow] = NONE
    state.num_pages[shadow] -= 1
    if shadow != ADAPTIVE:
        return page
    state.counts[1, num_uses] += 1
    place = state.num_left % state.num_ghosts
    forgotten = pages[place].ghost
    pages[place].ghost = page
    state.num_left += 1
    pages[page].left_at = now
    pages[page].left_as = state.num_left
    pages[page].ghost_uses = num_uses
    if forgotten != NONE and pages[forgotten].last_path != state.num_paths:
        _free(forgotten, pages, state)
    if state.num_left % (HALVED_AFTER * state.size) == 0:
        for each in range(NUM_CLASSES):
            state.counts[0, each] = (state.counts[0, each] + 1) / 2
            state.counts[1, each] = (state.counts[1, each] + 1) / 2
    return page


@_compiled("(state,)")
def _choose(state: Record) -> None:
    """Change the leading policy if another leads clearly, or to LRU if the cache has lost too much;
    halve the hits after some turnovers. `RETURN` is exempt from losses: its hits come in bursts,
    when conversations continue."""
    best = state.leading_policy
    most_lost = max(state.most_lost, state.size * _MOST_LOST)
    if best in (ADAPTIVE, LFU) and state.num_lost > most_lost:
        state.num_failures[best] += 1
        state.hits[best] = state.hits[LRU]  # or it would be followed again at once
        state.num_changes += 1
        state.leading_policy = best = LRU
    for shadow in range(NUM_SHADOWS):
        if state.hits[shadow] > state.hits[best]:
            best = shadow
    lead = state.hits[best] - state.hits[state.leading_policy]
    num_changes = state.num_changes  # without failures of other orders
    for shadow in range(NUM_SHADOWS):
        if shadow != best:
            num_changes -= state.num_failures[shadow]
    if lead > state.size * min(_MOST_LEAD, _FIRST_LEAD * _GROWTH**num_changes):
        state.leading_policy = best
        state.num_changes += 1
        state.most_lost = state.num_lost + max(int(state.size * _MORE_LOST), 1)
    if state.num_seen >= HALVED_AFTER * state.size:
        state.num_seen = 0
        for shadow in range(NUM_SHADOWS):
            state.hits[shadow] //= 2


@_compiled("(int64, int64[::1], int64[::1], int64, page[::1], state)")
def _read(
    shadow: int,
    read: Int64Array,
    last_uses: Int64Array,
    now: int,
    pages: Records,
    state: Record,
) -> Int64Array:
    """Read pages into one shadow at time `now`; return the hashes of the evicted pages. A page
    after an absent one is no hit, since no prefix ends with it."""
    num_uses = np.zeros(len(read), np.int64)
    is_new = np.zeros(len(read), np.bool_)
    is_prefix = True
    for i in range(len(read)):
        page = read[i]
        uses = pages[page].num_uses[shadow]
        if uses >= 0:
            _unlink(page, shadow, pages, state)
            state.num_pages[shadow] -= 1
            state.hits[shadow] += is_prefix
            if shadow == ADAPTIVE:
                state.counts[0, uses] += 1
                num_uses[i] = min(uses + 1, NUM_CLASSES - 1)
            elif shadow == LFU:
                num_uses[i] = min(uses + 1, MAX_USES)
            elif shadow == RETURN:
                num_uses[i] = FIRST_CLASS if uses == REPLACED else uses
            continue
        is_new[i], is_prefix = True, False
        if shadow == RETURN:
            num_uses[i] = FIRST_CLASS
        if shadow == ADAPTIVE and _is_ghost(page, pages, state):
            stayed = float(pages[page].left_at - last_uses[i] + 1)
            share = stayed / float(now - last_uses[i] + 1)
            uses = pages[page].ghost_uses
            state.counts[0, uses] += share * share * share
            num_uses[i] = min(uses + 1, NUM_CLASSES - 1)
    left = np.empty(len(read), np.int64)
    num_left = 0
    most_uses = 0  # among the new pages from here on
    for i in range(len(read) - 1, -1, -1):
        page, uses = read[i], num_uses[i]
        if is_new[i]:
            most_uses = max(most_uses, uses)
            uses = most_uses
        leaving = _make_room(shadow, now, pages, state)
        if leaving != NONE:
            left[num_left] = pages[leaving].hash
            num_left += 1
            _free(leaving, pages, state)
        if state.num_pages[shadow] < state.size:
            _append(page, shadow, uses, pages, state)
            state.num_pages[shadow] += 1
        else:
            pages[page].num_uses[shadow] = NONE
    return left[:num_left]


@_compiled("(int64[::1], int64, page[::1], state)")
def _expect(hashes: Int64Array, return_class: int, pages: Records, state: Record) -> None:
    """Move pages to another class of expected return; later pages are evicted first."""
    for i in range(len(hashes) - 1, -1, -1):
        page = _find(hashes[i], pages, state)
        if page != NONE and pages[page].num_uses[RETURN] >= 0:
            _unlink(int(page), RETURN, pages, state)
            _append(int(page), RETURN, return_class, pages, state)


@_compiled(
    "(int64[::1], int64[::1], int64[::1], int64[::1], float64[::1], int64[::1], int64, page[::1], "
    "state[::1])"
)
def read_paths(
    hashes: Int64Array,
    ends: Int64Array,
    cached: Int64Array,
    times: Int64Array,
    seconds: Float64Array,
    classes: Int64Array,
    mask: int,
    pages: Records,
    states: Records,
) -> Int64Array:
    """Read one path after another into all shadows; return hashes that left the leading one.

    `ends` are the ends of the paths in `hashes`, `times` and `seconds` their times of use, `cached`
    the pages at their beginnings that were cached; `NONE`: not to be compared. A path with a class
    other than `NONE` is not read: its pages get this class of expected return. A hash with a bit of
    `mask` set is outside the sample.
    """
    assert len(ends) == len(times)
    assert ends[-1] == len(hashes)
    state = states[0]
    assert max(state.num_buckets, state.num_ghosts) <= len(pages)
    left = np.empty(len(hashes), np.int64)
    num_left = start = 0
    for path in range(len(ends)):
        end, now = ends[path], times[path]
        if classes[path] != NONE:
            _expect(hashes[start:end], classes[path], pages, state)
            start = end
            continue
        state.num_paths += 1
        state.now_s = seconds[path]
        read = np.empty(end - start, np.int64)
        last_uses = np.empty(end - start, np.int64)
        num_read, num_lost = 0, -state.hits[LRU]
        for index in range(start, end):
            page_hash = hashes[index]
            if page_hash & mask:
                continue
            page = _place(page_hash, pages, state)
            # Two prefixes with one hash in one path would put one page in a queue twice.
            if page == NONE or pages[page].last_path == state.num_paths:
                continue
            read[num_read], last_uses[num_read] = page, pages[page].last_use
            pages[page].last_path, pages[page].last_use = state.num_paths, now
            pages[page].used_s = state.now_s
            num_read += 1
            num_lost -= index - start < cached[path]
        start = end
        read, last_uses = read[:num_read], last_uses[:num_read]
        for shadow in range(NUM_SHADOWS):
            gone = _read(shadow, read, last_uses, now, pages, state)
            if shadow == state.leading_policy:
                left[num_left : num_left + len(gone)] = gone
                num_left += len(gone)
        for page in read:
            _free(page, pages, state)
        if cached[path] != NONE:
            num_lost += state.num_lost + state.hits[LRU]
            state.num_lost = max(num_lost, -int(state.size * _MOST_GAINED))
        state.num_seen += num_read
        _choose(state)
    return left[:num_left]

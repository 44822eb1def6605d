"""Loops over the lines of the waiting queue: which may start in a step, and in what order.

A line is a waiting request's place in the columns of `WaitingQueue`, which are passed here; lines
in use lie below `end`.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray

Int64Array: TypeAlias = NDArray[np.int64]

NO_RANK = -1
NEVER = np.iinfo(np.int32).max  # pages that no rank has
# Parts of an order key, in bits. What does not fit is cut: it changes the order of extremes only.
_ARRIVAL_BITS, _CACHED_BITS, _PRIORITY_BITS = 26, 21, 14
MOST_ARRIVALS, MOST_CACHED, MOST_LEVELS = (
    (1 << bits) - 1 for bits in (_ARRIVAL_BITS, _CACHED_BITS, _PRIORITY_BITS)
)
LAST = np.iinfo(np.int64).max  # no order key


@compiled("(int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1])")
def read_cursors(
    cursor: Int32Array,
    above: Int32Array,
    usable_pages: Int32Array,
    place: Int32Array,
    cached_pages: Int32Array,
    line_place: Int32Array,
) -> None:
    """Write to the lines' last two columns where their cursors stand on one rank's tree.

    `cursor` are the lines' cursors, by number; the next three are the columns of the cursors.
    """
    assert len(cursor) == len(cached_pages) == len(line_place)
    for line in range(len(cursor)):
        number = cursor[line]
        assert 0 <= number < len(above)
        while above[number] >= 0:
            number = above[number]
        cached_pages[line] = usable_pages[number]
        line_place[line] = place[number]


@compiled("(int64, int64, boolean[:, ::1], int32[:, ::1], int32[::1])")
def most_cached(
    start: int, end: int, may_run: BoolArray, cached_pages: Int32Array, most: Int32Array
) -> None:
    """The pages of each line that are cached on a rank where it may run, at most, to `most`."""
    assert end <= len(most)
    for line in range(start, end):
        most[line] = 0
        for dp_rank in range(len(may_run)):
            if may_run[dp_rank, line]:
                most[line] = max(most[line], cached_pages[dp_rank, line])


@compiled("(boolean[::1], int32[:, ::1], int32[::1], int32[::1])")
def drop_leaders(
    has_leader: BoolArray, leader: Int32Array, epoch: Int32Array, protected_len: Int32Array
) -> None:
    """Of lines whose `leader` has published what is waited for, or has left its row, `has_leader`
    becomes False, for good: lengths grow while the epoch is the same.

    `epoch` and `protected_len` are of the rows of all ranks.
    """
    assert len(has_leader) == len(leader)
    for line in range(len(has_leader)):
        if has_leader[line]:
            row = leader[line, 0]
            assert 0 <= row < len(epoch)
            if epoch[row] != leader[line, 1] or protected_len[row] >= leader[line, 2]:
                has_leader[line] = False


@compiled(
    "(int64, int64[::1], int32[::1], boolean[::1], int64, boolean[::1], boolean[::1], int64[::1], "
    "int32[::1], boolean[:, ::1], int32[::1], int32[:, ::1])"
)
def least_pages(
    end: int,
    ranks: IntpArray,
    room: Int32Array,
    is_open: BoolArray,
    step: int,
    is_waiting: BoolArray,
    has_leader: BoolArray,
    stay_until: Int64Array,
    stay_rank: Int32Array,
    may_run: BoolArray,
    num_pages: Int32Array,
    cached_pages: Int32Array,
) -> tuple[Int32Array, Int64Array]:
    """The pages that each line below `end` takes at least on each of the open `ranks`.

    int32[len(ranks), end]: `NEVER` where it may not start in this step, or does not fit though as
    much were cached as now. Also the lines for which that depends on how much of the prefix is in
    use, which is to be looked at more closely.

    What starts in this step may let others share more of what is cached, but takes more room
    than that: so it makes none fit that does not fit now, and a request that fits now takes
    at least the pages that are not cached.

    Args:
        room: int32[len(ranks)], their pages.
        is_open: bool[all ranks]; a line that stays for one that is not open does not start.
        step: being planned. What follows are the queue's columns.
    """
    least = np.full((len(ranks), end), NEVER, np.int32)
    doubtful = np.empty(end, np.int64)
    num_doubtful = 0
    assert end <= len(is_waiting)
    for k in range(len(ranks)):
        assert 0 <= ranks[k] < len(may_run)
    for line in range(end):
        if not is_waiting[line] or has_leader[line]:
            continue
        stays_for = stay_rank[line]
        assert stays_for < len(is_open)
        if stay_until[line] > step and stays_for != NO_RANK and not is_open[stays_for]:
            continue
        fits_alone = fits_with_cached = False
        for k in range(len(ranks)):
            if may_run[ranks[k], line]:
                least[k, line] = num_pages[line] - cached_pages[ranks[k], line]
                fits_with_cached |= least[k, line] <= room[k]
                fits_alone |= num_pages[line] <= room[k]
        if fits_with_cached and not fits_alone:
            doubtful[num_doubtful] = line
            num_doubtful += 1
    return least, doubtful[:num_doubtful]


@compiled(
    "(int32[:, ::1], int32[::1], int64, boolean, int64, int64[::1], boolean[::1], int32[::1], "
    "int32[::1], int64[::1])"
)
def order_keys(
    least: Int32Array,
    room: Int32Array,
    highest_priority: int,
    uses_cached_len: bool,
    max_passed_over: int,
    priority: Int64Array,
    is_retracted: BoolArray,
    most_cached: Int32Array,
    passed_over: Int32Array,
    arrival: Int64Array,
) -> Int64Array:
    """`WaitingQueue._order_keys`; the last five are the queue's columns."""
    num_ranks, end = least.shape
    keys = np.full(end, LAST, np.int64)
    assert num_ranks == len(room)
    assert end <= len(priority)
    first_arrival = LAST
    for line in range(end):
        for k in range(num_ranks):
            if least[k, line] <= room[k]:
                keys[line] = 0
        if keys[line] == 0:
            first_arrival = min(first_arrival, arrival[line])
    for line in range(end):
        if keys[line] == LAST:
            continue
        key = -1
        if passed_over[line] < max_passed_over:
            key = min(highest_priority - priority[line], MOST_LEVELS) << 1
            key = (key + (not is_retracted[line])) << _CACHED_BITS
            if uses_cached_len:
                key += MOST_CACHED - min(most_cached[line], MOST_CACHED)
        keys[line] = (key << _ARRIVAL_BITS) + min(arrival[line] - first_arrival, MOST_ARRIVALS)
    return keys


@compiled("(int64[::1], int32[:, ::1], int32[::1])")
def rule_out(keys: Int64Array, least: Int32Array, room: Int32Array) -> None:
    """Lines that fit nowhere any more have `LAST` for a key."""
    num_ranks, end = least.shape
    assert end == len(keys)
    assert num_ranks == len(room)
    for line in range(end):
        if keys[line] != LAST:
            fits = False
            for k in range(num_ranks):
                fits |= least[k, line] <= room[k]
            if not fits:
                keys[line] = LAST


@compiled("(int64, int64, boolean, boolean[::1], boolean[::1], int64[::1], int32[::1])")
def pass_over(
    end: int,
    started: int,
    was_due: bool,
    is_waiting: BoolArray,
    may_run: BoolArray,
    arrival: Int64Array,
    passed_over: Int32Array,
) -> None:
    """One that arrived as number `started` has passed over all older lines below `end` that
    `may_run` there; if it was due, younger ones are passed over anew."""
    assert end <= len(is_waiting)
    for line in range(end):
        if may_run[line] and is_waiting[line]:
            if arrival[line] < started:
                passed_over[line] += 1
            elif was_due:
                passed_over[line] = 0


@compiled("(int64, int32[::1], int64)")
def lines_due(end: int, passed_over: Int32Array, max_passed_over: int) -> Int64Array:
    """The lines below `end` that were passed over so often, ascending."""
    lines = np.empty(end, np.int64)
    count = 0
    assert end <= len(passed_over)
    for line in range(end):
        if passed_over[line] >= max_passed_over:
            lines[count] = line
            count += 1
    return lines[:count]

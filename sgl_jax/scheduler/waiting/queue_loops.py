"""Loops over the lines of the waiting queue: the lines that may start in a step, and their order.

A line is a waiting request's place in the columns of `WaitingQueue`; lines in use are below `end`.
"""

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray
from sgl_jax.scheduler.forecast.capacity import ROOM, Rooms
from sgl_jax.scheduler.forecast.output_lengths import Int64Array
from sgl_jax.scheduler.waiting.waiting_columns import NO_LINES, Lines

_NEVER = np.iinfo(np.int32).max  # pages that no rank has
_NO_RANK = -1
# Parts of an order key, in bits. Larger values are clipped: only the order of extremes changes.
_ARRIVAL_BITS, _TURN_BITS, _CACHED_BITS, _LEVEL_BITS = 20, 12, 17, 12
MOST_ARRIVALS, MOST_TURNS, MOST_CACHED, MOST_LEVELS = (
    (1 << bits) - 1 for bits in (_ARRIVAL_BITS, _TURN_BITS, _CACHED_BITS, _LEVEL_BITS)
)
LAST = np.iinfo(np.int64).max  # no order key
# Indices in `COUNTED_KINDS`.
_TENANT, _PREFIX, _FETCH, _STORE, _RANK, _SET, _STEP, _ORDER, _PAGES, _IMAGES, _ROWS = range(11)
# Degrees of reuse: pages that other requests would read, per page that a request computes.
NUM_REUSES = 32
_REUSE_PAGES = 4


@compiled("(int32[::1], int32[::1], int32[::1], int32[::1])")
def read_cursors(
    prefix: Int32Array, above: Int32Array, usable_pages: Int32Array, cached_pages: Int32Array
) -> None:
    """Write to `cached_pages`, int32[lines], the cached pages of the lines' prompts on one rank.
    `prefix` has the lines' prefixes by number; `above` and `usable_pages` are columns of these."""
    assert len(prefix) == len(cached_pages)
    for line in range(len(prefix)):
        assert 0 <= prefix[line] < len(above)
        number = np.uint32(prefix[line])  # without a sign, an index needs no test for it
        for _ in range(2):  # most are at most two below: without branches
            number = np.uint32(above[number]) if above[number] >= 0 else number
        while above[number] >= 0:
            number = np.uint32(above[number])
        cached_pages[line] = usable_pages[number]


@compiled("(int64[::1], int32[::1], int32[::1], int32[::1])")
def places_of(
    lines: IntpArray, prefix: Int32Array, above: Int32Array, place: Int32Array
) -> Int32Array:
    """Return the places of the cursors of `lines` on one rank's tree, int32[len(lines)]. `prefix`
    has all lines' prefixes by number; `above` and `place` are columns of these."""
    places = np.empty(len(lines), np.int32)
    for i in range(len(lines)):
        assert 0 <= lines[i] < len(prefix)
        number = prefix[lines[i]]
        assert 0 <= number < len(above) <= len(place)
        while above[number] >= 0:
            number = above[number]
        places[i] = place[number]
    return places


@compiled("(int64, int32[::1], int32[::1])")
def alike_lines(line: int, prefix: Int32Array, above: Int32Array) -> BoolArray:
    """Return bool[len(prefix)], whether a line's cursor is at the place of `line`'s and continues
    with the same page. `above` is a column of the prefixes on the rank."""
    below = np.empty(len(prefix), np.int32)
    for each in range(len(prefix)):
        number = below[each] = prefix[each]
        assert 0 <= number < len(above)
        while above[number] >= 0:
            below[each] = number
            number = above[number]
    is_alike: BoolArray = below == below[line]
    return is_alike


@compiled("(int64, int64, boolean[:, ::1], int32[:, ::1], int32[::1])")
def most_cached(
    start: int, end: int, may_run: BoolArray, cached_pages: Int32Array, most: Int32Array
) -> None:
    """Write to `most` each line's pages on the rank with the most where it may run."""
    assert end <= len(most)
    most[start:end] = 0
    for dp_rank in range(len(may_run)):
        may_run_here, cached = may_run[dp_rank], cached_pages[dp_rank]
        for line in range(start, end):  # without branches: several lines at once
            most[line] = max(most[line], cached[line] if may_run_here[line] else 0)


@compiled("(int64, lines, int32[::1], int32[::1])", lines=NO_LINES)
def reuse_order(end: int, lines: Lines, parent: Int32Array, end_pages: Int32Array) -> Int32Array:
    """Rank lines by the pages that other waiting requests would read for each page that a line
    computes.

    Returns int32[end] below `NUM_REUSES`, 0 for the most pages. `parent` and `end_pages` are
    columns of the waiting prompts.
    """
    order, prefix = np.full(end, NUM_REUSES - 1, np.int32), lines.prefix
    assert end <= len(prefix)
    num_prompts = np.zeros(len(parent), np.int32)  # prompts that begin with each shared prefix
    for line in range(end):
        if lines.is_waiting[line]:
            number = prefix[line]
            while number >= 0:
                assert number < len(parent)
                num_prompts[number] += 1
                number = parent[number]
    for line in range(end):
        if not lines.is_waiting[line]:
            continue
        cached, number, num_saved = lines.most_cached[line], prefix[line], 0
        while number >= 0 and end_pages[number] > cached:
            assert number < len(parent)
            above = parent[number]
            start = max(end_pages[above], cached) if above >= 0 else cached
            num_saved += (end_pages[number] - start) * (num_prompts[number] - 1)
            number = above
        num_read = _REUSE_PAGES * num_saved // max(lines.needs[line].pages - cached, 1)
        order[line] -= min(num_read, NUM_REUSES - 1)
    return order


@compiled("(boolean[::1], int32[:, ::1], int32[::1], int32[::1])")
def drop_leaders(
    has_leader: BoolArray, leader: Int32Array, epoch: Int32Array, protected_len: Int32Array
) -> None:
    """Clear `has_leader` for lines with a `leader` that has published the awaited tokens or left
    its row. This is permanent: lengths grow while the epoch is the same. `epoch` and
    `protected_len` are indexed by joint row."""
    assert len(has_leader) == len(leader)
    for line in range(len(has_leader)):
        if has_leader[line]:
            row = leader[line, 0]
            assert 0 <= row < len(epoch)
            if epoch[row] != leader[line, 1] or protected_len[row] >= leader[line, 2]:
                has_leader[line] = False


@compiled(
    "(int64, int64[::1], rooms[::1], boolean[:, ::1], int64, lines)", rooms=ROOM, lines=NO_LINES
)
def least_pages(
    end: int,
    ranks: IntpArray,
    rooms: Rooms,
    open_tenants: BoolArray,
    step: int,
    lines: Lines,
) -> Int32Array:
    """Return the minimum pages of each line on each of the `ranks`, int32[len(ranks), end].

    These assume that all of its cached prefix is in use; `fits.NEVER` if it may not start in this
    step. A request that starts in this step may allow other lines to share more cached pages, but
    takes more room than that, and leaves no more prompt tokens.

    Args:
        rooms: ROOM[all ranks]; a line deferred to a rank is tried once that is open.
        open_tenants: bool[all ranks, tenants], not bound by `ROOM.most_tokens`.
        step: the step being planned.
    """
    least = np.empty((len(ranks), end), np.int32)
    num_pages, stays = np.empty(end, np.int32), np.empty(end, np.int32)
    num_tokens, priority = np.empty(end, np.int32), np.empty(end, np.int64)
    assert end <= len(lines.needs)
    assert len(rooms) == len(open_tenants)
    for line in range(end):
        deferred_rank = lines.stay_rank[line] if lines.stay_until[line] > step else _NO_RANK
        assert deferred_rank < len(rooms)
        is_blocked = lines.awaits_event[line] or lines.has_leader[line]
        is_tried = lines.is_waiting[line] and not is_blocked
        is_tried &= lines.held_until[line] <= step
        if deferred_rank != _NO_RANK and not rooms[deferred_rank].is_open:
            is_tried = False
        need = lines.needs[line]
        num_pages[line] = need.pages if is_tried else _NEVER
        stays[line], priority[line], num_tokens[line] = deferred_rank, need.priority, need.tokens
    for k in range(len(ranks)):
        rank = ranks[k]
        assert 0 <= rank < len(lines.may_run)
        own, may_run_here, cached = least[k], lines.may_run[rank], lines.cached_pages[rank]
        floor, is_open_tenant = rooms[rank].floor, open_tenants[rank]
        page_size, most = np.int32(rooms[rank].page_size), np.int32(rooms[rank].most_tokens)
        has_open_tenant = is_open_tenant.any()
        for line in range(end):  # without branches: several lines at once
            may_stay = (stays[line] == _NO_RANK) | (stays[line] == rank)
            may_take = may_stay & may_run_here[line] & (num_pages[line] < _NEVER)
            has_tokens = np.int32(num_tokens[line] - cached[line] * page_size) <= most
            may_take &= priority[line] > floor + 1 - (has_tokens | has_open_tenant)
            own[line] = num_pages[line] - cached[line] if may_take else _NEVER
        for line in range(end if has_open_tenant else 0):
            tenant = lines.tenant[line]
            assert 0 <= tenant < len(is_open_tenant)
            is_bound = priority[line] == floor + 1 and not is_open_tenant[tenant]
            if is_bound and num_tokens[line] - cached[line] * page_size > most:
                own[line] = _NEVER
    return least


@compiled(
    "(int64, int64[::1], int64[::1], boolean[:, ::1], int64, int64, int64, lines)", lines=NO_LINES
)
def has_short(
    end: int,
    ranks: IntpArray,
    most_tokens: Int64Array,
    open_tenants: BoolArray,
    priority: int,
    page_size: int,
    step: int,
    lines: Lines,
) -> bool:
    """Return whether a line of `priority` may be tried on one of `ranks`: it has at most that
    rank's `most_tokens` tokens to compute there, or a tenant of that rank's `open_tenants`.

    `open_tenants` is bool[len(ranks), tenants], and `step` the step being planned.
    """
    assert end <= len(lines.needs)
    assert len(ranks) == len(most_tokens) == len(open_tenants)
    most, has_open_tenant = most_tokens.max(), open_tenants.any()
    for line in range(end):
        need, tenant = lines.needs[line], lines.tenant[line]
        if need.priority != priority or not lines.is_waiting[line]:
            continue
        is_long = need.tokens - lines.most_cached[line] * page_size > most  # on each rank
        is_blocked = lines.awaits_event[line] or lines.has_leader[line]
        is_blocked |= lines.held_until[line] > step
        if is_blocked or (is_long and not has_open_tenant):
            continue
        assert 0 <= tenant < open_tenants.shape[1]
        for k in range(len(ranks)):
            rank = ranks[k]
            assert 0 <= rank < len(lines.may_run)
            is_elsewhere = lines.stay_until[line] > step and lines.stay_rank[line] != rank
            if is_elsewhere or not lines.may_run[rank, line]:
                continue
            num_lacking = need.tokens - lines.cached_pages[rank, line] * page_size
            if num_lacking <= most_tokens[k] or open_tenants[k, tenant]:
                return True
    return False


@compiled(
    "(int32[:, ::1], boolean, boolean, int64[::1], int32[::1], boolean[::1], lines)", lines=NO_LINES
)
def order_keys(
    least: Int32Array,
    uses_cached_len: bool,
    is_thrashing: bool,
    level: Int64Array,
    turn: Int32Array,
    is_starved: BoolArray,
    lines: Lines,
) -> tuple[Int64Array, IntpArray]:
    """Return int64[end], sort keys in admission order, and the lines that may start on any rank,
    which have one.

    Args:
        least: int32[ranks, end], the pages that a line takes to start; `fits.NEVER` if it may not.
        uses_cached_len: whether the longest cached prefix comes first,
        is_thrashing: or then the fewest pages to compute.
        level: int64[end], 0 for the first level.
        turn: int32[end], the place of a line's tenant.
        is_starved: bool[end].
    """
    num_ranks, end = least.shape
    keys, tried, num_tried = np.full(end, LAST, np.int64), np.empty(end, np.int64), 0
    assert end == len(level) == len(turn) == len(is_starved) <= len(lines.arrival)
    first_arrival = LAST
    for k in range(num_ranks):
        for line in range(end):
            if least[k, line] < _NEVER:
                keys[line] = 0
                first_arrival = min(first_arrival, lines.arrival[line])
    for line in range(end):
        if keys[line] == LAST:
            continue
        tried[num_tried] = line
        num_tried += 1
        key = min(level[line], MOST_LEVELS) << 1
        key = (key + (not is_starved[line])) << 1
        key = (key + (not lines.is_retracted[line])) << _CACHED_BITS
        # Due requests come by arrival: one with much to compute would wait for all that become due.
        by_tokens = uses_cached_len and not is_starved[line]
        if by_tokens and is_thrashing:
            key += min(lines.needs[line].pages - lines.most_cached[line], MOST_CACHED)
        elif by_tokens:
            key += MOST_CACHED - min(lines.most_cached[line], MOST_CACHED)
        key = (key << _TURN_BITS) + min(turn[line], MOST_TURNS)
        num_before = min(lines.arrival[line] - first_arrival, MOST_ARRIVALS)
        keys[line] = (key << _ARRIVAL_BITS) + num_before
    return keys, tried[:num_tried]


@compiled("(int64, int64, int64, boolean, int64, int64, int32[::1], lines)", lines=NO_LINES)
def pass_over(
    end: int,
    started: int,
    dp_rank: int,
    was_due: bool,
    num_free: int,
    max_skip_count: int,
    turns: Int32Array,
    lines: Lines,
) -> None:
    """Count a pass over each line below `end` that may run on rank `dp_rank`, is no less important,
    and comes before line `started`: by arrival or, for another tenant, by that tenant's place in
    `turns`. If the started request was due, reset the passes over later lines. Lines that
    `held_until` delays are left out.

    A line that lacked pages, since there were only `num_free`, has been passed over
    `max_skip_count` times when the requests before it have received as much service as it needs. A
    started request with more cached pages always comes before it and counts once.
    """
    needs, tenant, arrival, service = lines.needs, lines.tenant, lines.arrival, lines.service
    assert 0 <= dp_rank < len(lines.may_run)
    may_run, cached_pages = lines.may_run[dp_rank], lines.cached_pages[dp_rank]
    assert 0 <= started < end <= len(needs) == len(arrival) == len(tenant)
    assert 0 <= tenant[started] < len(turns)
    started_turn, started_priority = turns[tenant[started]], needs[started].priority
    started_arrival, started_tenant = arrival[started], tenant[started]
    for line in range(end):
        is_before = arrival[line] < started_arrival
        if tenant[line] != started_tenant:
            assert 0 <= tenant[line] < len(turns)
            turn = turns[tenant[line]]
            is_before = turn < started_turn or (turn == started_turn and is_before)
        # Usually most lines come later.
        if not (is_before or was_due) or not lines.is_waiting[line]:
            continue
        if not may_run[line] or lines.held_until[line]:
            continue
        need = needs[line]
        if is_before and need.priority >= started_priority:
            num_passes, is_large = 1, need.pages - cached_pages[line] > num_free
            if is_large and cached_pages[started] <= cached_pages[line]:
                part = min(service[started] / service[line], 1.0)
                num_passes = max(int(max_skip_count * part), 1)
            lines.skip_count[line] = min(lines.skip_count[line] + num_passes, max_skip_count)
        elif was_due and not is_before and need.priority <= started_priority:
            lines.skip_count[line] = 0


@compiled(
    "(int64, int64, lines, boolean[::1], boolean[::1], boolean[::1], boolean[:, ::1], "
    "boolean[:, ::1], boolean[:, ::1])",
    lines=NO_LINES,
)
def count_kinds(
    end: int,
    step: int,
    lines: Lines,
    is_full: BoolArray,
    is_fetching: BoolArray,
    has_row: BoolArray,
    fits: BoolArray,
    fits_unheld: BoolArray,
    lacks_images: BoolArray,
) -> Int64Array:
    """Count the waiting lines below `end` by reason, int64[COUNTED_KINDS], when `step` is planned.

    `is_full` is indexed by tenant, `is_fetching` by joint row, `has_row` by rank, `fits`,
    `fits_unheld`, without the ranks' holds, and `lacks_images`, whether the table of images has no
    room, by rank and line.
    """
    counts = np.zeros(_ROWS + 1, np.int64)
    assert end <= len(lines.needs)
    assert fits.shape == fits_unheld.shape == lacks_images.shape == (len(has_row), end)
    for line in range(end):
        if not lines.is_waiting[line]:
            continue
        if is_full[lines.tenant[line]]:
            kind = _TENANT
        elif lines.awaits_event[line]:
            kind = _STORE
        elif lines.has_leader[line]:
            kind = _FETCH if is_fetching[lines.leader[line, 0]] else _PREFIX
        elif lines.stay_until[line] > step:
            kind = _RANK
        elif lines.held_until[line] > step:
            kind = _SET
        else:
            kind = _ROWS
            for rank in range(len(has_row)):
                if lines.may_run[rank, line] and has_row[rank]:
                    if fits[rank, line] and not lacks_images[rank, line]:
                        kind = _STEP
                        break
                    if fits[rank, line] or kind == _IMAGES:
                        kind = _IMAGES
                    else:
                        kind = _ORDER if fits_unheld[rank, line] or kind == _ORDER else _PAGES
        counts[kind] += 1
    return counts

"""Decides which requests fit which ranks.

A request fits a rank if at each moment ahead its pages and the pages that running requests are
forecast to hold stay within the pool. Its pages are weighted by the chance that it still runs. It
also fits if its pages up to its limit, next to the most that the running requests may still take,
are within the pool: no forecast keeps it from starting then.

A moment does not count if the request has done enough by then. Each of its tokens saves a part of a
step: the rank's requests share its fixed time. A retract at that moment costs its prompt and
these tokens once more, times `conservativeness`.

If a rank is held for a request, the held pages count from the step at which it is expected to
start. So another request may pass it if it ends before, or leaves it enough (backfilling; Lifka,
"The ANL/IBM SP Scheduling System", 1995).
"""

from typing import Any

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray
from sgl_jax.scheduler.forecast.capacity import NEED, OPTION, ROOM, Needs, Options, Rooms
from sgl_jax.scheduler.forecast.output_lengths import Float64Array

NEVER = np.iinfo(np.int32).max  # pages that no rank has
NO_RANK = -1
# Results of `next_line` that are not the index of a rank.
MAY_START, MAY_HOLD = -1, -2
# Below every priority.
NO_FLOOR = int(np.iinfo(np.int64).min)
# More tokens than any request has, and than any rank costs.
NO_LIMIT = int(np.iinfo(np.int32).max)
NO_COST = int(np.iinfo(np.int64).max)

# A rank may run this many requests more than the least busy rank, or this share of them more; each
# further request counts as a step full of prompt tokens.
MAX_SKEW_REQUESTS = 4
MAX_SKEW_SHARE = 0.25
# A rank is full if this part of its pages is forecast to be in use: a retract is likely then.
FULL_PART = 0.9


@compiled("(int64, int64, int64, int64, boolean)")
def _has_tokens(
    priority: int, num_tokens: int, floor: int, most_tokens: int, is_open_tenant: bool
) -> bool:
    """Return whether the step has prompt tokens for a request with `num_tokens` to compute."""
    if priority == floor + 1:
        return num_tokens <= most_tokens or is_open_tenant
    return priority > floor


@compiled("(room, int64)", room=ROOM)
def _num_steps(room: Any, num_pages: int) -> int:
    """Return the steps until a prompt of `num_pages` pages is computed."""
    num_tokens = num_pages * room.page_size
    return num_tokens // room.chunk_size if num_tokens >= room.chunk_size else 0


@compiled("(room,)", room=ROOM)
def _steps_per_page(room: Any) -> float:
    """Return the steps after which a request has done enough for a retract, for each page that it
    takes to start; infinity if it never has."""
    # Both in prompt tokens, for each of its tokens.
    gain, price = room.step_price / (room.num_running + 1), room.conservativeness
    return float(price * room.page_size / (gain - price)) if gain > price else np.inf


@compiled(
    "(room, need, int64, int64, boolean, boolean, float64[::1], int64[::1], float64)",
    room=ROOM,
    need=NEED,
)
def _most_short(
    room: Any,
    need: Any,
    num_pages: int,
    num_steps: int,
    is_alone: bool,
    is_held: bool,
    chances: Float64Array,
    moments: IntpArray,
    steps_per_page: float,
) -> float:
    """Return the pages that a request lacks at the moment at which it lacks most.

    Its prompt takes `num_steps`. If `is_alone`, the pages of other requests do not count. If
    `is_held`, the rank's hold counts. `chances`, for each moment, are its chances to run on.
    """
    growth = min(room.conservativeness, 1.0) * (need.most - need.pages) / max(need.left, 1)
    horizon = num_pages * steps_per_page
    worst, after = -float(room.total), 0
    for j in range(len(chances)):
        ahead = max((moments[j] + moments[j + 1]) // 2 - num_steps, 0)
        is_far = moments[j] > horizon and not is_held
        if j and (is_far or moments[j] >= num_steps + need.left):
            break
        if num_steps == 0:
            after = j
        else:
            while after + 1 < len(chances) and moments[after + 1] <= ahead:
                after += 1
        own = float(num_pages)
        if j:
            own = chances[after] * (num_pages + growth * min(ahead, need.left))
        if is_held and moments[j + 1] > room.held_steps:
            own += room.held_pages
        others = 0.0 if is_alone else room.pages[j]
        worst = max(worst, others + own - room.total)
    return worst


@compiled(
    "(room, need, int64, float64[:, :, ::1], int64[::1], float64)",
    room=ROOM,
    need=NEED,
)
def _pages_short(
    room: Any,
    need: Any,
    num_pages: int,
    chances: Float64Array,
    moments: IntpArray,
    steps_per_page: float,
) -> int:
    """Return the pages that a request with `need` lacks in `room`; <= 0 if none.

    Args:
        num_pages: pages that it takes to start: `need.pages`, or fewer if other requests have its
            prefix in use.
        chances: `OutputLengths.chances`.
        moments: `MOMENTS`.
        steps_per_page: the result of `_steps_per_page`.
    """
    worst: int = int(room.most + need.most - (need.pages - num_pages) - room.total)
    num_steps = _num_steps(room, num_pages)
    is_held = need.priority <= room.held_above and num_steps + need.left > room.held_steps
    if is_held:
        worst += int(room.held_most)
    if worst <= 0:
        return worst
    assert 0 <= need.length_class < len(chances)
    assert 0 <= need.bucket < chances.shape[1]
    goes_on = chances[need.length_class, need.bucket]
    short = _most_short(
        room, need, num_pages, num_steps, False, is_held, goes_on, moments, steps_per_page
    )
    return min(worst, int(np.ceil(short)))


@compiled(
    "(rooms[::1], int64, needs[::1], int64, int64, float64[:, :, ::1], int64[::1])",
    rooms=ROOM,
    needs=NEED,
)
def pages_short(
    rooms: Rooms,
    dp_rank: int,
    needs: Needs,
    line: int,
    num_pages: int,
    chances: Float64Array,
    moments: IntpArray,
) -> int:
    """Return the pages that the request in `line` lacks on a rank; <= 0 if none.

    Args:
        rooms, needs: ROOM[ranks], NEED[lines].
        dp_rank, line: indices of the rank's room and the request's need.
        num_pages: pages that it takes to start, without shared pages of its prefix.
        chances, moments: `OutputLengths.chances`, `MOMENTS`.
    """
    assert 0 <= dp_rank < len(rooms)
    assert 0 <= line < len(needs)
    steps_per_page = _steps_per_page(rooms[dp_rank])
    return _pages_short(rooms[dp_rank], needs[line], num_pages, chances, moments, steps_per_page)


@compiled(
    "(room, option, need, boolean, int64, int64, int64, float64[:, :, ::1], int64[::1])",
    room=ROOM,
    option=OPTION,
    need=NEED,
)
def _try_rank(
    room: Any,
    option: Any,
    need: Any,
    is_open_tenant: bool,
    num_unskewed: int,
    step_tokens: int,
    most_cost: int,
    chances: Float64Array,
    moments: IntpArray,
) -> None:
    """Fill in `is_uncounted`, `fits`, `cost` and `is_full`. A rank with more than `num_unskewed`
    requests costs more. A rank that costs more than `most_cost` is not tried: it does not fit."""
    num_pages, num_tokens = need.pages, need.tokens - option.num_read
    option.fits = option.is_uncounted = False
    num_skewed = max(room.num_running - num_unskewed, 0)
    option.cost = num_tokens - option.num_spared + room.num_ahead + step_tokens * num_skewed
    if option.cost > most_cost:
        return
    has_tokens = _has_tokens(
        need.priority, num_tokens, room.floor, room.most_tokens, is_open_tenant
    )
    if room.is_open and has_tokens:
        # Usually there are enough pages, however much of its prefix is in use.
        each_page = _steps_per_page(room)
        option.fits = _pages_short(room, need, num_pages, chances, moments, each_page) <= 0
        option.is_uncounted = not option.fits and option.in_use < 0
        if not option.fits and option.in_use > 0:
            num_pages -= option.in_use
            option.fits = _pages_short(room, need, num_pages, chances, moments, each_page) <= 0
    option.is_full = room.pages[room.peak] + num_pages > FULL_PART * room.total


@compiled(
    "(rooms[::1], options[::1], int64, int64, needs[::1], int64, boolean[:, ::1], int64, int64, "
    "boolean, float64[:, :, ::1], int64[::1])",
    rooms=ROOM,
    options=OPTION,
    needs=NEED,
)
def find_cheapest(
    rooms: Rooms,
    options: Options,
    first: int,
    end: int,
    needs: Needs,
    line: int,
    open_tenants: BoolArray,
    tenant: int,
    step_tokens: int,
    tries_all: bool,
    chances: Float64Array,
    moments: IntpArray,
) -> tuple[int, int, int]:
    """Return the rank from `first` to `end` where the request in `line` fits and costs least: of
    several, one that is not full, then the least busy, then the first; `NO_RANK` if it fits none.
    Return also the number of ranks that could cost less after a wait for room, since they have more
    of its prefix, and of ranks that are uncounted.

    Args:
        rooms, needs: ROOM[ranks], NEED[lines].
        options: OPTION[ranks]; `fits` and the fields after it are filled in, and `is_uncounted`.
        open_tenants: bool[ranks, tenants], not bound by `ROOM.most_tokens`.
        tenant: the tenant of the request.
        step_tokens: prompt tokens of the step.
        tries_all: whether `fits` is needed also of ranks that cost more than another that fits.
        chances, moments: `OutputLengths.chances`, `MOMENTS`.
    """
    assert 0 <= first < end <= len(rooms) == len(options) == len(open_tenants)
    assert 0 <= line < len(needs)
    assert 0 <= tenant < open_tenants.shape[1]
    need, least = needs[line], rooms[0].num_running
    for k in range(len(rooms)):
        least = min(least, rooms[k].num_running)
    num_unskewed = int(least + max(MAX_SKEW_REQUESTS, MAX_SKEW_SHARE * least))
    best, num_others, num_uncounted, most = NO_RANK, 0, 0, NO_COST
    for k in range(first, end):
        room, option, is_open = rooms[k], options[k], open_tenants[k, tenant]
        _try_rank(room, option, need, is_open, num_unskewed, step_tokens, most, chances, moments)
        num_uncounted += option.is_uncounted
        if option.fits:
            if best != NO_RANK:
                cost, least = option.cost, options[best].cost
                is_better = option.is_full < options[best].is_full
                if option.is_full == options[best].is_full:
                    is_better = room.num_running < rooms[best].num_running
                if cost > least or (cost == least and not is_better):
                    continue
            best = k
            if not tries_all:
                most = option.cost
    for k in range(first, end):
        option = options[k]
        # A wait for a row ends with the first request or later.
        least = option.cost + (0 if rooms[k].has_row else step_tokens * rooms[k].soonest_end)
        is_longer = best != NO_RANK and option.num_read > options[best].num_read
        option.may_win = is_longer and not option.fits and least <= options[best].cost
        num_others += option.may_win
    return best, num_others, num_uncounted


@compiled(
    "(rooms[::1], int64, needs[::1], int64, int64, int64, float64[:, :, ::1], int64[::1])",
    rooms=ROOM,
    needs=NEED,
)
def hold(
    rooms: Rooms,
    dp_rank: int,
    needs: Needs,
    line: int,
    num_pages: int,
    num_steps: int,
    chances: Float64Array,
    moments: IntpArray,
) -> None:
    """Hold a rank for the request in `line`, which is expected to start there in `num_steps`.

    The rank is held against requests of its priority and lower. The request takes `num_pages` to
    start, without shared pages of its prefix.
    """
    assert 0 <= dp_rank < len(rooms)
    assert 0 <= line < len(needs)
    room, need = rooms[dp_rank], needs[line]
    assert 0 <= need.length_class < len(chances)
    assert 0 <= need.bucket < chances.shape[1]
    goes_on = chances[need.length_class, need.bucket]
    num_before, each_page = _num_steps(room, num_pages), _steps_per_page(room)
    short = _most_short(room, need, num_pages, num_before, True, False, goes_on, moments, each_page)
    room.held_above, room.held_steps, room.held_most = need.priority, num_steps, need.most
    room.held_pages = int(np.ceil(room.total + short))


@compiled("(room, need, int64, float64[:, :, ::1], int64[::1])", room=ROOM, need=NEED)
def _fits(room: Any, need: Any, num_pages: int, chances: Float64Array, moments: IntpArray) -> bool:
    """Return whether a request fits a room if it takes `num_pages` to start there."""
    if not room.is_open or num_pages > room.total - room.pages[0] or need.priority <= room.floor:
        return False
    steps_per_page = _steps_per_page(room)
    num_shared, peak = need.pages - num_pages, room.peak
    if (
        room.most + need.most - num_shared > room.total
        and 0 < moments[peak] < need.left
        and moments[peak] <= num_pages * steps_per_page
        and num_pages * room.page_size < room.chunk_size
    ):
        # At the peak, as in `_most_short`: most lines that do not fit lack pages then.
        growth = min(room.conservativeness, 1.0) * (need.most - need.pages) / need.left
        ahead = min((moments[peak] + moments[peak + 1]) // 2, need.left)
        assert 0 <= need.length_class < len(chances)
        assert 0 <= need.bucket < chances.shape[1]
        chance = chances[need.length_class, need.bucket, peak]
        if chance * (num_pages + growth * ahead) > room.total - room.pages[peak]:
            return False
    return _pages_short(room, need, num_pages, chances, moments, steps_per_page) <= 0


@compiled(
    "(rooms[::1], int64[::1], int32[:, ::1], needs[::1], boolean[::1], float64[:, :, ::1], "
    "int64[::1])",
    rooms=ROOM,
    needs=NEED,
)
def find_fits(
    rooms: Rooms,
    ranks: IntpArray,
    pages: Int32Array,
    needs: Needs,
    is_tried: BoolArray,
    chances: Float64Array,
    moments: IntpArray,
) -> BoolArray:
    """Return which lines fit which of `ranks`, bool[len(ranks), lines].

    Args:
        rooms: ROOM[n]; no line fits a room that is not open.
        ranks: indices of the rooms.
        pages: int32[len(ranks), lines], pages that a line takes to start; `NEVER` if it may not.
        needs: NEED[lines] or more.
        is_tried: bool[lines]; the result is False for lines not tried.
        chances, moments: `OutputLengths.chances`, `MOMENTS`.
    """
    fits = np.zeros(pages.shape, np.bool_)
    num_ranks, end = pages.shape
    assert num_ranks == len(ranks)
    assert end <= len(needs)
    assert end <= len(is_tried)
    for k in range(num_ranks):
        assert 0 <= ranks[k] < len(rooms)
        room = rooms[ranks[k]]
        num_free = room.total - room.pages[0]
        for line in range(end):
            # Most lines that do not fit lack pages now, and the call takes longer than this.
            if is_tried[line] and pages[k, line] <= num_free:
                fits[k, line] = _fits(room, needs[line], pages[k, line], chances, moments)
    return fits


@compiled(
    "(int64[::1], int64, rooms[::1], int64[::1], int32[:, ::1], boolean[:, ::1], needs[::1], "
    "int32[::1], boolean[:, ::1], int32[::1], int64, int32[:, ::1], float64[:, :, ::1], "
    "int64[::1])",
    rooms=ROOM,
    needs=NEED,
)
def next_line(
    order: IntpArray,
    start: int,
    rooms: Rooms,
    ranks: IntpArray,
    least: Int32Array,
    preempts: BoolArray,
    needs: Needs,
    tenant: Int32Array,
    open_tenants: BoolArray,
    skip_count: Int32Array,
    max_skip_count: int,
    in_use: Int32Array,
    chances: Float64Array,
    moments: IntpArray,
) -> tuple[int, int]:
    """Return the index in `order`, from `start` on, of the first line that may start or that a rank
    may be held for, and which of the two: `MAY_START` or `MAY_HOLD`. Return len(order) and
    `MAY_HOLD` if there is no such line.

    If that depends on how many of a line's cached pages are in use, and `in_use` does not have it,
    return the line's index and the index in `ranks` of the rank.

    Args:
        order: the lines, first to last.
        rooms: ROOM[all ranks].
        ranks: indices of the rooms of the following arrays.
        least: int32[len(ranks), lines], the pages that a line takes to start if all of its cached
            prefix is in use; `NEVER` if it may not.
        preempts: bool[len(ranks), lines], whether a line fits after retracts; or empty.
        needs, tenant: NEED[lines] and int32[lines], or more.
        open_tenants: bool[all ranks, tenants], whether a tenant's next prompt is not bound by
            `ROOM.most_tokens`.
        skip_count: int32[lines], passes over each line; they grow as requests start.
        max_skip_count: a line with this many passes is due.
        in_use: int32[len(ranks), lines], how many of the pages of a line's cached prefix are in
            use, below 0 if not counted yet.
        chances, moments: `OutputLengths.chances`, `MOMENTS`.
    """
    num_ranks, end = least.shape
    assert num_ranks == len(ranks) == len(in_use)
    assert end == in_use.shape[1]
    assert end <= len(needs)
    assert end <= len(tenant)
    assert end == len(skip_count)
    num_free, lowest_floor = np.full(num_ranks, -1.0), np.iinfo(np.int64).max
    for k in range(num_ranks):
        assert 0 <= ranks[k] < len(rooms) == len(open_tenants)
        room = rooms[ranks[k]]
        if room.is_open:
            num_free[k] = room.total - room.pages[0]
        lowest_floor = min(lowest_floor, room.floor)
    for index in range(start, len(order)):
        line = order[index]
        assert 0 <= line < end
        assert 0 <= tenant[line] < open_tenants.shape[1]
        need, uncounted, may_hold = needs[line], -1, False
        if need.priority <= lowest_floor:
            continue  # no rank has prompt tokens for it
        is_starved = skip_count[line] >= max_skip_count
        for k in range(num_ranks):
            room, num_pages = rooms[ranks[k]], least[k, line]
            # Check first for pages now: most lines that do not fit lack them.
            may_start = num_pages <= num_free[k]
            if (not may_start and not is_starved and not preempts.size) or num_pages == NEVER:
                continue
            num_cached = need.pages - num_pages
            num_tokens = need.tokens - num_cached * room.page_size
            is_open_tenant = open_tenants[ranks[k], tenant[line]]
            if not _has_tokens(
                need.priority, num_tokens, room.floor, room.most_tokens, is_open_tenant
            ):
                continue
            if preempts.size and preempts[k, line]:
                return index, MAY_START
            if is_starved and room.held_above == NO_FLOOR:
                may_hold = True
            if not may_start or not _fits(room, need, num_pages, chances, moments):
                continue
            if num_cached == 0 or _fits(room, need, need.pages, chances, moments):
                return index, MAY_START
            if in_use[k, line] < 0:
                uncounted = k
                continue
            num_pages = need.pages - min(in_use[k, line], num_cached)
            if _fits(room, need, num_pages, chances, moments):
                return index, MAY_START
        if uncounted >= 0:
            return index, uncounted
        if may_hold:
            return index, MAY_HOLD
    return len(order), MAY_HOLD

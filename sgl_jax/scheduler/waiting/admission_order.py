"""Orders waiting requests for admission, from their columns.

The order is by priority; service of the tenant, if tenants have shares; too many passes over it;
retraction, since retracted requests have output to lose; with `lpm`, unless the request is due, the
longest cached prefix, or while all ranks thrash (`working_set.py`) the fewest tokens to compute;
the least served tenant; with `lpm`, the reuse of its prefix by other waiting requests; and arrival.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.scheduler.forecast.capacity import Rooms
from sgl_jax.scheduler.forecast.fits import MAY_HOLD, NEVER, NO_FLOOR, find_fits, next_line
from sgl_jax.scheduler.forecast.output_lengths import MOMENTS, Int64Array, OutputLengths
from sgl_jax.scheduler.preemption import Preemptible
from sgl_jax.scheduler.tenants import NUM_LEVELS, Tenants, Turns
from sgl_jax.scheduler.waiting.queue_loops import (
    MOST_LEVELS,
    NUM_REUSES,
    alike_lines,
    least_pages,
    order_keys,
    places_of,
    reuse_order,
)
from sgl_jax.scheduler.waiting.waiting_columns import WaitingColumns

_NONE_PREEMPTS = np.zeros((0, 0), np.bool_)
# Number of lines sorted first, and the factor from each part to the next: usually no rank has
# prompt tokens left after the first.
_FIRST_PART, _GROWTH = 64, 4
_NUM_SAMPLED = 4  # keys of a sample within a part
# Number of lines counted together for their pages in use.
_COUNTED_AT_ONCE = 32


class Offer(NamedTuple):
    """The ranks' capacity in a step; updated as requests start."""

    rooms: Rooms  # ROOM[ranks]
    may_preempt: BoolArray  # [ranks] whether running requests may give way
    # [ranks, tenants] whether a tenant's next prompt is not bound by `ROOM.most_tokens`
    open_tenants: BoolArray
    # Lines that wait for a prefix: further lines that would wait for it are not tried.
    passed_by: list[int]
    started_on: list[int]  # ranks where the last line that was tried has started


class Levels(NamedTuple):
    """The priorities of the waiting requests."""

    highest: int
    number: int  # from the lowest to the highest


class AdmissionOrder:
    """The lines of waiting requests that may start, in admission order.

    Args:
        columns: the columns of the waiting requests.
        memories: the memories of all ranks.
        tenants: the tenants of the requests.
        lengths: the estimate of output lengths.
        max_skip_count: a request passed over by this many later requests is due.
    """

    uses_cached_len = False  # whether the longest cached prefix comes first, and
    is_thrashing = False  # whether it is the fewest pages to compute instead

    def __init__(
        self,
        columns: WaitingColumns,
        memories: Sequence[RankMemory],
        tenants: Tenants,
        lengths: OutputLengths,
        max_skip_count: int,
    ) -> None:
        self._columns = columns
        self._memories = memories
        self._tenants = tenants
        self._lengths = lengths
        self._max_skip_count = max_skip_count

    def lines(
        self,
        offer: Offer,
        step: int,
        preemptible: Sequence[Preemptible],
        threshold: int,
        levels: Levels,
    ) -> Iterator[tuple[int, bool]]:
        """Yield the lines that may start in `step`, or are due and may not, in admission order,
        each with whether it may start. The columns must be up to date."""
        columns = self._columns
        end = columns.end
        ranks = (offer.rooms["is_open"] | offer.may_preempt).nonzero()[0]
        least = self._least_pages(offer, ranks, step)
        preempts = self._find_preempting(ranks, least, preemptible, threshold)
        turns, skip_count = self._tenants.turns(), columns.lines.skip_count[:end]
        if turns is not None and turns.is_lagging.any():
            is_lagging = turns.is_lagging[columns.lines.tenant[:end]]
            skip_count = np.where(is_lagging, self._max_skip_count, skip_count)
        is_starved = skip_count >= self._max_skip_count
        keys, tried = self._order_keys(least, turns, is_starved, levels)
        yield from self._try_in_order(keys, tried, offer, ranks, least, preempts, skip_count)

    def _try_in_order(
        self,
        keys: Int64Array,
        rest: IntpArray,
        offer: Offer,
        ranks: IntpArray,
        least: Int32Array,
        preempts: BoolArray,
        skip_count: Int32Array,
    ) -> Iterator[tuple[int, bool]]:
        """Yield the result of `lines`. The arguments are those of `next_line`, the lines' `keys`,
        and `rest`, the lines that may start."""
        columns = self._columns
        in_use = np.full(least.shape, -1, np.int32)
        in_use_at: defaultdict[int, dict[int, int]] = defaultdict(dict)

        def find(order: IntpArray, start: int) -> tuple[int, int]:
            found: tuple[int, int] = next_line(
                order,
                start,
                offer.rooms,
                ranks,
                least,
                preempts,
                columns.lines.needs,
                columns.lines.tenant,
                offer.open_tenants,
                skip_count,
                self._max_skip_count,
                in_use,
                self._lengths.chances,
                MOMENTS,
            )
            return found

        most = _FIRST_PART
        while find(rest, 0)[0] < len(rest):
            order, rest = _sorted_part(rest, keys, most)
            most *= _GROWTH
            index = 0
            while True:
                index, found = find(order, index)
                if index == len(order):
                    break
                line = int(order[index])
                if found >= 0:
                    lines, dp_rank = order[index : index + _COUNTED_AT_ONCE], int(ranks[found])
                    counted = self._count_in_use(dp_rank, lines, in_use_at[dp_rank])
                    in_use[found, lines] = counted
                    continue
                index += 1
                if found == MAY_HOLD:
                    yield line, False
                    continue
                yield line, True
                # A start puts its prefix in use, and may split nodes of the tree.
                while offer.started_on:
                    dp_rank = offer.started_on.pop()
                    if in_use_at.pop(dp_rank, None) is not None:
                        in_use[ranks.searchsorted(dp_rank)] = -1
                while offer.passed_by:
                    least[:, self._alike(offer.passed_by.pop(), least.shape[1])] = NEVER

    def _least_pages(self, offer: Offer, ranks: IntpArray, step: int) -> Int32Array:
        """Return int32[len(ranks), end], minimum pages of each line; `NEVER` if it may not
        start."""
        columns, end = self._columns, self._columns.end
        least: Int32Array = least_pages(
            end, ranks, offer.rooms, offer.open_tenants, step, columns.lines
        )
        if self._tenants.limits_running:
            least[:, self._tenants.is_full[columns.lines.tenant[:end]]] = NEVER
        return least

    def find(
        self, rooms: Rooms, ranks: IntpArray, pages: Int32Array, is_tried: BoolArray
    ) -> BoolArray:
        """Return which lines fit which of `ranks` in `rooms`, bool[len(ranks), lines]."""
        needs = self._columns.lines.needs
        fits: BoolArray = find_fits(
            rooms, ranks, pages, needs, is_tried, self._lengths.chances, MOMENTS
        )
        return fits

    def _alike(self, line: int, end: int) -> BoolArray:
        """Return, by line below `end`, whether a request continues with the same page as `line`
        after the cached part of its prefix, on the rank that `line` waits for. Lines may have left
        since the step began."""
        lines = self._columns.lines
        dp_rank = int(lines.stay_rank[line])
        above = self._memories[dp_rank].waiting.columns.above[dp_rank]
        is_alike: BoolArray = alike_lines(line, lines.prefix[:end], above)
        return is_alike

    def _find_preempting(
        self,
        ranks: IntpArray,
        least: Int32Array,
        preemptible: Sequence[Preemptible],
        threshold: int,
    ) -> BoolArray:
        """Return the lines that fit after all requests that they may preempt are retracted,
        bool[len(ranks), end]; empty if none may preempt."""
        if not preemptible:
            return _NONE_PREEMPTS
        preempts = np.zeros(least.shape, np.bool_)
        below = self._columns.lines.needs["priority"][: least.shape[1]] - threshold
        for k, dp_rank in enumerate(ranks.tolist()):
            at_rank = preemptible[dp_rank]
            at_rank.rooms["floor"], at_rank.rooms["is_open"] = NO_FLOOR, True
            num_levels = np.searchsorted(at_rank.levels, below)  # that give way
            for level in range(len(at_rank.levels)):
                is_tried = np.asarray(num_levels == level + 1)
                if is_tried.any():
                    number, part = np.array((level,)), slice(k, k + 1)
                    preempts[part] |= self.find(at_rank.rooms, number, least[part], is_tried)
        return preempts

    def _count_in_use(self, dp_rank: int, lines: IntpArray, counted: dict[int, int]) -> list[int]:
        """Return how many pages of the cached prefixes of `lines` are in use on a rank. `counted`
        caches the numbers by place."""
        memory = self._memories[dp_rank]
        nodes, columns = memory.cache.cursors.nodes, memory.waiting.columns
        above, place = columns.above[dp_rank], columns.place[dp_rank]
        places = places_of(lines, self._columns.lines.prefix, above, place).tolist()
        for place in places:
            if place not in counted:
                counted[place] = memory.in_use_len(nodes[place]) // memory.page_size
        return [counted[place] for place in places]

    def _order_keys(
        self, least: Int32Array, turns: Turns | None, is_starved: BoolArray, levels: Levels
    ) -> tuple[Int64Array, IntpArray]:
        """Return int64[end], a sort key of each line for admission order, and the lines that may
        start."""
        lines, end = self._columns.lines, self._columns.end
        tenant = lines.tenant[:end]
        level, num_levels = levels.highest - lines.needs["priority"][:end], levels.number
        turn = lines.no_turns[:end]
        if turns is not None:
            level = level * NUM_LEVELS + turns.level[tenant]
            turn, num_levels = turns.order[tenant], num_levels * NUM_LEVELS
            if self.uses_cached_len:
                shared = self._memories[0].waiting.columns
                reuse = reuse_order(end, lines, shared.parent, shared.end_pages)
                turn = turn * NUM_REUSES + reuse
        if num_levels > MOST_LEVELS:  # number the occurring levels
            level = np.unique(level, return_inverse=True)[1].astype(np.int64)
        keys: tuple[Int64Array, IntpArray] = order_keys(
            least, self.uses_cached_len, self.is_thrashing, level, turn, is_starved, lines
        )
        return keys


def _sorted_part(lines: IntpArray, keys: Int64Array, most: int) -> tuple[IntpArray, IntpArray]:
    """Return about `most` of the lines with the lowest keys, sorted, and the rest. Lines with equal
    keys stay together, in the same order on every host."""
    first, rest = _split_lines(lines, keys, most)
    return first[keys[first].argsort(kind="stable")], rest


@compiled("(int64[::1], int64[::1], int64)")
def _split_lines(lines: IntpArray, keys: Int64Array, most: int) -> tuple[IntpArray, IntpArray]:
    """Return the lines of `_sorted_part`, in their order, and the rest."""
    # A bound from a sample of the keys takes less time than the exact one.
    lowest = np.full(_NUM_SAMPLED + 1, np.iinfo(np.int64).max)
    for i in range(0, len(lines) if len(lines) > most else 0, max(most // _NUM_SAMPLED, 1)):
        assert 0 <= lines[i] < len(keys)
        key = keys[lines[i]]
        for j in range(len(lowest)):
            lowest[j], key = min(lowest[j], key), max(lowest[j], key)
    first, rest, num_first = np.empty_like(lines), np.empty_like(lines), 0
    for i in range(len(lines)):
        assert 0 <= lines[i] < len(keys)
        if keys[lines[i]] <= lowest[_NUM_SAMPLED]:
            first[num_first] = lines[i]
            num_first += 1
        else:
            rest[i - num_first] = lines[i]
    return first[:num_first], rest[: len(lines) - num_first]

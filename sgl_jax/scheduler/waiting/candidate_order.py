"""The order in which waiting requests are tried, from their columns.

By priority; then, if tenants have shares, by service of the tenant; then requests that were
passed over too often; then retracted ones, which have output to lose; then the longest cached
prefix (`lpm`) or nothing (`fcfs`); then the least served tenant, and with `lpm` its requests whose
prefix most other waiting requests continue; then arrival.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.scheduler.admission.preemption import Preemptible
from sgl_jax.scheduler.waiting.tenants import NUM_LEVELS, Tenants, Turns
from sgl_jax.scheduler.waiting.waiting_columns import WaitingColumns
from sgl_jax.scheduler.waiting.waiting_lines import (
    LAST,
    MOST_LEVELS,
    NEVER,
    NUM_REUSES,
    Int64Array,
    alike_lines,
    count_in_use,
    least_pages,
    order_keys,
    places_of,
    reuse_order,
    rule_out,
    take_offer,
)


class Offer(NamedTuple):
    """The ranks' capacity in a step; updated as requests start."""

    num_pages: Int32Array  # [ranks] that a request may take, beside shared pages of its prefix
    is_open: BoolArray  # [ranks] whether the step takes another request that fits
    floor: Int64Array  # [ranks] a request starts only if its priority is above this
    may_preempt: BoolArray  # [ranks] whether running requests may give way
    # Lines that wait for a prefix: others that would wait for the same one are not tried.
    passed_by: list[int]


class Levels(NamedTuple):
    """The priorities of the waiting requests."""

    highest: int
    number: int  # from the lowest to the highest


class CandidateOrder:
    """The lines of waiting requests that may start, in the order in which they are tried.

    Args:
        columns: of the waiting requests.
        memories: of all ranks.
        tenants: the tenants of the requests.
        max_passed_over: a request passed over by so many later ones is due.
    """

    uses_cached_len = False  # whether the longest cached prefix comes first

    def __init__(
        self,
        columns: WaitingColumns,
        memories: Sequence[RankMemory],
        tenants: Tenants,
        max_passed_over: int,
    ) -> None:
        self._columns = columns
        self._memories = memories
        self._tenants = tenants
        self._max_passed_over = max_passed_over

    def lines(
        self,
        offer: Offer,
        step: int,
        preemptible: Sequence[Preemptible],
        threshold: int,
        levels: Levels,
    ) -> Iterator[int]:
        """See `WaitingQueue.candidates`; the columns are up to date."""
        columns = self._columns
        end = columns.end
        ranks = (offer.is_open | offer.may_preempt).nonzero()[0]
        room, floor = np.zeros(len(ranks), np.int32), np.zeros(len(ranks), np.int64)
        take_offer(ranks, offer.num_pages, offer.is_open, offer.floor, room, floor)
        may_start = columns.is_waiting[:end] & ~columns.awaits_event[:end]
        least, doubtful = least_pages(
            end,
            ranks,
            room,
            offer.is_open,
            floor,
            step,
            may_start,
            columns.has_leader,
            columns.stay_until,
            columns.stay_rank,
            columns.may_run,
            columns.priority,
            columns.num_pages,
            columns.cached_pages,
        )
        if len(doubtful):
            self._count_in_use(doubtful, ranks, room, least)
        is_full = self._tenants.is_full
        if is_full.any():
            least[:, is_full[columns.tenant[:end]]] = NEVER
        most_room = self._most_room(ranks, preemptible, threshold)
        turns, passed_over = self._tenants.turns(), columns.passed_over
        if turns is not None and turns.is_lagging.any():
            is_lagging = turns.is_lagging[columns.tenant[:end]]
            passed_over = np.where(is_lagging, self._max_passed_over, passed_over[:end])
        keys = self._order_keys(least, room, most_room, turns, passed_over, levels)
        while len(keys) and keys[first := int(keys.argmin())] != LAST:
            keys[first] = LAST
            yield first
            while offer.passed_by:
                keys[self._alike(offer.passed_by.pop())] = LAST
            if take_offer(ranks, offer.num_pages, offer.is_open, offer.floor, room, floor):
                rule_out(
                    keys,
                    least,
                    room,
                    floor,
                    most_room,
                    self._max_passed_over,
                    columns.priority,
                    passed_over,
                )

    def _alike(self, line: int) -> BoolArray:
        """Return, by line, whether a request continues with the same page as `line` behind the
        cached part of its prefix, on the rank that `line` waits for."""
        columns = self._columns
        dp_rank = int(columns.stay_rank[line])
        above = self._memories[dp_rank].cache.cursors.columns.above
        is_alike: BoolArray = alike_lines(line, columns.cursor[dp_rank, : columns.end], above)
        return is_alike

    def _most_room(
        self, ranks: IntpArray, preemptible: Sequence[Preemptible], threshold: int
    ) -> Int32Array:
        """The pages of each of `ranks` for each line if all requests that it may preempt give way,
        -1 if none does: int32[len(ranks), end]; int32[len(ranks), 0] if none may preempt."""
        if not preemptible:
            return np.zeros((len(ranks), 0), np.int32)
        end = self._columns.end
        below = self._columns.priority[:end] - threshold
        most = np.empty((len(ranks), end), np.int32)
        for k, dp_rank in enumerate(ranks.tolist()):
            counts = np.searchsorted(preemptible[dp_rank].priorities, below)
            most[k] = np.where(counts > 0, preemptible[dp_rank].most_pages[counts], -1)
        return most

    def _count_in_use(
        self, lines: Int64Array, ranks: IntpArray, room: Int32Array, least: Int32Array
    ) -> None:
        """Raise `least` for those `lines` that do not fit but might if all their cached pages were
        in use: a line takes all pages of its prefix that are not in use."""
        columns = self._columns
        for k, dp_rank in enumerate(ranks.tolist()):
            memory, place = self._memories[dp_rank], columns.place[dp_rank]
            nodes, most = memory.cache.cursors.nodes, int(room[k])
            in_use = np.zeros(len(nodes), np.int32)
            for number in places_of(lines, least[k], most, place, len(nodes)).tolist():
                in_use[number] = memory.in_use_len(nodes[number]) // memory.page_size
            cached_pages = columns.cached_pages[dp_rank]
            count_in_use(lines, least[k], most, place, in_use, columns.num_pages, cached_pages)

    def _order_keys(
        self,
        least: Int32Array,
        room: Int32Array,
        most_room: Int32Array,
        turns: Turns | None,
        passed_over: Int32Array,
        levels: Levels,
    ) -> Int64Array:
        """`order_keys`; the arguments are `lines`'."""
        columns = self._columns
        end = columns.end
        tenant = columns.tenant[:end]
        level, num_levels = levels.highest - columns.priority[:end], levels.number
        turn = columns.no_turns[:end]
        if turns is not None:
            level = level * NUM_LEVELS + turns.level[tenant]
            turn, num_levels = turns.order[tenant], num_levels * NUM_LEVELS
            if self.uses_cached_len:
                turn = turn * NUM_REUSES + self._reuse_order()
        if num_levels > MOST_LEVELS:  # number the occurring levels
            level = np.unique(level, return_inverse=True)[1].astype(np.int64)
        keys: Int64Array = order_keys(
            least,
            room,
            most_room,
            self.uses_cached_len,
            self._max_passed_over,
            level,
            turn,
            columns.is_retracted,
            columns.most_cached,
            passed_over,
            columns.arrival,
        )
        return keys

    def _reuse_order(self) -> Int32Array:
        columns, end = self._columns, self._columns.end
        stems = self._memories[0].cache.cursors.columns  # equal on every rank
        order: Int32Array = reuse_order(
            columns.is_waiting[:end],
            columns.num_pages[:end],
            columns.most_cached[:end],
            columns.cursor[0, :end],
            stems.parent,
            stems.end_pages,
        )
        return order

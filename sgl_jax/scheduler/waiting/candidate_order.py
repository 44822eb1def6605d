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
from sgl_jax.scheduler.admission.output_lengths import MOMENTS, OutputLengths
from sgl_jax.scheduler.admission.preemption import Preemptible
from sgl_jax.scheduler.waiting.fits import (
    NEVER,
    NO_FLOOR,
    NO_LIMIT,
    Int64Array,
    Rooms,
    count_in_use,
    find_fits,
    least_pages,
    places_of,
    rule_out_long,
)
from sgl_jax.scheduler.waiting.tenants import NUM_LEVELS, Tenants, Turns
from sgl_jax.scheduler.waiting.waiting_columns import WaitingColumns
from sgl_jax.scheduler.waiting.waiting_lines import (
    LAST,
    MOST_LEVELS,
    NUM_REUSES,
    alike_lines,
    order_keys,
    reuse_order,
    rule_out,
)

_NO_TENANTS = np.zeros(0, np.bool_)


class Offer(NamedTuple):
    """The ranks' capacity in a step; updated as requests start."""

    rooms: Rooms  # ROOM[ranks]
    may_preempt: BoolArray  # [ranks] whether running requests may give way
    # [ranks] the tenants, by number, whose next prompt is not bound by `ROOM.most_tokens`
    open_tenants: list[BoolArray | None]
    # Lines that wait for a prefix: others that would wait for the same one are not tried.
    passed_by: list[int]
    changed: set[int]  # ranks with another room than when a line was last tried


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
        lengths: of their outputs.
        max_passed_over: a request passed over by so many later ones is due.
    """

    uses_cached_len = False  # whether the longest cached prefix comes first

    def __init__(
        self,
        columns: WaitingColumns,
        memories: Sequence[RankMemory],
        tenants: Tenants,
        lengths: OutputLengths,
        max_passed_over: int,
    ) -> None:
        self._columns = columns
        self._memories = memories
        self._tenants = tenants
        self._lengths = lengths
        self._max_passed_over = max_passed_over

    def lines(
        self,
        offer: Offer,
        step: int,
        preemptible: Sequence[Preemptible],
        threshold: int,
        levels: Levels,
    ) -> Iterator[tuple[int, bool]]:
        """See `WaitingQueue.candidates`; the columns are up to date."""
        columns = self._columns
        end = columns.end
        is_open, floor = offer.rooms["is_open"], offer.rooms["floor"]
        ranks = (is_open | offer.may_preempt).nonzero()[0]
        least = least_pages(
            end,
            ranks,
            is_open,
            step,
            columns.is_waiting[:end] & ~columns.awaits_event[:end],
            columns.has_leader,
            columns.stay_until,
            columns.stay_rank,
            columns.may_run,
            floor,
            columns.needs,
            columns.cached_pages,
        )
        is_full = self._tenants.is_full
        if is_full.any():
            least[:, is_full[columns.tenant[:end]]] = NEVER
        for k, dp_rank in enumerate(ranks.tolist()):
            self._rule_out_long(offer, dp_rank, least[k])
        fits = self._fits(offer.rooms, ranks, least)
        self._add_preempting(fits, ranks, least, floor, preemptible, threshold)
        offer.changed.clear()
        turns, passed_over = self._tenants.turns(), columns.passed_over
        if turns is not None and turns.is_lagging.any():
            is_lagging = turns.is_lagging[columns.tenant[:end]]
            passed_over = np.where(is_lagging, self._max_passed_over, passed_over[:end])
        may_hold = offer.rooms["held_above"][ranks] == NO_FLOOR
        keys = self._order_keys(fits, least, may_hold, turns, passed_over, levels)
        while len(keys) and keys[first := int(keys.argmin())] != LAST:
            may_start = bool(fits[:, first].any())
            # Holds for due requests come before others that may start, and are counted together.
            if offer.changed and (may_start or not may_hold.any()):
                self._recount(fits, ranks, least, keys != LAST, offer, preemptible, threshold)
                rule_out(
                    keys,
                    fits,
                    least,
                    may_hold,
                    floor[ranks],
                    self._max_passed_over,
                    columns.priority,
                    passed_over,
                )
                continue
            keys[first] = LAST
            yield first, may_start
            while offer.passed_by:
                keys[self._alike(offer.passed_by.pop())] = LAST
            if offer.changed:
                may_hold = offer.rooms["held_above"][ranks] == NO_FLOOR

    def _recount(
        self,
        fits: BoolArray,
        ranks: IntpArray,
        least: Int32Array,
        is_left: BoolArray,
        offer: Offer,
        preemptible: Sequence[Preemptible],
        threshold: int,
    ) -> None:
        """Update `fits` for the changed ranks, and for the lines that are left, bool[end].

        A start leaves less room, so lines that did not fit before do not fit now.
        """
        parts = np.array([k for k, rank in enumerate(ranks.tolist()) if rank in offer.changed])
        offer.changed.clear()
        if not len(parts):
            return
        for k in parts.tolist():
            self._rule_out_long(offer, int(ranks[k]), least[k])
        changed, before, pages = ranks[parts], fits[parts], least[parts]
        is_tried = np.asarray(is_left & before.any(axis=0))
        after = np.asarray(before & self.find(offer.rooms, changed, pages, is_tried))
        self._add_preempting(after, changed, pages, offer.rooms["floor"], preemptible, threshold)
        fits[parts] = after

    def _fits(self, rooms: Rooms, ranks: IntpArray, least: Int32Array) -> BoolArray:
        """Return which lines fit which of `ranks`, bool[len(ranks), end].

        Args:
            rooms: ROOM[all ranks].
            ranks: with the lines' rooms.
            least: int32[len(ranks), end], the pages that a line takes at least; raised for lines
                that do not fit since too few of their cached pages are in use.
        """
        end = least.shape[1]
        fits_alone = np.zeros(end, np.bool_)
        fits = self.find(rooms, ranks, least, np.ones(end, np.bool_), fits_alone)
        is_doubtful = np.asarray(fits.any(axis=0) & ~fits_alone)
        if is_doubtful.any():
            needed = np.where(fits, least, NEVER)
            self._count_in_use(is_doubtful, ranks, needed)
            fits_now = self.find(rooms, ranks, needed, is_doubtful)
            # Others that start may bring more of its prefix into use, where it fits.
            is_short = np.asarray(fits & is_doubtful & ~fits_now)
            least[is_short] = needed[is_short]
            fits[is_short] = False
        return fits

    def find(
        self,
        rooms: Rooms,
        ranks: IntpArray,
        pages: Int32Array,
        is_tried: BoolArray,
        fits_alone: BoolArray | None = None,
    ) -> BoolArray:
        """`find_fits` in the rooms of `ranks`; False for lines that are not tried."""
        fits = np.zeros(pages.shape, np.bool_)
        if fits_alone is None:
            fits_alone = np.ones(pages.shape[1], np.bool_)
        needs, chances = self._columns.needs, self._lengths.chances
        find_fits(rooms, ranks, pages, needs, is_tried, chances, MOMENTS, fits, fits_alone)
        return fits

    def _rule_out_long(self, offer: Offer, dp_rank: int, pages: Int32Array) -> None:
        """Set `pages`, int32[end], of lines that have too many tokens to compute on a rank (`ROOM`)
        to `NEVER`."""
        room, open_tenants = offer.rooms[dp_rank], offer.open_tenants[dp_rank]
        most_tokens = int(room["most_tokens"])
        if most_tokens == NO_LIMIT:
            return
        columns = self._columns
        rule_out_long(
            pages,
            columns.cached_pages[dp_rank],
            columns.tenant,
            _NO_TENANTS if open_tenants is None else open_tenants,
            int(room["floor"]) + 1,
            most_tokens,
            self._memories[dp_rank].page_size,
            columns.needs,
        )

    def _alike(self, line: int) -> BoolArray:
        """Return, by line, whether a request continues with the same page as `line` behind the
        cached part of its prefix, on the rank that `line` waits for."""
        columns = self._columns
        dp_rank = int(columns.stay_rank[line])
        above = self._memories[dp_rank].cache.cursors.columns.above
        is_alike: BoolArray = alike_lines(line, columns.cursor[dp_rank, : columns.end], above)
        return is_alike

    def _add_preempting(
        self,
        fits: BoolArray,
        ranks: IntpArray,
        least: Int32Array,
        floor: Int64Array,
        preemptible: Sequence[Preemptible],
        threshold: int,
    ) -> None:
        """Add to `fits` the lines that fit if all requests that they may preempt give way.

        The arguments are `lines`'; `fits` and `least` have a line for each of `ranks`, `floor` of
        each rank.
        """
        if not preemptible:
            return
        below = self._columns.priority[: least.shape[1]] - threshold
        for k, dp_rank in enumerate(ranks.tolist()):
            at_rank, part = preemptible[dp_rank], slice(k, k + 1)
            at_rank.rooms["floor"], at_rank.rooms["is_open"] = floor[dp_rank], True
            num_levels = np.searchsorted(at_rank.levels, below)  # that give way
            for level in range(len(at_rank.levels)):
                is_tried = np.asarray((num_levels == level + 1) & ~fits[k])
                if is_tried.any():
                    number = np.array((level,))
                    fits[part] |= self.find(at_rank.rooms, number, least[part], is_tried)

    def _count_in_use(self, is_doubtful: BoolArray, ranks: IntpArray, least: Int32Array) -> None:
        """Raise `least` for lines that may fit only if enough of their cached pages are in use."""
        columns = self._columns
        for k, dp_rank in enumerate(ranks.tolist()):
            memory, place = self._memories[dp_rank], columns.place[dp_rank]
            nodes = memory.cache.cursors.nodes
            in_use = np.zeros(len(nodes), np.int32)
            for number in places_of(least[k], is_doubtful, place, len(nodes)).tolist():
                in_use[number] = memory.in_use_len(nodes[number]) // memory.page_size
            cached_pages = columns.cached_pages[dp_rank]
            count_in_use(least[k], is_doubtful, place, in_use, columns.needs, cached_pages)

    def _order_keys(
        self,
        fits: BoolArray,
        least: Int32Array,
        may_hold: BoolArray,
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
            fits,
            least,
            may_hold,
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

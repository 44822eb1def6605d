"""Requests without memory as columns of arrays.

The conditions of a start are kept in arrays, one line a request, so that a step rules out thousands
of requests at once and examines only the few left, in the order of `admission_order`. Cursors on
the ranks' trees track the cached length of each prompt, without repeated lookups.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sgl_jax.core.step_plan import BoolArray, IntpArray
from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor, SharedPrefix
from sgl_jax.scheduler.forecast.capacity import Options, Rooms
from sgl_jax.scheduler.forecast.fits import NO_RANK, find_cheapest, hold, pages_short
from sgl_jax.scheduler.forecast.output_lengths import MOMENTS, OutputLengths
from sgl_jax.scheduler.preemption import Preemptible
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.running_rows import PriorityCounts
from sgl_jax.scheduler.tenants import Tenants
from sgl_jax.scheduler.waiting.admission_order import AdmissionOrder, Levels, Offer
from sgl_jax.scheduler.waiting.delays import Delays
from sgl_jax.scheduler.waiting.queue_loops import (
    count_kinds,
    has_short,
    most_cached,
    pass_over,
    read_cursors,
)
from sgl_jax.scheduler.waiting.wait_reason import COUNTED_KINDS, WaitKind
from sgl_jax.scheduler.waiting.waiting_columns import WaitingColumns

# A request is due once this many later requests of its priority or a lower one started before it.
MAX_SKIP_COUNT = 128


class WaitingQueue:
    """The queue of requests that wait for memory of any rank.

    Args:
        policy: the order among requests of equal priority: fcfs or lpm.
        memories, tables: the memories of all ranks, in order, and the columns of all their rows.
        capacity: maximum number of requests.
        tenants, lengths: the tenants of the requests, and the estimate of their output lengths.
        awaits_event: returns whether a request must wait for an event now.
        max_skip_count: a request passed over by this many later requests is due: it is tried
            before the rest of its priority, and a rank is held for it until it fits. If it lacked
            pages, it is due earlier, once the later requests have received as much service as it
            needs.

    Attributes:
        delays: the prefixes, ranks and steps that requests wait for.
    """

    def __init__(
        self,
        policy: str,
        memories: Sequence[RankMemory],
        tables: RowTables,
        capacity: int,
        tenants: Tenants,
        lengths: OutputLengths,
        awaits_event: Callable[[Request], bool] = lambda request: False,
        max_skip_count: int = MAX_SKIP_COUNT,
    ) -> None:
        self._awaits_event = awaits_event
        self._max_skip_count = max_skip_count
        self._tenants = tenants
        self._lengths = lengths
        self._memories = memories
        self._tables = tables
        self._requests: dict[str, Request] = {}  # by rid, in the order of their adding
        self._by_line: dict[int, Request] = {}
        self.prompts = memories[0].waiting
        self._prefixes: dict[int, SharedPrefix] = {}  # by line
        self._columns = WaitingColumns(len(memories), capacity)
        self.delays = Delays(self._columns, tables, memories[0].rows.num_rows)
        self._order = AdmissionOrder(self._columns, memories, tenants, lengths, max_skip_count)
        self.set_policy(policy)
        self.priorities = PriorityCounts()
        self.num_pinned: Counter[int | None] = Counter()  # by the rank that a request names
        self._num_updates = -1  # of the lengths, when chances were computed

    def set_policy(self, policy: str) -> None:
        """Set the order: fcfs or lpm."""
        self._order.uses_cached_len = policy == "lpm"

    @property
    def uses_cached_len(self) -> bool:
        """Return whether requests start in the order of their cached prefixes."""
        return self._order.uses_cached_len

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def num_retracted(self) -> int:
        """Return the number of requests that ran before."""
        lines, end = self._columns.lines, self._columns.end
        return int(np.count_nonzero(lines.is_waiting[:end] & lines.is_retracted[:end]))

    # -- requests come and go -----------------------------------------------------------------

    def add(self, request: Request) -> None:
        lines = self._columns.lines
        line = request.line = self._columns.take_line()
        self._requests[request.rid] = self._by_line[line] = request
        # The locked tokens of a session's lease need no second walk.
        known = {}
        for memory in self._memories if request.kept_by is not None else ():
            lease = request.session_lease(memory)
            if lease is not None and lease.node is not None:
                known[memory.dp_rank] = lease.node
        prefix = self.prompts.follow(request.matchable(), request.namespace, known)
        self._prefixes[line] = prefix
        self._note_need(request, line)
        lines.prefix[line] = prefix.number
        pinned = request.message.dp_rank
        lines.may_run[:, line] = pinned is None
        if pinned is not None:
            lines.may_run[pinned, line] = True
        lines.cached_pages[:, line] = self.prompts.cached_pages(prefix)
        self._note_most_cached(line, line + 1)
        lines.arrival[line] = request.arrival
        self.priorities.add(request.priority)
        self.num_pinned[pinned] += 1
        lines.tenant[line] = request.tenant
        self._tenants.queue(request.tenant, 1)
        lines.is_retracted[line] = request.num_retractions > 0
        lines.has_images[line] = bool(request.images)
        lines.has_leader[line] = False
        lines.stay_rank[line], lines.stay_until[line] = NO_RANK, 0
        lines.held_until[line] = 0
        lines.awaits_event[line] = self._awaits_event(request)

    def _note_need(self, request: Request, line: int) -> None:
        memory, num_tokens = self._memories[0], len(request.tokens)
        number = self._lengths.class_of(request)
        output_len, left_len = num_tokens - request.prompt_len, request.max_len - num_tokens
        bucket, expected = self._lengths.expected(number, output_len, left_len)
        self._columns.lines.needs[line] = (
            memory.request_pages(min(num_tokens + 1, request.max_kv_len)),
            memory.request_pages(request.max_kv_len),
            num_tokens,
            left_len,
            output_len,
            number,
            bucket,
            request.priority,
        )
        num_steps = expected + num_tokens / memory.sizes.max_chunk_tokens
        self._columns.lines.service[line] = (num_tokens + expected / 2) * num_steps

    def note_event(self, rid: str) -> None:
        """Update whether the request `rid` waits for an event, after an event began or ended."""
        request = self._requests.get(rid)
        if request is not None:
            self._columns.lines.awaits_event[request.line] = self._awaits_event(request)

    def remove(self, request: Request) -> None:
        """Remove a waiting request; the caller starts or ends it."""
        line = request.line
        del self._requests[request.rid], self._by_line[line]
        self.prompts.unfollow(self._prefixes.pop(line))
        self.priorities.remove(request.priority)
        self.num_pinned[request.message.dp_rank] -= 1
        self._tenants.queue(request.tenant, -1)
        self._columns.free_line(line)

    def started(self, request: Request, dp_rank: int, num_free: int) -> None:
        """Remove a request that got memory on a rank, which had `num_free` pages, and count that it
        passed over earlier, no less important requests there. If it was due, passes over later
        requests are counted from 0 again: so in a long queue, only one in `max_skip_count` starts
        because it is due."""
        lines, turns = self._columns.lines, self._tenants.turns()
        order = lines.no_turns if turns is None else turns.order
        is_due, most = self.is_starved(request), self._max_skip_count
        pass_over(self._columns.end, request.line, dp_rank, is_due, num_free, most, order, lines)
        self.remove(request)

    def clear(self) -> None:
        """Remove all requests without a call to the ranks' trees, which may be broken."""
        for request in self._requests.values():
            self._tenants.queue(request.tenant, -1)
        self._requests.clear()
        self._by_line.clear()
        self._prefixes.clear()
        self.prompts.clear()
        self._columns.clear()
        self.priorities = PriorityCounts()
        self.num_pinned.clear()

    def find_due(self, rid: str) -> Request | None:
        """Return the waiting request `rid` if it is due; else None."""
        request = self._requests.get(rid)
        return request if request is not None and self.is_starved(request) else None

    # -- one request --------------------------------------------------------------------------

    def prefix(self, request: Request) -> SharedPrefix:
        """Return the prefix of the request's tokens."""
        return self._prefixes[request.line]

    def cursor(self, request: Request, dp_rank: int) -> PrefixCursor:
        """Return the cursor of the request's tokens on a rank's tree."""
        return PrefixCursor(self._prefixes[request.line], dp_rank)

    def is_starved(self, request: Request) -> bool:
        """Return whether a rank is held for the request: too many passes over it, or its tenant."""
        turns = self._tenants.turns()
        if turns is not None and turns.is_lagging[request.tenant]:
            return True
        return int(self._columns.lines.skip_count[request.line]) >= self._max_skip_count

    # -- all requests -------------------------------------------------------------------------

    def make_due(self, arrived_s: float) -> None:
        """Make the requests due that arrived at `arrived_s` or before, and have not run yet; not if
        the first to come is served first."""
        if not self.uses_cached_len:
            return
        lines = self._columns.lines
        for request in self._requests.values():
            if request.arrived_s <= arrived_s and not request.num_retractions:
                lines.held_until[request.line] = 0
                lines.skip_count[request.line] = self._max_skip_count

    def candidates(
        self,
        offer: Offer,
        step: int,
        preemptible: Sequence[Preemptible],
        threshold: int,
        is_thrashing: bool = False,
    ) -> Iterator[tuple[Request, bool]]:
        """Yield the requests that may start in this step, and due requests that may not, first to
        last, each with whether it may start.

        Args:
            offer: the capacity of the ranks. The caller updates it as requests start.
            step: the step being planned.
            preemptible: the preemptible requests of each rank, if requests may preempt; else empty.
            threshold: number by which a request's priority must exceed a preempted request's.
            is_thrashing: with `lpm`, whether the fewest tokens to compute come first.
        """
        self._take_moves()
        self._note_chances()
        self.delays.release_followers(slice(self._columns.end))
        self._order.is_thrashing = is_thrashing
        held_until = self._columns.lines.held_until[: self._columns.end]
        held_until *= held_until > step
        highest = self.priorities.highest or 0
        levels = Levels(highest, highest - (self.priorities.lowest or 0) + 1)
        for line, may_start in self._order.lines(offer, step, preemptible, threshold, levels):
            yield self._by_line[line], may_start

    def num_uncached_tokens(self, request: Request, dp_rank: int) -> int:
        """Return the number of tokens of other waiting requests missing from the rank's cache."""
        lines, end = self._columns.lines, self._columns.end
        num_cached = lines.cached_pages[dp_rank, :end] * np.int32(self._memories[dp_rank].page_size)
        num_lacking = (lines.needs["tokens"][:end] - num_cached) * lines.is_waiting[:end]
        own = num_lacking[request.line] if request.rid in self._requests else 0
        return int(num_lacking.sum() - own)

    def has_short(
        self, ranks: IntpArray, most_tokens: IntpArray, open_tenants: BoolArray, step: int
    ) -> bool:
        """Return whether a request of the highest priority may be tried in `step` on one of
        `ranks`: it has at most that rank's `most_tokens` tokens to compute there, or a tenant of
        its `open_tenants`, bool[len(ranks), tenants]."""
        self._take_moves()
        self.delays.release_followers(slice(self._columns.end))
        found: bool = has_short(
            self._columns.end,
            ranks,
            most_tokens,
            open_tenants,
            self.priorities.highest or 0,
            self._memories[0].page_size,
            step,
            self._columns.lines,
        )
        return found

    def pages_short(self, request: Request, rooms: Rooms, dp_rank: int, num_pages: int) -> int:
        """Return the pages that `request` lacks on a rank if it takes `num_pages`; <= 0 if none."""
        self._note_chances()
        needs, chances = self._columns.lines.needs, self._lengths.chances
        short: int = pages_short(rooms, dp_rank, needs, request.line, num_pages, chances, MOMENTS)
        return short

    def find_cheapest(
        self,
        request: Request,
        offer: Offer,
        options: Options,
        ranks: range,
        step_tokens: int,
        tries_all: bool,
    ) -> tuple[int, int, int]:
        """Return `fits.find_cheapest` of `request` on `ranks`, with its `options`, OPTION[all
        ranks]. The step has `step_tokens` prompt tokens."""
        self._note_chances()
        found: tuple[int, int, int] = find_cheapest(
            offer.rooms,
            options,
            ranks.start,
            ranks.stop,
            self._columns.lines.needs,
            request.line,
            offer.open_tenants,
            request.tenant,
            step_tokens,
            tries_all,
            self._lengths.chances,
            MOMENTS,
        )
        return found

    def hold(
        self, request: Request, rooms: Rooms, dp_rank: int, num_pages: int, num_steps: int
    ) -> None:
        """Record in `rooms` that a rank is held for `request`, for `num_pages` in `num_steps`."""
        self._note_chances()
        needs, chances = self._columns.lines.needs, self._lengths.chances
        hold(rooms, dp_rank, needs, request.line, num_pages, num_steps, chances, MOMENTS)

    def _note_chances(self) -> None:
        """Compute the chances of the requests' outputs, if output lengths were updated."""
        if self._num_updates != self._lengths.num_updates:
            self._num_updates = self._lengths.num_updates
            needs = self._columns.lines.needs[: self._columns.end]
            classes, output_lens = needs["length_class"].copy(), needs["output_len"].copy()
            self._lengths.buckets(classes, output_lens)

    def count_kinds(
        self,
        rooms: Rooms,
        held_rooms: Rooms,
        has_row: BoolArray,
        step: int,
        fetching: Sequence[int],
        lacks_images: Callable[[Request, int], bool],
    ) -> dict[WaitKind, int]:
        """Return the number of waiting requests by reason.

        `rooms`, ROOM[ranks], are the ranks' capacities, `held_rooms` those with the holds for due
        requests. `fetching` are joint rows of fetches from the host. `lacks_images` returns whether
        the images of a request with some do not fit on a rank. A request counts under "step" if it
        would fit were all its cached pages in use.
        """
        lines, end = self._columns.lines, self._columns.end
        self._take_moves()
        self._note_chances()
        self.delays.release_followers(slice(end))
        is_fetching = np.zeros(len(self._tables.epoch), np.bool_)
        is_fetching[list(fetching)] = True
        least = lines.needs["pages"][:end] - lines.cached_pages[:, :end]
        fits, fits_unheld = (
            self._order.find(each, np.arange(len(has_row)), least, lines.is_waiting[:end])
            for each in (held_rooms, rooms)
        )
        lacks = np.zeros((len(has_row), end), np.bool_)
        for line in (lines.is_waiting[:end] & lines.has_images[:end]).nonzero()[0].tolist():
            for dp_rank in (fits[:, line] & has_row).nonzero()[0].tolist():
                lacks[dp_rank, line] = lacks_images(self._by_line[line], dp_rank)
        counts = count_kinds(
            end,
            step,
            lines,
            self._tenants.is_full,
            is_fetching,
            has_row,
            fits,
            fits_unheld,
            lacks,
        )
        return dict(zip(COUNTED_KINDS, counts.tolist(), strict=True))

    def _take_moves(self) -> None:
        """Copy changed cursors of the ranks' trees."""
        lines, end, columns = self._columns.lines, self._columns.end, self.prompts.columns
        have_moved = [memory.cache.cursors.take_has_moved() for memory in self._memories]
        for dp_rank, has_moved in enumerate(have_moved):
            if has_moved:
                above, usable_pages = columns.above[dp_rank], columns.usable_pages[dp_rank]
                cached = lines.cached_pages[dp_rank, :end]
                read_cursors(lines.prefix[:end], above, usable_pages, cached)
        if any(have_moved):
            self._note_most_cached(0, end)

    def _note_most_cached(self, start: int, end: int) -> None:
        lines = self._columns.lines
        most_cached(start, end, lines.may_run, lines.cached_pages, lines.most_cached)

"""The options of a waiting request on all ranks: where it fits, and what that costs."""

from collections.abc import Iterable

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import Int32Array, IntpArray
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.scheduler.admission.in_flight import Leader
from sgl_jax.scheduler.admission.rank_capacity import Option, RankCapacities
from sgl_jax.scheduler.forecast.capacity import OPTION, Options
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.waiting.admission_order import Offer
from sgl_jax.scheduler.waiting.waiting_queue import WaitingQueue


class RankOptions:
    """The options of the request that is tried in a step, one request after another.

    A row of a rank may compute a part of the request's prefix first. Until such a row is looked for
    (`confirm`), the rank's cost is a lower bound.

    Args:
        rooms: the capacities of all ranks.
        waiting: the queue.
    """

    def __init__(self, rooms: RankCapacities, waiting: WaitingQueue) -> None:
        self._rooms, self._in_flight, self._waiting = rooms, rooms.in_flight, waiting
        self._step_tokens = rooms.builders.chunk_tokens
        self._has_host_memory = rooms.ranks[0].host.tier is not None
        self._page_size = rooms.ranks[0].memory.page_size
        self._options: Options = np.zeros(len(rooms), OPTION)
        self._all = range(len(rooms))

    def begin(self, request: Request, home: RankMemory | None) -> None:
        """Try another request; `home` is the memory with the lease of its session, if any."""
        self._request = request
        pinned = request.message.dp_rank
        self.ranks = self._all if pinned is None else range(pinned, pinned + 1)
        self.leaders: dict[int, Leader] = {}
        self._prefix, columns = self._waiting.prefix(request), self._waiting.prompts.columns
        rows, tokens = self._in_flight.rows(self.ranks)
        num_unconfirmed = _begin(
            self._prefix.number,
            columns.above,
            columns.usable_pages,
            self._page_size,
            request.matchable(),
            rows,
            tokens,
            self._options,
        )
        if home is not None:
            cursor = self._waiting.cursor(request, home.dp_rank)
            num_read = self._rooms[home.dp_rank].rank.reusable_len(request, cursor)
            option = self._options[home.dp_rank]
            option.num_present, option.num_read = num_read, max(option.num_read, num_read)
        self._unconfirmed = set[int]()
        if num_unconfirmed:
            self._unconfirmed.update(self._options["is_unconfirmed"].nonzero()[0].tolist())

    def num_present(self, dp_rank: int) -> int:
        """Return the tokens that the request would read on a rank if it started now."""
        return int(self._options["num_present"].item(dp_rank))

    def confirm(self, ranks: Iterable[int]) -> bool:
        """Look for the rows of `ranks` that compute a part of the prefix. Return whether that was
        not done before for one of them."""
        unconfirmed = self._unconfirmed.intersection(ranks)
        for dp_rank in unconfirmed:
            num_read = self.num_present(dp_rank)
            leader = self._in_flight.leader(self._request, self._prefix, dp_rank, num_read)
            if leader is not None:
                self.leaders[dp_rank], num_read = leader, leader.length
            self._options["num_read"][dp_rank] = num_read
        self._unconfirmed -= unconfirmed
        return bool(unconfirmed)

    def fitting(self, offer: Offer) -> list[int]:
        """Return the ranks where the request fits."""
        self.confirm(self.ranks)
        self._find_cheapest(offer, tries_all=True)
        fits: list[int] = self._options["fits"].nonzero()[0].tolist()
        return [dp_rank for dp_rank in fits if dp_rank in self.ranks]

    def cheapest(self, offer: Offer) -> tuple[int, list[int]]:
        """Return the rank where the request fits and costs least, below 0 if it fits none, and the
        ranks that could cost less after a wait for room."""
        # With one rank there is no cost to compare: skip the lookup in host memory.
        if self._has_host_memory and len(self.ranks) > 1:
            self.confirm(self.ranks)
            spared = self._options["num_spared"]
            for dp_rank in self.ranks:
                if dp_rank not in self.leaders:
                    host = self._rooms[dp_rank].rank.host
                    spared[dp_rank] = host.num_spared(self._request, self.num_present(dp_rank))
        while True:
            found, others = self._find_cheapest(offer)
            # Ranks that cost more at least need not be confirmed.
            if not self._unconfirmed or found < 0:
                return found, others
            if not (self.confirm([found]) or self.confirm(others)):
                return found, others

    def _find_cheapest(self, offer: Offer, *, tries_all: bool = False) -> tuple[int, list[int]]:
        arguments = self._request, offer, self._options, self.ranks, self._step_tokens, tries_all
        found, num_others, num_uncounted = self._waiting.find_cheapest(*arguments)
        if num_uncounted:
            for dp_rank in self._options["is_uncounted"].nonzero()[0].tolist():
                memory = self._rooms[dp_rank].rank.memory
                cursor = self._waiting.cursor(self._request, dp_rank)
                self._options["in_use"][dp_rank] = memory.num_pages_in_use(cursor)
            found, num_others, _ = self._waiting.find_cheapest(*arguments)
        return found, self._options["may_win"].nonzero()[0].tolist() if num_others else []

    def option(self, dp_rank: int) -> Option:
        """Return the confirmed option of a rank."""
        _, num_read, *_, fits, cost, is_full, _ = self._options.item(dp_rank)
        num_running, leader = self._rooms[dp_rank].num_running, self.leaders.get(dp_rank)
        return Option(cost, is_full, num_running, dp_rank, fits, num_read, leader)


@compiled(
    "(int64, int32[:, ::1], int32[:, ::1], int64, int32[::1], int64[:, ::1], int32[:, ::1], "
    "options[::1])",
    options=OPTION,
)
def _begin(
    prefix: int,
    above: Int32Array,
    usable_pages: Int32Array,
    page_size: int,
    prompt: Int32Array,
    rows: IntpArray,
    tokens: Int32Array,
    options: Options,
) -> int:
    """Fill in the tokens that a request would read on each rank; return the number of ranks that
    are not confirmed: a row may compute more than is present.

    Args:
        prefix: number of the request's prefix.
        above, usable_pages: columns of `PrefixColumns`.
        prompt: the request's tokens that a cache may serve.
        rows: int64[n, 4], of rows in flight: see `InFlight.rows`.
        tokens: the column of all joint rows.
        options: OPTION[ranks].
    """
    assert len(above) == len(usable_pages) == len(options)
    for rank in range(len(options)):
        option, live = options[rank], prefix
        assert 0 <= live < above.shape[1]
        while above[rank, live] >= 0:
            live = above[rank, live]
        option.num_present = option.num_read = usable_pages[rank, live] * page_size
        option.in_use = -1 if usable_pages[rank, live] else 0
        option.num_spared, option.is_unconfirmed, option.fits = 0, False, False
        option.is_uncounted = option.may_win = False
    limit, num_unconfirmed = min(len(prompt), tokens.shape[1]) // page_size * page_size, 0
    assert rows.shape[1] == 4
    for i in range(len(rows)):
        rank, row, place, token = rows[i]
        assert 0 <= rank < len(options)
        assert 0 <= row < len(tokens)
        option, end = options[rank], place + page_size  # of the page that is compared
        if place < option.num_present or end > limit or prompt[place] != token:
            continue
        while end <= limit:
            while place < end and tokens[row, place] == prompt[place]:
                place += 1
            if place < end:
                break
            if end > option.num_read:
                option.num_read = end
                num_unconfirmed += not option.is_unconfirmed
                option.is_unconfirmed = True
            end += page_size
    return num_unconfirmed

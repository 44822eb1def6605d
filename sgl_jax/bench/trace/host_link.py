"""The link between an engine's devices and its host's memory, on a logical clock.

Each rank moves pages out and in at the same rate, each direction one transfer after another.
"""

import heapq
from collections.abc import Sequence

from sgl_jax.core.step_plan import PageTransfer
from sgl_jax.core.transfers import TransferEnd, Transfers


class HostLink:
    """Transfers under way; `page_bytes` of each pool, and the rate of a rank and direction."""

    def __init__(self, page_bytes: Sequence[int], bytes_per_s: float) -> None:
        self._page_bytes = page_bytes
        self._bytes_per_s = bytes_per_s
        self._free_s: dict[tuple[int, bool], float] = {}  # by rank and direction
        self._ends: list[tuple[float, int, TransferEnd]] = []  # a heap
        self._num_begun = 0

    def begin(self, transfers: Transfers, now_s: float) -> None:
        """Begin the copies and fetches of `transfers`."""
        for move in transfers.copies:
            self._begin(move, now_s, is_in=False)
        for move in transfers.fetches:
            self._begin(move, now_s, is_in=True)

    def save(self, copies: Sequence[PageTransfer], now_s: float) -> None:
        """Begin the copies of evicted pages."""
        self.begin(Transfers(copies=tuple(copies)), now_s)

    def _begin(self, move: PageTransfer, now_s: float, *, is_in: bool) -> None:
        pages = zip(move.pages, self._page_bytes, strict=True)
        seconds = sum(len(listed) * size for listed, size in pages) / self._bytes_per_s
        direction = move.dp_rank, is_in
        end_s = max(now_s, self._free_s.get(direction, 0.0)) + seconds
        self._free_s[direction] = end_s
        self._num_begun += 1
        end = TransferEnd(move.dp_rank, move.number, True, seconds)
        heapq.heappush(self._ends, (end_s, self._num_begun, end))

    @property
    def next_end_s(self) -> float | None:
        """The time of the next end; None if nothing moves."""
        return self._ends[0][0] if self._ends else None

    def ended(self, now_s: float) -> list[TransferEnd]:
        """The transfers that have ended by now, each once."""
        found = []
        while self._ends and self._ends[0][0] <= now_s:
            found.append(heapq.heappop(self._ends)[2])
        return found

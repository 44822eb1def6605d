"""The links between an engine's devices, host memory and the store, on a logical clock.

Each rank moves pages out and in at the same rate, with one transfer at a time per direction. The
store does the same for all ranks together. It keeps everything.
"""

import heapq
from collections.abc import Iterable, Sequence, Sized

import numpy as np

from sgl_jax.core.step_plan import BoolArray, PageTransfer
from sgl_jax.core.transfers import StoreTransfer, TransferEnd, Transfers

STORE = -1  # instead of a rank


class HostLink:
    """Transfers under way, given the `page_bytes` of each pool, the rate per rank and direction,
    and the store's rate per direction."""

    def __init__(
        self, page_bytes: Sequence[int], bytes_per_s: float, store_bytes_per_s: float
    ) -> None:
        self._page_bytes = page_bytes
        self._bytes_per_s = bytes_per_s
        self._store_bytes_per_s = store_bytes_per_s
        self._stored: set[bytes] = set()
        self._free_s: dict[tuple[int, bool], float] = {}  # by (rank, is_in)
        self._ends: list[tuple[float, int, TransferEnd]] = []  # a heap
        self._num_begun = 0

    def begin(self, transfers: Transfers, now_s: float) -> None:
        """Begin the copies and fetches of `transfers`, and the transfers of the store."""
        for moves, is_in in ((transfers.copies, False), (transfers.fetches, True)):
            for move in moves:
                self._begin(move, (move.dp_rank, is_in), move.pages, now_s)
        for search in transfers.searches:
            self._end_at(now_s, search, 0.0, self._found(search))
        for load in transfers.loads:
            self._begin(load, (STORE, True), load.blocks, now_s, self._found(load))
        for put in transfers.puts:
            self._stored.update(name.tobytes() for own in put.keys for name in own)
            self._begin(put, (STORE, False), put.blocks, now_s)

    def _found(self, move: StoreTransfer) -> tuple[BoolArray, ...]:
        return tuple(
            np.array([name.tobytes() in self._stored for name in own], np.bool_)
            for own in move.keys
        )

    def arrival_wait_s(self, rank: int, now_s: float) -> float:
        """Return the seconds until a fetch of the rank, or a load from `STORE`, can begin."""
        return max(self._free_s.get((rank, True), 0.0) - now_s, 0.0)

    def seconds(self, rank: int, num_pages: Iterable[int]) -> float:
        """Return the time in which a rank, or `STORE`, moves `num_pages` of each pool."""
        rate = self._store_bytes_per_s if rank == STORE else self._bytes_per_s
        sizes = zip(num_pages, self._page_bytes, strict=True)
        return sum(count * size for count, size in sizes) / rate

    def _begin(
        self,
        move: PageTransfer | StoreTransfer,
        direction: tuple[int, bool],
        pages: Sequence[Sized],
        now_s: float,
        found: tuple[BoolArray, ...] = (),
    ) -> None:
        """Occupy a direction once it is free, for as long as `pages` of each pool take."""
        seconds = self.seconds(direction[0], map(len, pages))
        end_s = max(now_s, self._free_s.get(direction, 0.0)) + seconds
        self._free_s[direction] = end_s
        self._end_at(end_s, move, seconds, found)

    def _end_at(
        self,
        end_s: float,
        move: PageTransfer | StoreTransfer,
        seconds: float,
        found: tuple[BoolArray, ...],
    ) -> None:
        self._num_begun += 1
        end = TransferEnd(move.dp_rank, move.number, True, seconds, found)
        heapq.heappush(self._ends, (end_s, self._num_begun, end))

    @property
    def next_end_s(self) -> float | None:
        return self._ends[0][0] if self._ends else None

    def ended(self, now_s: float) -> list[TransferEnd]:
        """Return the transfers that have ended by now, each once."""
        found = []
        while self._ends and self._ends[0][0] <= now_s:
            found.append(heapq.heappop(self._ends)[2])
        return found

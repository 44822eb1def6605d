"""The links between an engine's devices, host memory and the store, on a logical clock.

Each rank moves pages out and in at the same rate, with one transfer at a time per direction. The
store does the same for all ranks together. It keeps everything.
"""

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from sgl_jax.core.step_plan import BoolArray, PageTransfer
from sgl_jax.core.transfers import StoreTransfer, TransferEnd, Transfers

_STORE = -1  # instead of a rank


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
        for move in transfers.copies:
            self._begin(move, now_s, is_in=False)
        for move in transfers.fetches:
            self._begin(move, now_s, is_in=True)
        for search in transfers.searches:
            self._end_at(now_s, search, 0.0, self._found(search))
        for load in transfers.loads:
            self._begin_store(load, now_s, self._found(load), is_in=True)
        for put in transfers.puts:
            self._stored.update(name.tobytes() for own in put.keys for name in own)
            self._begin_store(put, now_s, (), is_in=False)

    def _found(self, move: StoreTransfer) -> tuple[BoolArray, ...]:
        return tuple(
            np.array([name.tobytes() in self._stored for name in own], np.bool_)
            for own in move.keys
        )

    def _begin_store(
        self, move: StoreTransfer, now_s: float, found: tuple[BoolArray, ...], *, is_in: bool
    ) -> None:
        seconds = self.store_seconds(map(len, move.blocks))
        end_s = self._occupy((_STORE, is_in), now_s, seconds)
        self._end_at(end_s, move, seconds, found)

    def save(self, copies: Sequence[PageTransfer], now_s: float) -> None:
        """Begin the copies of evicted pages."""
        self.begin(Transfers(copies=tuple(copies)), now_s)

    def fetch_wait_s(self, dp_rank: int, now_s: float) -> float:
        """Return the seconds until a fetch of the rank can begin."""
        return self._wait_s((dp_rank, True), now_s)

    def load_wait_s(self, now_s: float) -> float:
        """Return the seconds until a load from the store can begin."""
        return self._wait_s((_STORE, True), now_s)

    def _wait_s(self, direction: tuple[int, bool], now_s: float) -> float:
        return max(self._free_s.get(direction, 0.0) - now_s, 0.0)

    def seconds(self, num_pages: Iterable[int]) -> float:
        """Return the time in which a rank moves `num_pages` of each pool."""
        return self._num_bytes(num_pages) / self._bytes_per_s

    def store_seconds(self, num_pages: Iterable[int]) -> float:
        """Return the time in which the store moves `num_pages` of each pool."""
        return self._num_bytes(num_pages) / self._store_bytes_per_s

    def _num_bytes(self, num_pages: Iterable[int]) -> int:
        return sum(count * size for count, size in zip(num_pages, self._page_bytes, strict=True))

    def _begin(self, move: PageTransfer, now_s: float, *, is_in: bool) -> None:
        seconds = self.seconds(map(len, move.pages))
        end_s = self._occupy((move.dp_rank, is_in), now_s, seconds)
        self._end_at(end_s, move, seconds)

    def _occupy(self, direction: tuple[int, bool], now_s: float, seconds: float) -> float:
        """Occupy a direction for `seconds` once it is free; return the end."""
        end_s = max(now_s, self._free_s.get(direction, 0.0)) + seconds
        self._free_s[direction] = end_s
        return end_s

    def _end_at(
        self,
        end_s: float,
        move: PageTransfer | StoreTransfer,
        seconds: float,
        found: tuple[BoolArray, ...] = (),
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

"""Transfers between the device pools and the blocks in host memory, and the thread that runs them.

A copy is gathered from the device pools, in step order, and a thread then writes it to its blocks.
The same thread reads the blocks of a fetch and uploads them to staging arrays on the devices. When
the upload is complete and the scheduler places the fetch, a program writes the arrays to their
pages. So no step waits for the link. The thread runs one transfer at a time, so all hosts of an
engine read and write blocks in the same order.

Each host stores the parts of pages that its devices hold.
"""

import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import Int32Array, PageTransfer
from sgl_jax.core.transfers import HASH_BYTES, STORED_TOKENS, StoreTransfer, TransferEnd, Transfers
from sgl_jax.executor.block_pool import Arrays, BlockPool
from sgl_jax.executor.block_stores.block_store import BlockStore
from sgl_jax.executor.step import StepState
from sgl_jax.executor.store_transfers import StoreTransfers
from sgl_jax.mem_cache.device_pool import ChipView, LayerStates

logger = logging.getLogger(__name__)

# Copies left by a failed step must end before its pools are replaced.
_DEVICE_LIMIT_S = 60.0
_NUM_TIMED = 3  # timed fetches; the first may take longer


class _Piece(NamedTuple):
    """Values of one pool moved by one program run."""

    pool: int
    pages: Int32Array  # [n]
    values: Arrays  # [dp * piece pages, layers, ...]: each page is contiguous, as in its block


class CpuBlocks:
    """The blocks on this host for the pools of a mesh. `store` is the tier below, if there is one.

    Args:
        state: shapes of the tables and pools, see `EngineConfig.state_shapes`.
        views: the chips' parts of each pool's arrays, see `EngineConfig.chip_views`.
        sizes: the engine's sizes, with `host_blocks`.
        mesh: ('data', 'tensor').
    """

    def __init__(
        self, state: Any, views: Sequence[Sequence[ChipView]], sizes: EngineSizes, mesh: Mesh
    ) -> None:
        self._sizes = sizes
        self._pools = [
            BlockPool(*pool, mesh)
            for pool in zip(_pools_of(state), views, sizes.host_blocks, strict=True)
        ]
        self._thread = ThreadPoolExecutor(1, "cpu blocks")
        self._fetches: dict[tuple[int, int], Future[list[_Piece]]] = {}
        self._jobs: list[Future[Any]] = []
        self._ended: queue.SimpleQueue[TransferEnd] = queue.SimpleQueue()
        self.store: StoreTransfers | None = None

    def open_store(
        self, store: BlockStore, fingerprint: str, awaited_limit_s: float | None
    ) -> None:
        """Attach a block store as the tier below host memory; arguments as in `StoreTransfers`."""
        self.store = StoreTransfers(
            store, self._pools, fingerprint, self._ended.put, awaited_limit_s
        )

    def compile(self) -> None:
        for pool in self._pools:
            pool.compile()

    def measure(self, state: StepState) -> tuple[StepState, float]:
        """Time fetches of a prefix of about one piece to the first pages of the first rank.

        No other transfer may be in flight. Returns the new state (`state` is donated) and the
        tokens per second, 0 if no layer attends to all tokens.
        """
        num_pages, listed = self._timed_pages()
        if num_pages == 0:
            return state, 0.0
        move = PageTransfer(0, 0, listed, listed)
        seconds = []
        self.copy(state, [move])
        for _ in range(_NUM_TIMED):
            self.reset()
            state = self.transfer(state, Transfers(fetches=(move,)))
            self.wait()
            (end,) = self.ended()
            seconds.append(end.seconds)
            state = self.transfer(state, Transfers(placed=(move,)))
        return state, num_pages * self._sizes.page_size / min(seconds)

    def measure_store(self) -> float:
        """Put the same prefix into the store and load it; return the tokens per second. Returns 0
        without a measurement. The store may serve this prefix from a faster cache."""
        num_pages, listed = self._timed_pages()
        if self.store is None or num_pages == 0:
            return 0.0
        keys = []
        for number, (pool, blocks) in enumerate(zip(self._pools, listed, strict=True)):
            own = np.zeros((len(blocks), pool.num_values * HASH_BYTES + 2), np.uint8)
            own[:, :-2:HASH_BYTES] = np.arange(pool.num_values)
            own[:, 1:-2:HASH_BYTES], own[:, -2] = blocks[:, None], number
            own[:, -1] = min(self._sizes.page_size, STORED_TOKENS).bit_length() - 1
            keys.append(own)
        move = StoreTransfer(0, 0, tuple(keys), listed)
        self.store.begin([], [], [move])
        self.store.begin([], [move], [])
        self.store.wait()
        _, end = self.ended()
        has_all = end.succeeded and all(found.all() for found in end.found)
        return num_pages * self._sizes.page_size / end.seconds if has_all else 0.0

    def _timed_pages(self) -> tuple[int, tuple[Int32Array, ...]]:
        """Return the number of pages of a prefix of about one piece, and its ids in each pool."""
        full = [group.pool for group in self._sizes.groups if group.sliding_window is None]
        counts = [full.count(pool) for pool in range(len(self._pools))]
        pieces = [pool.piece_pages for pool in self._pools]
        limits = map(min, pieces, self._sizes.host_blocks, self._sizes.pool_pages)
        shares = [most // count for most, count in zip(limits, counts, strict=True) if count]
        num_pages = min(shares, default=0)
        return num_pages, tuple(np.arange(count * num_pages, dtype=np.int32) for count in counts)

    def transfer(self, state: StepState, transfers: Transfers) -> StepState:
        """Begin transfers; return the new state. `state` is donated."""
        for move in transfers.placed:
            state = self._place(state, move)
        for move in transfers.dropped:
            del self._fetches[move.dp_rank, move.number]
        self.copy(state, transfers.copies)
        for move in transfers.fetches:
            self._fetches[move.dp_rank, move.number] = self._start(move, self._fetch)
        if self.store is not None:
            self.store.begin(transfers.searches, transfers.loads, transfers.puts)
        return state

    def copy(self, state: StepState, moves: Sequence[PageTransfer]) -> None:
        """Begin copying the values of pages, ordered after all launched steps."""
        arrays = _pools_of(state)
        for move in moves:
            pieces = [
                (
                    _Piece(
                        number,
                        pages,
                        self._pools[number].gather(arrays[number], move.dp_rank, pages),
                    ),
                    blocks,
                )
                for number, pages, blocks in self._cut(move)
            ]
            self._start(move, partial(self._save, pieces))

    def ended(self) -> list[TransferEnd]:
        self._jobs = [job for job in self._jobs if not job.done()]
        found = []
        while not self._ended.empty():
            found.append(self._ended.get())
        return found

    def reset(self) -> None:
        """Wait for device transfers, fail the store's transfers, and drop all records."""
        self.wait()
        if self.store is not None:
            self.store.give_up()
        self._fetches.clear()
        self.ended()

    def wait(self) -> None:
        """Wait for all device transfers. Raises RuntimeError if they do not end in time."""
        _, running = wait(self._jobs, _DEVICE_LIMIT_S)
        if running:
            raise RuntimeError(f"transfers of a device did not end within {_DEVICE_LIMIT_S:.0f} s")

    def close(self) -> None:
        """Wait for all device transfers, and a limited time for the store's. Final."""
        self._thread.shutdown()
        if self.store is not None:
            self.store.close()

    def _start(self, move: PageTransfer, job: Callable[[PageTransfer], Any]) -> Future[Any]:
        def run() -> Any:
            begin_s, succeeded = time.monotonic(), False
            try:
                result = job(move)
                succeeded = True
                return result
            except Exception:  # such as too little memory on host or device
                logger.exception("transfer %d of rank %d failed", move.number, move.dp_rank)
                raise
            finally:
                seconds = time.monotonic() - begin_s
                self._ended.put(TransferEnd(move.dp_rank, move.number, succeeded, seconds))

        future = self._thread.submit(run)
        self._jobs.append(future)
        return future

    def _cut(self, move: PageTransfer) -> Iterator[tuple[int, Int32Array, Int32Array]]:
        for number, pool in enumerate(self._pools):
            pages, blocks = move.pages[number], move.blocks[number]
            for first in range(0, len(pages), pool.piece_pages):
                part = slice(first, first + pool.piece_pages)
                yield number, pages[part], blocks[part]

    def _save(self, pieces: list[tuple[_Piece, Int32Array]], move: PageTransfer) -> None:
        for piece, blocks in pieces:
            self._pools[piece.pool].write(move.dp_rank, blocks, piece.values)

    def _fetch(self, move: PageTransfer) -> list[_Piece]:
        pieces = [
            _Piece(number, pages, self._pools[number].read(move.dp_rank, blocks))
            for number, pages, blocks in self._cut(move)
        ]
        jax.block_until_ready([piece.values for piece in pieces])
        return pieces

    def _place(self, state: StepState, move: PageTransfer) -> StepState:
        pools = list(_pools_of(state))
        for piece in self._fetches.pop((move.dp_rank, move.number)).result():
            pool = self._pools[piece.pool]
            pools[piece.pool] = pool.scatter(
                pools[piece.pool], move.dp_rank, piece.pages, piece.values
            )
        return _with_pools(state, pools)


def _pools_of(state: Any) -> list[Any]:
    """Return each pool's arrays or shapes: pools of pages, then of recurrent states."""
    pools: list[Any] = [(pool,) for pool in state.kv_pools]
    if state.states is not None:
        pools.append(tuple(state.states.layers))
    return pools


def _with_pools(state: StepState, pools: Sequence[Arrays]) -> StepState:
    num_paged = len(state.kv_pools)
    state = state._replace(kv_pools=tuple(pool[0] for pool in pools[:num_paged]))
    if state.states is None:
        return state
    return state._replace(states=state.states._replace(layers=LayerStates(*pools[num_paged])))

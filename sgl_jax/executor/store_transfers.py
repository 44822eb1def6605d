"""Moves blocks between the host's memory and a store, on threads of its own.

So neither a step nor a transfer to or from the devices waits for a disk or a network. One thread
searches, one runs the loads that requests await, and one puts and all else: no request waits for a
put, nor for others' loads before it is known whether its own would be worth it.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np

from sgl_jax.core.step_plan import BoolArray
from sgl_jax.core.transfers import StoreTransfer, TransferEnd
from sgl_jax.executor.block_stores.block_store import BlockStore

logger = logging.getLogger(__name__)

# After a failure the store is left alone for so long: its transfers fail, and nothing waits.
_REST_S = 30.0
# Values of so many blocks are read or written at once.
_BATCH = 16


class BlockContents(Protocol):
    """The blocks of one pool."""

    def value(self, dp_rank: int, block: int) -> bytes: ...

    def set_value(self, dp_rank: int, block: int, value: bytes) -> bool:
        """False if the value has not the size of a block; then nothing changes."""
        ...


class _Keyed(NamedTuple):
    """A transfer with the store's keys: of the weights that were served as it was planned."""

    dp_rank: int
    keys: list[list[str]]  # of each pool
    blocks: list[list[int]]
    end_s: float | None

    def batches(self) -> Iterator[tuple[int, list[str], list[int], slice]]:
        """The pool, keys and blocks of each part, and its place in the pool's list."""
        for pool, (keys, blocks) in enumerate(zip(self.keys, self.blocks, strict=True)):
            for first in range(0, len(blocks), _BATCH):
                part = slice(first, first + _BATCH)
                yield pool, keys[part], blocks[part], part


class StoreTransfers:
    """The searches, loads and puts of an engine.

    Args:
        store: that has the blocks.
        pools: the blocks in the host's memory.
        fingerprint: of the model, its weights and the layout: hexadecimal. May be replaced while
            nothing runs.
        on_end: called with each end, on the transfer's thread.
    """

    def __init__(
        self,
        store: BlockStore,
        pools: Sequence[BlockContents],
        fingerprint: str,
        on_end: Callable[[TransferEnd], object],
    ) -> None:
        self._store = store
        self._pools = pools
        self.fingerprint = fingerprint
        self._on_end = on_end
        self._searches = ThreadPoolExecutor(1, "block store, searches")
        self._awaited = ThreadPoolExecutor(1, "block store, awaited")
        self._others = ThreadPoolExecutor(1, "block store")
        self._jobs: list[Future[None]] = []
        self._rests_until_s = 0.0

    def begin(
        self,
        searches: Sequence[StoreTransfer],
        loads: Sequence[StoreTransfer],
        puts: Sequence[StoreTransfer],
    ) -> None:
        """Begin transfers: each thread runs its own in this order."""
        self._jobs = [job for job in self._jobs if not job.done()]
        for move in searches:
            self._start(move, self._search, self._searches)
        for move in loads:
            self._start(move, self._load, self._awaited if move.is_awaited else self._others)
        for move in puts:
            self._start(move, self._put, self._others)

    def wait(self) -> None:
        """Wait for all transfers."""
        for job in self._jobs:
            job.result()

    def close(self) -> None:
        """Wait for all transfers. Cannot be used again."""
        self._searches.shutdown()
        self._awaited.shutdown()
        self._others.shutdown()
        self._store.close()

    def _start(
        self,
        move: StoreTransfer,
        job: Callable[[_Keyed], list[BoolArray]],
        thread: ThreadPoolExecutor,
    ) -> None:
        keyed = self._keyed(move)

        def run() -> None:
            found: tuple[BoolArray, ...] = ()
            begin_s, succeeded = time.monotonic(), False
            try:
                if begin_s >= self._rests_until_s:
                    found, succeeded = tuple(job(keyed)), True
            except Exception:  # of any type: a disk is full, a master has gone
                logger.exception("the store failed; it is left alone for %.0f s", _REST_S)
                self._rests_until_s = time.monotonic() + _REST_S
            seconds = time.monotonic() - begin_s
            self._on_end(TransferEnd(move.dp_rank, move.number, succeeded, seconds, found))

        self._jobs.append(thread.submit(run))

    def _keyed(self, move: StoreTransfer) -> _Keyed:
        keys = [[f"{self.fingerprint}/{bytes(key).hex()}" for key in own] for own in move.keys]
        blocks = [listed.tolist() for listed in move.blocks]
        return _Keyed(move.dp_rank, keys, blocks, move.end_s)

    def _search(self, move: _Keyed) -> list[BoolArray]:
        return [np.array(self._store.exists(keys), np.bool_) for keys in move.keys]

    def _load(self, move: _Keyed) -> list[BoolArray]:
        found = [np.zeros(len(blocks), np.bool_) for blocks in move.blocks]
        for pool, keys, blocks, part in move.batches():
            if move.end_s is not None and time.monotonic() > move.end_s:
                break
            own = self._pools[pool]
            found[pool][part] = [
                value is not None and own.set_value(move.dp_rank, block, value)
                for block, value in zip(blocks, self._store.get(keys), strict=True)
            ]
        return found

    def _put(self, move: _Keyed) -> list[BoolArray]:
        for pool, keys, blocks, _ in move.batches():
            has = self._store.exists(keys)
            new = [i for i, is_there in enumerate(has) if not is_there]
            values = [self._pools[pool].value(move.dp_rank, blocks[i]) for i in new]
            self._store.put([keys[i] for i in new], values)
        return []

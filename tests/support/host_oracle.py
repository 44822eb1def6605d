"""A host's memory for the oracle executor: transfers end late, in any order, or fail.

Blocks hold the same hashes as pages. While a copy is under way its blocks hold garbage, and a fetch
reads its blocks only at its end: so a block that is read or reused too early is found by content.
"""

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import PageTransfer
from sgl_jax.core.transfers import StoreTransfer, TransferEnd, Transfers

_GARBAGE = np.uint64(0xDEAD_BEEF_DEAD_BEEF)


class HostOracle:
    """The blocks of all ranks. `pools[rank][pool]` are the device's contents, [pages, values]."""

    def __init__(self, sizes: EngineSizes, pools: Sequence[Sequence[NDArray[np.uint64]]]) -> None:
        self._pools = pools
        self.blocks = [
            [
                np.full((num_blocks, pool.shape[1]), _GARBAGE)
                for num_blocks, pool in zip(sizes.host_blocks, of_rank, strict=False)
            ]
            for of_rank in pools
        ]
        self.rng = random.Random(0)
        self.failure_rate = 0.0
        self.end_rate = 0.5  # of the transfers in flight, at each look
        self._copies: dict[tuple[int, int], tuple[PageTransfer, list[NDArray[np.uint64]]]] = {}
        self._fetches: dict[tuple[int, int], PageTransfer] = {}
        self._arrived: dict[tuple[int, int], list[NDArray[np.uint64]]] = {}
        # The store behind the blocks: contents by key. Of a put's blocks it reads each at its end,
        # and a load writes at its end.
        self.store: dict[bytes, NDArray[np.uint64]] = {}
        self.loss_rate = 0.0  # of the values found, at each search and load
        self._searches: dict[tuple[int, int], StoreTransfer] = {}
        self._loads: dict[tuple[int, int], StoreTransfer] = {}
        self._puts: dict[tuple[int, int], StoreTransfer] = {}

    @property
    def num_in_flight(self) -> int:
        """Transfers that have not ended, or fetches that were not placed or dropped."""
        stored = len(self._searches) + len(self._loads) + len(self._puts)
        return len(self._copies) + len(self._fetches) + len(self._arrived) + stored

    def transfer(self, transfers: Transfers) -> None:
        """Begin, place and drop, in the order of `Transfers`."""
        for move in transfers.placed:
            contents = self._arrived.pop((move.dp_rank, move.number))
            for pool, pages, values in zip(
                self._pools[move.dp_rank], move.pages, contents, strict=True
            ):
                pool[pages] = values
        for move in transfers.dropped:
            del self._arrived[move.dp_rank, move.number]
        self.copy(transfers.copies)
        for move in transfers.fetches:
            self._fetches[move.dp_rank, move.number] = move
        for begun, moves in (
            (self._searches, transfers.searches),
            (self._loads, transfers.loads),
            (self._puts, transfers.puts),
        ):
            begun.update({(each.dp_rank, each.number): each for each in moves})
        for each in transfers.loads:
            for pool, listed in zip(self.blocks[each.dp_rank], each.blocks, strict=True):
                pool[listed] = _GARBAGE

    def copy(self, moves: Sequence[PageTransfer]) -> None:
        """Begin copies of what the pages hold now."""
        for move in moves:
            own, blocks = self._pools[move.dp_rank], self.blocks[move.dp_rank]
            contents = [pool[pages].copy() for pool, pages in zip(own, move.pages, strict=True)]
            self._copies[move.dp_rank, move.number] = move, contents
            for pool, listed in zip(blocks, move.blocks, strict=True):
                pool[listed] = _GARBAGE

    def ended(self) -> list[TransferEnd]:
        """Some of the transfers in flight end, in any order."""
        keys = [*self._copies, *self._fetches, *self._searches, *self._loads, *self._puts]
        self.rng.shuffle(keys)
        return [self._end(key) for key in keys if self.rng.random() < self.end_rate]

    def _end(self, key: tuple[int, int]) -> TransferEnd:
        succeeded = self.rng.random() >= self.failure_rate
        blocks = self.blocks[key[0]]
        if key in self._puts:
            put = self._puts.pop(key)
            if succeeded:
                for pool, names, numbers in zip(blocks, put.keys, put.blocks, strict=True):
                    for name, number in zip(names, numbers, strict=True):
                        self.store.setdefault(name.tobytes(), pool[number].copy())
            return TransferEnd(*key, succeeded)
        if key in self._searches:
            found = tuple(self._flags(names) for names in self._searches.pop(key).keys)
            return TransferEnd(*key, succeeded, found=found if succeeded else ())
        if key in self._loads:
            load = self._loads.pop(key)
            found = tuple(self._flags(names) for names in load.keys)
            for pool, names, numbers, flags in zip(
                blocks, load.keys, load.blocks, found, strict=True
            ):
                for name, number, is_found in zip(names, numbers, flags, strict=True):
                    if is_found:
                        pool[number] = self.store[name.tobytes()]
            return TransferEnd(*key, succeeded, self._seconds(), found if succeeded else ())
        if key in self._copies:
            move, contents = self._copies.pop(key)
            if succeeded:
                for pool, listed, values in zip(blocks, move.blocks, contents, strict=True):
                    pool[listed] = values
        else:
            move = self._fetches.pop(key)
            listed = zip(blocks, move.blocks, strict=True)
            self._arrived[key] = [pool[numbers].copy() for pool, numbers in listed]
        return TransferEnd(*key, succeeded, self._seconds())

    def _seconds(self) -> float:
        return 0.001 * self.rng.random()

    def _flags(self, names: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which of the keys are found now."""
        found = [
            name.tobytes() in self.store and self.rng.random() >= self.loss_rate for name in names
        ]
        return np.array(found, np.bool_)

    def forget(self) -> None:
        """The device was reset: nothing is in flight."""
        self._copies.clear()
        self._fetches.clear()
        self._arrived.clear()
        for begun in (self._searches, self._loads, self._puts):
            begun.clear()

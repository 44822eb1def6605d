"""Writes the prefixes that a rank gains in CPU memory to the store; they stay locked until then."""

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.core.transfers import Keys, StoreTransfer
from sgl_jax.mem_cache.offload.content_keys import ContentKeys
from sgl_jax.mem_cache.offload.cpu_pool import CpuPool

# Maximum blocks being written to the store. Further prefixes are written when they are offered to
# CPU memory again.
_MAX_BLOCKS = 4096
# Maximum pages that wait for that, and maximum withdrawn pages.
_MAX_LISTED_PAGES = 1 << 16


class _Write(NamedTuple):
    num_blocks: int
    pages: Keys  # keys of the first layer group


class StoreWrites:
    """The writes of one rank.

    Attributes:
        in_flight: by transfer number.
        begins: writes that the next `RemoteTier.take` returns.
        num_blocks: blocks written since the start.
    """

    def __init__(self, blocks: CpuPool, keys: ContentKeys, next_number: Callable[[], int]) -> None:
        self._blocks = blocks
        self._keys = keys
        self._next_number = next_number
        self.in_flight: dict[int, _Write] = {}
        self.begins: list[StoreTransfer] = []
        self.num_blocks = 0
        # Keys of pages that the store lacks because their write failed or did not begin, oldest
        # first.
        self._left_out: dict[bytes, None] = {}

    def has_room(self, num_blocks: int) -> bool:
        num_moving = sum(write.num_blocks for write in self.in_flight.values())
        return not num_moving or num_moving + num_blocks <= _MAX_BLOCKS

    def begin(
        self, number: int | None, tokens: Int32Array, namespace: str, values: Int32Array
    ) -> None:
        """Write the last pages of a prefix to the store. `CpuPool.leaving` holds its lock.

        `values` int32[groups, n] are the blocks of the last n pages, 0 for values to leave out. If
        there is no room, `number` is None and the pages are written by a later `begin_left_out`.
        """
        keys = self._keys.of(tokens, namespace)
        behind = keys[:, keys.shape[1] - values.shape[1] :]
        write = _Write(int(np.count_nonzero(values)), behind[0, values.any(axis=0)])
        if number is None:
            add_keys(self._left_out, write.pages)
        else:
            self.in_flight[number] = write
            self.begins.append(store_transfer(self._blocks, number, behind, values > 0, values))

    def begin_left_out(self, tokens: Int32Array, namespace: str) -> None:
        """Write a prefix's pages that were left out before, as far as CPU memory has them."""
        if not self._left_out:
            return
        tokens = tokens[: self._blocks.cache.peek(tokens, namespace)]
        keys = self._keys.of(tokens, namespace)[0]
        is_left_out = np.array([key.tobytes() in self._left_out for key in keys], np.bool_)
        if not is_left_out.any():
            return
        number = self._next_number()
        values = self._blocks.begin_fetch(number, tokens, namespace)
        values[:, ~is_left_out] = 0
        if not self.has_room(int(np.count_nonzero(values))):
            self._blocks.end_fetch(number)
            return
        for key in keys[is_left_out]:
            del self._left_out[key.tobytes()]
        self.begin(number, tokens, namespace, values)

    def ended(self, number: int, *, succeeded: bool) -> None:
        write = self.in_flight.pop(number)
        if succeeded:
            self.num_blocks += write.num_blocks
        else:
            add_keys(self._left_out, write.pages)
        self._blocks.end_fetch(number)

    def drop(self) -> None:
        """Undo the locks of all writes. No write may still run."""
        for number in self.in_flight:
            self._blocks.end_fetch(number)
        self.in_flight.clear()
        self.begins.clear()
        self._left_out.clear()


def store_transfer(
    pool: CpuPool, number: int, keys: Keys, is_moved: BoolArray, blocks: Int32Array | None
) -> StoreTransfer:
    """Return the transfer of the values `is_moved`, bool[groups, pages], to or from `blocks`."""
    groups_of = pool.groups_of
    return StoreTransfer(
        pool.dp_rank,
        number,
        tuple(keys[numbers][is_moved[numbers]] for numbers in groups_of),
        ()
        if blocks is None
        else tuple(blocks[numbers][is_moved[numbers]] for numbers in groups_of),
    )


def add_keys(listed: dict[bytes, None], keys: Keys) -> None:
    """Add keys [n, bytes] to `listed`, and remove the oldest keys above the limit."""
    listed.update(dict.fromkeys(key.tobytes() for key in keys))
    for key in list(islice(listed, max(len(listed) - _MAX_LISTED_PAGES, 0))):
        del listed[key]

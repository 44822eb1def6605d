"""Pages that left the prefix tree lately: the hash of their prefix, and how they were used.

A ring of fixed size, so what is remembered is bounded; every operation is vectorised over pages.
Prefixes are told apart by a 64-bit hash alone. That may be wrong, so ghosts may decide in which
order pages leave, never what a prefix matches.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.step_plan import BoolArray, Int32Array

Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]

# The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit moves half of the output.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_GAMMA_INVERSE = np.uint64(pow(int(_GAMMA), -1, 2**64))
# Slots of each index for every ghost: the fewer, the more ghosts hide one another.
_SLOTS_PER_GHOST = 4


class RecalledPages(NamedTuple):
    """What is known of some pages: for those that are no ghosts, zeros."""

    is_ghost: BoolArray
    num_uses: Int64Array
    last_access: Int64Array  # the clock when they were used last
    left_at: Int64Array  # the clock when they left


def prefix_hashes(tokens: Int32Array, page_size: int, before: int = 0) -> UInt64Array:
    """A hash of the prefix up to the end of each page: uint64[len(tokens) / page_size].

    `tokens`, int32, are whole pages that continue a prefix of hash `before` (0: the empty one).
    A page adds its share to a polynomial in `_GAMMA` modulo 2**64, as Karp and Rabin (1987) do
    with characters, so that it is the same however a prefix was divided.
    """
    coefficients = _mixed(np.arange(1, page_size + 1, dtype=np.uint64))
    contents = (tokens.reshape(-1, page_size).astype(np.uint64) + np.uint64(1)) * coefficients
    shares = _mixed(np.add.reduce(contents, axis=1))
    # h[i] = h[i - 1] * g + share[i] for all i at once: h[i] / g^(i + 1) is a cumulative sum.
    count = len(shares)
    up = np.multiply.accumulate(np.full(count, _GAMMA))
    down = np.multiply.accumulate(np.full(count, _GAMMA_INVERSE))
    hashes: UInt64Array = up * (np.uint64(before) + np.add.accumulate(shares * down))
    return hashes


def _mixed(values: UInt64Array) -> UInt64Array:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    mixed: UInt64Array = values ^ (values >> np.uint64(31))
    return mixed


class GhostPages:
    """The last `num_ghosts` pages that left, first in, first out."""

    def __init__(self, num_ghosts: int) -> None:
        self.num_ghosts = num_ghosts
        self._hashes = np.zeros(num_ghosts, np.uint64)
        self._num_uses = np.zeros(num_ghosts, np.int8)
        self._last_access = np.zeros(num_ghosts, np.int64)
        self._left_at = np.zeros(num_ghosts, np.int64)
        self._next = 0
        # A hash is listed in both, at places that have nothing to do with each other: to be
        # found, it must have been written over in one of them at most.
        num_slots = _SLOTS_PER_GHOST * num_ghosts
        self._by_hash = np.zeros((2, num_slots), np.int32)

    def remember(self, hashes: UInt64Array, num_uses: int, last_access: int, now: int) -> None:
        """Pages of these prefixes leave now; those that left longest ago are forgotten."""
        hashes = hashes[-self.num_ghosts :]
        places = (self._next + np.arange(len(hashes))) % self.num_ghosts
        self._hashes[places] = hashes
        self._num_uses[places] = num_uses
        self._last_access[places] = last_access
        self._left_at[places] = now
        for slots, index in zip(self._slots(hashes), self._by_hash, strict=True):
            index[slots] = places
        self._next = (self._next + len(hashes)) % self.num_ghosts

    def recall(self, hashes: UInt64Array) -> RecalledPages:
        """What is remembered of the pages of these prefixes."""
        first, second = (
            index[slots] for slots, index in zip(self._slots(hashes), self._by_hash, strict=True)
        )
        places = np.where(self._hashes[first] == hashes, first, second)
        is_ghost = self._hashes[places] == hashes
        return RecalledPages(
            is_ghost,
            np.where(is_ghost, self._num_uses[places], 0),
            np.where(is_ghost, self._last_access[places], 0),
            np.where(is_ghost, self._left_at[places], 0),
        )

    def clear(self) -> None:
        """Forget all."""
        self._hashes[:] = 0

    def _slots(self, hashes: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
        num_slots = np.uint64(self._by_hash.shape[1])
        return _mixed(hashes) % num_slots, _mixed(hashes ^ _GAMMA) % num_slots

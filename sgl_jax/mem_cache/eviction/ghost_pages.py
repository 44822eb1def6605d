"""Recently evicted pages: the hashes of their prefixes and records of their use.

A ring of fixed size bounds the memory. Most new edges hold no evicted page, and the hash of their
first page shows it, since the pages after it were evicted before it or with it. So the ring is
searched only for edges with a first page that may be in it.

Prefixes are distinguished only by a 64-bit hash, which may collide. So ghosts may affect the order
of eviction, but never a match.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import BoolArray, Int32Array

Int64Array = NDArray[np.int64]
UInt32Array = NDArray[np.uint32]
UInt64Array = NDArray[np.uint64]

# The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit moves half of the output.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_SALTS = (np.uint64(0), _GAMMA)  # for the two halves of the index
# Index cells per ghost, in each half: with fewer cells, more ghosts overwrite each other.
_CELLS_PER_GHOST = 4
# Cells of the quick test per ghost: with fewer cells, more searches of the ring find nothing.
_COUNTS_PER_GHOST = 8


class RecalledPages(NamedTuple):
    """Records of looked-up pages. All arrays but `is_ghost` have one entry per True in it."""

    is_ghost: BoolArray  # one entry per looked-up page
    num_uses: Int64Array
    last_access: Int64Array  # the clock at the last use
    left_at: Int64Array  # the clock at eviction


class PrefixHasher:
    """Computes hashes of prefixes that are whole pages of `page_size` tokens."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._coefficients = _mixed(np.arange(1, page_size + 1, dtype=np.uint64))

    def hashes(self, tokens: Int32Array, before: int = 0) -> UInt64Array:
        """Hash the prefix up to the end of each page: uint64[len(tokens) / page_size].

        `tokens`, int32, are whole pages that continue a prefix with hash `before` (0 for the empty
        prefix). Each page adds its hash to a polynomial in `_GAMMA` modulo 2**64, as characters do
        in Karp and Rabin (1987), so the result does not depend on how a prefix was divided.
        """
        return _hashes(tokens, self._page_size, self._coefficients, np.uint64(before))


@compiled("(uint64,)")
def _mix(value: np.uint64) -> np.uint64:
    value = (value ^ (value >> _SHIFT_1)) * _MIX_1
    value = (value ^ (value >> _SHIFT_2)) * _MIX_2
    return value ^ (value >> _SHIFT_3)


@compiled("(uint64[::1],)")
def _mixed(values: UInt64Array) -> UInt64Array:
    mixed = np.empty_like(values)
    for i in range(len(values)):
        mixed[i] = _mix(values[i])
    return mixed


@compiled("(int32[::1], int64, uint64[::1], uint64)")
def _hashes(
    tokens: Int32Array, page_size: int, coefficients: UInt64Array, before: np.uint64
) -> UInt64Array:
    """Compute `PrefixHasher.hashes`; `coefficients` has one value per token of a page."""
    assert len(tokens) % page_size == 0
    assert len(coefficients) == page_size
    hashes = np.empty(len(tokens) // page_size, np.uint64)
    for page in range(len(hashes)):
        content = np.uint64(0)
        for i in range(page_size):
            # Count tokens from 1, so that token 0 contributes too.
            token = np.uint64(tokens[page * page_size + i]) + np.uint64(1)
            content += token * coefficients[i]
        before = before * _GAMMA + _mix(content)
        hashes[page] = before
    return hashes


@compiled(
    "(uint64[::1], int64, int64, int64, int64, int64, uint64[::1], int64[:, ::1], int32[::1], "
    "uint32[::1])"
)
def _enter(
    hashes: UInt64Array,
    num_uses: int,
    last_access: int,
    left_at: int,
    first_place: int,
    num_left: int,
    ring: UInt64Array,
    history: Int64Array,
    by_hash: Int32Array,
    last_left: UInt32Array,
) -> None:
    """Write evicted pages over the ring's oldest entries, from `first_place` on. `num_left` counts
    all evicted pages, including these. The last four arguments are columns of `GhostPages`."""
    num_cells = np.uint64(len(by_hash) // 2)
    assert len(ring) == len(history)
    for i in range(len(hashes)):
        place = (first_place + i) % len(ring)
        ring[place] = hashes[i]
        history[place, 0], history[place, 1], history[place, 2] = num_uses, last_access, left_at
        by_hash[_mix(hashes[i] ^ _SALTS[0]) % num_cells] = place
        by_hash[_mix(hashes[i] ^ _SALTS[1]) % num_cells + num_cells] = place
        last_left[hashes[i] & np.uint64(len(last_left) - 1)] = num_left


class GhostPages:
    """The last `num_ghosts` evicted pages, first in, first out."""

    def __init__(self, num_ghosts: int) -> None:
        self.num_ghosts = num_ghosts
        self._hashes = np.zeros(num_ghosts, np.uint64)
        self._history = np.zeros((num_ghosts, 3), np.int64)  # last three fields of `RecalledPages`
        self._next = 0
        # By the last bits of a hash: the number of pages evicted when a page with such a hash was
        # last evicted, or slightly more. It starts at `num_ghosts`, so that 0 is too old to be
        # remembered, and is modulo 2**32: if the number is ambiguous, a search finds nothing.
        self._num_left = num_ghosts
        num_bits = (_COUNTS_PER_GHOST * num_ghosts).bit_length()
        self._last_left = np.zeros(1 << num_bits, np.uint32)
        self._last_bits = np.uint64(len(self._last_left) - 1)
        # Each hash is listed in both halves, at independent places, so a search fails only if both
        # entries were overwritten.
        self._num_cells = _CELLS_PER_GHOST * num_ghosts
        self._by_hash = np.zeros(2 * self._num_cells, np.int32)

    def remember(self, hashes: UInt64Array, num_uses: int, last_access: int, now: int) -> None:
        """Record the eviction of pages with these prefixes, overwriting the oldest entries."""
        self._num_left += len(hashes)
        _enter(
            hashes,
            num_uses,
            last_access,
            now,
            self._next,
            self._num_left % 2**32,
            self._hashes,
            self._history,
            self._by_hash,
            self._last_left,
        )
        self._next = (self._next + len(hashes)) % self.num_ghosts

    def recall(self, hashes: UInt64Array) -> RecalledPages | None:
        """Return the records of an edge's pages, in its order; None if no page is remembered."""
        if not self._may_recall(hashes[0]):
            return None
        first, second = both = self._by_hash[self._cells(hashes)]
        is_first, is_second = self._hashes[both] == hashes
        is_ghost = is_first | is_second
        if not np.count_nonzero(is_ghost):
            return None
        places = np.where(is_first, first, second)
        return RecalledPages(is_ghost, *self._history[places[is_ghost]].T)

    def _may_recall(self, first: np.uint64) -> bool:
        """Return whether the page with this hash, or a page after it, may be a ghost."""
        last_left = int(self._last_left[int(first & self._last_bits)])
        return (self._num_left - last_left) % 2**32 < self.num_ghosts

    def clear(self) -> None:
        self._hashes[:] = 0
        self._num_left = self.num_ghosts
        self._last_left[:] = 0

    def _cells(self, hashes: UInt64Array) -> Int64Array:
        """Return the cells of each hash in both halves of the index, int64[2, len(hashes)]."""
        halves = [
            _mixed(salt ^ hashes) % np.uint64(self._num_cells) + first
            for salt, first in zip(_SALTS, (np.uint64(0), np.uint64(self._num_cells)), strict=True)
        ]
        return np.array(halves, np.int64)

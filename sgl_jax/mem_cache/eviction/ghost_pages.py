"""Recently evicted pages: the hashes of their prefixes and records of their use.

A ring of fixed size bounds the memory. Most new edges hold no evicted page, and their first page
shows it, since the pages after it were evicted before it or with it, and are forgotten before it.
So the ring is searched only for edges with a first page in it.

Prefixes are distinguished only by a 64-bit hash, which may collide. So ghosts may affect the order
of eviction, but never a match.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import BoolArray, Int32Array

Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]

# The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit moves half of the output.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_NONE = -1
_UNUSED = -2

_GHOST = np.dtype(
    (
        np.record,
        [
            ("hash", np.uint64),
            *(("num_uses", np.int64), ("last_access", np.int64), ("left_at", np.int64)),
            ("next", np.int64),  # next page of its bucket; `_UNUSED` for an unused entry
            ("first", np.int64),  # not this page's, but at its index: the first page of a bucket
        ],
    )
)


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


@compiled("(uint64[::1], int64, int64, int64, int64, ghost[::1])", ghost=_GHOST)
def _remember(
    hashes: UInt64Array,
    num_uses: int,
    last_access: int,
    left_at: int,
    first_place: int,
    ring: NDArray[Any],
) -> None:
    """Write evicted pages, last first, over the oldest entries, from `first_place` on."""
    size = np.uint64(len(ring))
    for i in range(len(hashes) - 1, -1, -1):
        place = (first_place + len(hashes) - 1 - i) % len(ring)
        page = ring[place]
        if page.next != _UNUSED:
            bucket = ring[page.hash % size]
            if bucket.first == place:
                bucket.first = page.next
            else:
                before = ring[bucket.first]
                while before.next != place:
                    before = ring[before.next]
                before.next = page.next
        bucket = ring[hashes[i] % size]
        page.hash, page.next = hashes[i], bucket.first
        page.num_uses, page.last_access, page.left_at = num_uses, last_access, left_at
        bucket.first = place


@compiled("(uint64[::1], ghost[::1])", ghost=_GHOST)
def _places(hashes: UInt64Array, ring: NDArray[Any]) -> Int64Array:
    """Return the place of each page, or `_NONE`; an empty array if the first page has none."""
    places = np.empty(len(hashes), np.int64)
    for i in range(len(hashes)):
        place = ring[hashes[i] % np.uint64(len(ring))].first
        while place != _NONE and ring[place].hash != hashes[i]:
            place = ring[place].next
        if i == 0 and place == _NONE:
            return places[:0]
        places[i] = place
    return places


class GhostPages:
    """The last `num_ghosts` evicted pages, first in, first out."""

    def __init__(self, num_ghosts: int) -> None:
        self._ring = np.zeros(num_ghosts, _GHOST)
        self._next = 0
        self.clear()

    def remember(self, hashes: UInt64Array, num_uses: int, last_access: int, now: int) -> None:
        """Record the eviction of pages with these prefixes, overwriting the oldest entries."""
        _remember(hashes, num_uses, last_access, now, self._next, self._ring)
        self._next = (self._next + len(hashes)) % len(self._ring)

    def recall(self, hashes: UInt64Array) -> RecalledPages | None:
        """Return the records of an edge's pages, in its order; None if no page is remembered."""
        places = _places(hashes, self._ring)
        if not len(places):
            return None
        is_ghost = places != _NONE
        found = self._ring[places[is_ghost]]
        return RecalledPages(is_ghost, found["num_uses"], found["last_access"], found["left_at"])

    def clear(self) -> None:
        self._ring["next"], self._ring["first"] = _UNUSED, _NONE

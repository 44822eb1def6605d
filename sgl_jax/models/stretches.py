"""Layers in stretches of equal periods, so that a program compiles few of them.

For 26 layers, five with a window and one without in turn, the first stretch is six layers, four
times over, and the second one layer with a window, twice over: seven layers to compile.
"""

from collections.abc import Hashable, Sequence
from itertools import takewhile
from operator import eq
from typing import NamedTuple

_MAX_PERIOD = 16


class Stretch(NamedTuple):
    """`period` layers from `first` on, and their like `repeats` times in all."""

    first: int
    period: int
    repeats: int

    def layers_like(self, position: int) -> range:
        """The layers equal to the one at `position` of the period."""
        start = self.first + position
        return range(start, start + self.period * self.repeats, self.period)


def find_stretches(kinds: Sequence[Hashable]) -> tuple[Stretch, ...]:
    """Cut layers of these kinds, in order, so that the sum of the periods is least.

    Ties go to the fewest stretches, then to the longest first one.
    """
    numbers = [kinds.index(kind) for kind in kinds]  # faster to compare
    best: list[tuple[Stretch, ...]] = [()]  # of the last layers, by how many these are
    for first in reversed(range(len(kinds))):
        rest = numbers[first:]
        options = [
            (Stretch(first, period, repeats), *best[len(rest) - period * repeats])
            for period in range(1, 1 + min(_MAX_PERIOD, len(rest)))
            for repeats in range(1, 2 + _common_start(rest, rest[period:]) // period)
        ]
        best.append(min(options, key=_cost))
    return best[-1]


def _common_start(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))


def _cost(stretches: tuple[Stretch, ...]) -> tuple[int, int, int]:
    first = stretches[0]
    total = sum(stretch.period for stretch in stretches)
    return total, len(stretches), -first.period * first.repeats

"""Layers in stretches of equal periods, so that a program compiles few of them.

Of 26 layers, five with a window and one without in turn, the first stretch is six layers, four
times over, and the second one layer with a window, twice over: seven layers to compile.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Stretch(NamedTuple):
    """`period` layers from `first` on, and their like `repeats` times in all."""

    first: int
    period: int
    repeats: int

    def layers_like(self, position: int) -> range:
        """The layers that are as the one at `position` of the period."""
        start = self.first + position
        return range(start, start + self.period * self.repeats, self.period)


def find_stretches(kinds: Sequence[Hashable]) -> tuple[Stretch, ...]:
    """Cut layers of these kinds, in order, so that the sum of the periods is least.

    Of equals, into the fewest, of which the first are the longest.
    """
    numbers = {kind: number for number, kind in enumerate(kinds)}
    names = [numbers[kind] for kind in kinds]  # faster to compare
    # From each layer to the end: the sum of periods, and the stretches.
    best: list[tuple[int, tuple[Stretch, ...]]] = [(0, ())]
    for first in reversed(range(len(names))):
        least: tuple[tuple[int, int, int], tuple[Stretch, ...]] | None = None
        for period in range(1, len(names) - first + 1):
            if least is not None and period > least[0][0]:
                break
            for repeats in range(1, 1 + _most_repeats(names, first, period)):
                length = period * repeats
                total, rest = best[len(names) - first - length]
                stretches = (Stretch(first, period, repeats), *rest)
                option = ((period + total, len(stretches), -length), stretches)
                least = option if least is None else min(least, option)
        assert least is not None
        best.append((least[0][0], least[1]))
    return best[-1][1]


def _most_repeats(names: Sequence[int], first: int, period: int) -> int:
    """How often the `period` layers from `first` on follow each other."""
    repeats = 1
    while True:
        start = first + repeats * period
        if list(names[start : start + period]) != list(names[first : first + period]):
            return repeats
        repeats += 1

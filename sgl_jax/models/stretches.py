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
    """Cut layers of these kinds, in order, so that the sum of the periods is least."""
    # From each layer to the end: the sum of periods, the number of stretches, and these.
    best: list[tuple[int, int, tuple[Stretch, ...]]] = [(0, 0, ())]
    for first in reversed(range(len(kinds))):
        options = []
        for stretch in _stretches_from(first, kinds):
            rest = best[len(kinds) - first - stretch.period * stretch.repeats]
            options.append((stretch.period + rest[0], 1 + rest[1], (stretch, *rest[2])))
        best.append(min(options))
    return best[-1][2]


def _stretches_from(first: int, kinds: Sequence[Hashable]) -> list[Stretch]:
    """All that begin with layer `first`; longer periods only where they repeat."""
    found = [Stretch(first, 1, 1)]
    for period in range(1, (len(kinds) - first) // 2 + 1):
        repeats = 1
        while True:
            start = first + repeats * period
            if kinds[start : start + period] != kinds[first : first + period]:
                break
            repeats += 1
            found.append(Stretch(first, period, repeats))
    return found

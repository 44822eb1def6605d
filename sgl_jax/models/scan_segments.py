"""Segments of equal periods of layers, so that a program compiles few layers.

For 26 layers, a repetition of five with a window and one without, the first segment is six layers,
repeated four times, and the second one layer with a window, repeated twice: seven layers to
compile.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from sgl_jax.models.layer_specs import LayerSpec
from sgl_jax.models.quantization import RecordingRules

_MAX_PERIOD = 16


class ScanSegment(NamedTuple):
    """A block of `period` layers starting at `first`, repeated `repeats` times."""

    first: int
    period: int
    repeats: int

    def layers_like(self, position: int) -> range:
        """Return the layers equal to the layer at `position` of the period."""
        start = self.first + position
        return range(start, start + self.period * self.repeats, self.period)


def layer_kinds(
    specs: Sequence[LayerSpec], declare: Callable[[LayerSpec], object]
) -> list[Hashable]:
    """Return each layer's specification with the rules of its matrices.

    `declare` declares a layer, and so asks for the rules of its matrices.
    """
    recordings = {spec: RecordingRules() for spec in specs}
    for spec, own in recordings.items():
        declare(replace(spec, rules=own))
    return [(spec, *map(spec.rules.of, recordings[spec].modules)) for spec in specs]


def find_scan_segments(kinds: Sequence[Hashable]) -> tuple[ScanSegment, ...]:
    """Cut layers of these kinds, in order, into segments with the least sum of periods.

    Ties go to the fewest segments, then to the longest first segment.
    """
    numbers = [kinds.index(kind) for kind in kinds]  # faster to compare
    best: list[tuple[ScanSegment, ...]] = [()]  # best[n]: the segments of the last n layers
    for first in reversed(range(len(kinds))):
        rest = numbers[first:]
        options = [
            (ScanSegment(first, period, repeats), *best[len(rest) - period * repeats])
            for period in range(1, 1 + min(_MAX_PERIOD, len(rest)))
            for repeats in range(1, 2 + _common_start(rest, rest[period:]) // period)
        ]
        best.append(min(options, key=_cost))
    return best[-1]


def _common_start(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))


def _cost(scan_segments: tuple[ScanSegment, ...]) -> tuple[int, int, int]:
    first = scan_segments[0]
    total = sum(segment.period for segment in scan_segments)
    return total, len(scan_segments), -first.period * first.repeats

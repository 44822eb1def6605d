"""A Prometheus histogram that takes in many equal values at once.

The library's own takes three locks a value, and one value is a streamed token.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class TimeHistogram:
    """A collector of its registry. Values come from one thread at a time; any thread may read.

    Args:
        bounds_s: upper bounds of the buckets, in seconds, ascending; infinity is added.
    """

    def __init__(
        self, name: str, help_text: str, bounds_s: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._help_text = help_text
        self._bounds_s = (*bounds_s, float("inf"))
        self._counts = [0] * len(self._bounds_s)
        self._sum_s = 0.0
        registry.register(self)

    def observe(self, seconds: float, count: int = 1) -> None:
        """`count` times this value."""
        self._counts[bisect_left(self._bounds_s, seconds)] += count
        self._sum_s += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        totals = accumulate(self._counts)
        buckets = [(floatToGoString(b), n) for b, n in zip(self._bounds_s, totals, strict=True)]
        yield HistogramMetricFamily(self._name, self._help_text, buckets, self._sum_s)

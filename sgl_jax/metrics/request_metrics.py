"""Counters and histograms of requests, measured on the clients' side.

Owns its Prometheus registry: nothing is registered globally, so two engines in one process (or two
tests) do not collide. Names and buckets follow SGLang's dashboards.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 120)
_E2E_BUCKETS_S = (0.1, 0.2, 0.4, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 100, 200, 400, 600, 1200)
_ITL_BUCKETS_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 2, 4, 8),
)
_MIN_RATE_WINDOW_S = 1.0


class TimeHistogram:
    """A Prometheus histogram that observes many equal values at once.

    The library's histogram takes three locks per value, and one value is a streamed token. Values
    must come from one thread at a time; any thread may read.

    Args:
        bounds_s: upper bounds of the buckets, in seconds, ascending; infinity is added.
        labels: labels of all values.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        bounds_s: Sequence[float],
        labels: Mapping[str, str],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._help_text = help_text
        self._labels = labels
        self._bounds_s = (*bounds_s, float("inf"))
        self._counts = [0] * len(self._bounds_s)
        self._sum_s = 0.0
        registry.register(self)

    def observe(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += count
        self._sum_s += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        totals = accumulate(self._counts)
        buckets = [(floatToGoString(b), n) for b, n in zip(self._bounds_s, totals, strict=True)]
        family = HistogramMetricFamily(self._name, self._help_text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], buckets, self._sum_s)
        yield family


class RequestMetrics:
    """Tokens and times of the requests of one model. Times in seconds."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self.arrived = self._counter("num_requests", "requests accepted")
        self.replaced_surrogates = self._counter(
            "replaced_surrogates", "halves of surrogate pairs in bodies, replaced by U+FFFD"
        )
        self.aborted = self._counter("num_aborted_requests", "requests that ended early")
        self.generated_tokens = self._counter("generation_tokens", "tokens generated")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "arrival to first token", _TTFT_BUCKETS_S
        )
        self.time_per_next_token = self._histogram(
            "inter_token_latency_seconds", "time per token after the first", _ITL_BUCKETS_S
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "arrival to last token", _E2E_BUCKETS_S
        )
        self.queue_time = self._histogram(
            "queue_time_seconds", "arrival to the first start", _TTFT_BUCKETS_S
        )
        self.num_generated = 0
        self._rate_from = (time.perf_counter(), 0)
        self._rate = 0.0

    def generation_rate(self) -> float:
        """Return generated tokens per second, measured over intervals of at least a second."""
        now = time.perf_counter()
        since, before = self._rate_from
        if now - since >= _MIN_RATE_WINDOW_S:
            self._rate = (self.num_generated - before) / (now - since)
            self._rate_from = (now, self.num_generated)
        return self._rate

    def exposition(self, only_tenant: str | None = None) -> bytes:
        """Return all metrics of the registry in Prometheus' text format.

        With `only_tenant`, figures by tenant are limited to that tenant.
        """
        registry: Any = self.registry
        if only_tenant is not None:
            registry = _OneTenant(registry, only_tenant)
        text: bytes = generate_latest(registry)
        return text

    def _counter(self, name: str, help_text: str) -> Counter:
        counter = Counter(f"sglang:{name}", help_text, ["model_name"], registry=self.registry)
        return counter.labels(self.model_name)

    def _histogram(self, name: str, help_text: str, bounds_s: tuple[float, ...]) -> TimeHistogram:
        labels = {"model_name": self.model_name}
        return TimeHistogram(f"sglang:{name}", help_text, bounds_s, labels, self.registry)


class _OneTenant:
    """The metrics of `registry` without the samples of other tenants."""

    def __init__(self, registry: CollectorRegistry, tenant: str) -> None:
        self._registry = registry
        self._tenant = tenant

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            own = Metric(family.name, family.documentation, family.type)
            own.samples = [
                each
                for each in family.samples
                if each.labels.get("tenant", self._tenant) == self._tenant
            ]
            yield own

"""The engine's own figures, as Prometheus gauges: memory and load of every data-parallel rank.

Owns the last state the engine reported (`GetState`); a scrape while the engine is busy shows
that. Must never ask the engine itself.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sgl_jax.metrics.request_metrics import RequestMetrics

_PAGE_STATES = ("free", "leased", "cached", "session_held", "reserved")
# Gauge name -> (key in a rank's state, help).
_RANK_GAUGES = {
    "num_running_reqs": ("num_running", "requests running"),
    "num_queue_reqs": ("num_waiting", "requests waiting"),
    "kv_pages_total": ("total_pages", "KV pages of the rank"),
    "free_rows": ("free_rows", "rows that a request can take"),
    "total_rows": ("total_rows", "rows of the rank"),
    "session_rows": ("session_rows", "rows that idle sessions hold"),
}


class EngineMetrics:
    """A Prometheus collector over the engine's last reported state."""

    def __init__(self, requests: RequestMetrics) -> None:
        self._requests = requests
        self._state: Mapping[str, Any] = {}
        requests.registry.register(self)

    def update(self, state: Mapping[str, Any]) -> None:
        """Take in `Reply.data` of a `GetState`: `ranks`, `num_sessions`, `counters`."""
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at each scrape."""
        ranks = self._state.get("ranks", [])
        for name, (key, help_text) in _RANK_GAUGES.items():
            yield _per_rank(name, help_text, [(rank, rank[key]) for rank in ranks])
        yield _per_rank(
            "token_usage",
            "share of the KV pages that running requests and sessions hold",
            [(rank, _usage(rank)) for rank in ranks],
        )
        yield _page_states(ranks)
        yield _waiting_for(self._state.get("waiting_for", {}))
        num_sessions = self._state.get("num_sessions", 0)
        yield GaugeMetricFamily("sglang:num_sessions", "sessions open", value=num_sessions)
        yield _gauge("gen_throughput", "tokens generated per second", self._requests)
        yield _gauge("cache_hit_rate", "share of prompt tokens found cached", self._requests)
        for name, value in self._state.get("counters", {}).items():
            # The engine counts in whole numbers; a fraction is a rate or a share.
            kind = CounterMetricFamily if isinstance(value, int) else GaugeMetricFamily
            yield kind(f"sglang:engine_{name}", name.replace("_", " "), value=value)


def _usage(rank: Mapping[str, Any]) -> float:
    held = rank["leased_pages"] + rank.get("session_held_pages", 0)
    return float(held / max(rank["total_pages"] - rank.get("reserved_pages", 0), 1))


def _per_rank(
    name: str, help_text: str, values: list[tuple[Mapping[str, Any], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"sglang:{name}", help_text, labels=["dp_rank"])
    for rank, value in values:
        family.add_metric([str(rank["dp_rank"])], value)
    return family


def _page_states(ranks: list[Mapping[str, Any]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "sglang:kv_pages",
        "KV pages by owner; they add up to the total",
        labels=["dp_rank", "state"],
    )
    for rank in ranks:
        for state in _PAGE_STATES:
            family.add_metric([str(rank["dp_rank"]), state], rank.get(f"{state}_pages", 0))
    return family


def _waiting_for(counts: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "sglang:waiting_for", "waiting requests by what they wait for", labels=["reason"]
    )
    for reason, count in counts.items():
        family.add_metric([reason], count)
    return family


def _gauge(name: str, help_text: str, requests: RequestMetrics) -> GaugeMetricFamily:
    value = {"gen_throughput": requests.generation_rate, "cache_hit_rate": requests.cache_hit_rate}
    return GaugeMetricFamily(f"sglang:{name}", help_text, value=value[name]())

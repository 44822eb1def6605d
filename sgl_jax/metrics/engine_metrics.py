"""The engine's own figures, as Prometheus gauges: memory and load of every data-parallel rank.

Owns the last state the engine reported (`GetState`); a scrape while the engine is busy shows
that. Must never call the engine itself.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sgl_jax.metrics.request_metrics import RequestMetrics
from sgl_jax.metrics.tenant_metrics import TenantMetrics

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
        self._tenants = TenantMetrics()
        requests.registry.register(self)

    def update(self, state: Mapping[str, Any]) -> None:
        """Take in `Reply.data` of a `GetState`: `ranks`, `num_sessions`, `counters`, `tenants`."""
        self._state = state
        self._tenants.update(state.get("tenants", {}))

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at each scrape."""
        state, requests = self._state, self._requests
        ranks = state.get("ranks", [])
        for name, (key, help_text) in _RANK_GAUGES.items():
            yield _gauges(name, help_text, ["dp_rank"], [(r["dp_rank"], r[key]) for r in ranks])
        yield _gauges(
            "token_usage",
            "share of the KV pages that running requests and sessions hold",
            ["dp_rank"],
            [(rank["dp_rank"], token_usage(rank)) for rank in ranks],
        )
        yield _gauges(
            "kv_pages",
            "KV pages by owner; they add up to the total",
            ["dp_rank", "state"],
            [
                (rank["dp_rank"], owner, rank.get(f"{owner}_pages", 0))
                for rank in ranks
                for owner in _PAGE_STATES
            ],
        )
        yield _gauges(
            "waiting_for",
            "waiting requests, by the reason why they wait",
            ["reason"],
            state.get("waiting_for", {}).items(),
        )
        for name, help_text, value in (
            ("num_sessions", "sessions open", state.get("num_sessions", 0)),
            ("gen_throughput", "tokens generated per second", requests.generation_rate()),
            ("cache_hit_rate", "share of prompt tokens found cached", requests.cache_hit_rate()),
        ):
            yield GaugeMetricFamily(f"sglang:{name}", help_text, value=value)
        yield from self._tenants.collect()
        for name, value in state.get("counters", {}).items():
            # The engine counts in whole numbers; a fraction is a rate or a share.
            kind = CounterMetricFamily if isinstance(value, int) else GaugeMetricFamily
            yield kind(f"sglang:engine_{name}", name.replace("_", " "), value=value)


def token_usage(rank: Mapping[str, Any]) -> float:
    """The share of a rank's KV pages that running requests and sessions hold."""
    held = rank["leased_pages"] + rank.get("session_held_pages", 0)
    return float(held / max(rank["total_pages"] - rank.get("reserved_pages", 0), 1))


def _gauges(
    name: str, help_text: str, labels: list[str], rows: Iterable[tuple[Any, ...]]
) -> GaugeMetricFamily:
    """One gauge for each row: its labels, then its value."""
    family = GaugeMetricFamily(f"sglang:{name}", help_text, labels=labels)
    for *own, value in rows:
        family.add_metric(list(map(str, own)), value)
    return family

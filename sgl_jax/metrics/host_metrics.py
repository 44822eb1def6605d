"""Prometheus metrics of the hosts of one engine, which reveal a slow host.

In a step with collectives all hosts end together. A slow host therefore shows in its time to
launch, and in a step time shorter than that on the other hosts, which wait for it.
"""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sgl_jax.core.engine_messages import HostReport

_COUNTERS = (
    ("host_steps", "steps that a host has run", "num_steps"),
    ("host_launch_seconds", "time from a step's arrival at a host to its launch", "launch_s"),
    ("host_step_seconds", "time from a step's arrival at a host to its tokens", "step_s"),
)


class HostMetrics:
    """A Prometheus collector over the last figures of hosts."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._hosts: Sequence[HostReport] = ()

    def update(self, hosts: Sequence[HostReport]) -> None:
        self._hosts = hosts

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics; called by the registry at each scrape."""
        labels = ["model_name", "host"]
        for name, help_text, attribute in _COUNTERS:
            family = CounterMetricFamily(f"sglang:{name}", help_text, labels=labels)
            for own in self._hosts:
                value = getattr(own.figures, attribute)
                family.add_metric([self._model_name, str(own.rank)], value)
            yield family
        silent = GaugeMetricFamily(
            "sglang:host_silent_seconds", "time since a host's last sign of life", labels=labels
        )
        for own in self._hosts:
            silent.add_metric([self._model_name, str(own.rank)], own.silent_s)
        yield silent

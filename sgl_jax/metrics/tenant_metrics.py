"""Metrics of tenants, with a bounded number of labels: clients can invent any number of users."""

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sgl_jax.core.shares import USER_PREFIX

Figures = Mapping[str, Mapping[str, int]]  # by tenant, by name of the figure
MAX_USERS = 100
OTHER_USERS = "other users"  # no name of a key has a space
_GAUGES = {
    "num_queued": ("tenant_num_queue_reqs", "requests waiting"),
    "num_running": ("tenant_num_running_reqs", "requests running"),
}
_COUNTERS = {
    "prompt_tokens": ("tenant_prompt_tokens", "prompt tokens"),
    "cached_tokens": ("tenant_cached_tokens", "prompt tokens found in the prefix cache"),
    "generated_tokens": ("tenant_generation_tokens", "tokens generated"),
}


class TenantMetrics:
    """The first `MAX_USERS` users and every key have a separate label.

    Requests without a tenant have the empty label. If the engine forgets a tenant, its tokens stay
    in the total of its label, so that no counter decreases.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._users: set[str] = set()
        self._seen: Figures = {}
        self._now: dict[str, Counter[str]] = {}  # by label
        self._total: dict[str, Counter[str]] = {}

    def update(self, tenants: Figures) -> None:
        """Store the engine's figures of each tenant. A new tenant adds its tokens so far."""
        self._now = {label: Counter() for label in self._total}
        for name, figures in tenants.items():
            label = self._label(name)
            now = self._now.setdefault(label, Counter())
            total = self._total.setdefault(label, Counter())
            before = self._seen.get(name, {})
            for key in _GAUGES:
                now[key] += figures[key]
            for key in _COUNTERS:
                gained = figures[key] - before.get(key, 0)
                total[key] += gained if gained >= 0 else figures[key]
        self._seen = tenants

    def collect(self) -> Iterable[Metric]:
        for kind, families, values in (
            (GaugeMetricFamily, _GAUGES, self._now),
            (CounterMetricFamily, _COUNTERS, self._total),
        ):
            for key, (name, help_text) in families.items():
                family = kind(
                    f"sglang:{name}", f"{help_text}, by tenant", labels=["model_name", "tenant"]
                )
                for label, figures in values.items():
                    family.add_metric([self._model_name, label], figures[key])
                yield family

    def _label(self, tenant: str) -> str:
        if not tenant.startswith(USER_PREFIX) or tenant in self._users:
            return tenant
        if len(self._users) >= MAX_USERS:
            return OTHER_USERS
        self._users.add(tenant)
        return tenant

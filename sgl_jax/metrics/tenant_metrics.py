"""Figures of tenants, with a bounded number of labels: clients can make up any number of users."""

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sgl_jax.core.messages import USER_PREFIX

MAX_USERS = 100
OTHER_USERS = "other users"  # no name of a key has a space
_GAUGES = {
    "num_queued": ("tenant_num_queue_reqs", "requests waiting"),
    "num_running": ("tenant_num_running_reqs", "requests running"),
}
_COUNTERS = {
    "prompt_tokens": ("tenant_prompt_tokens", "prompt tokens"),
    "cached_tokens": ("tenant_cached_tokens", "of these, found in the prefix cache"),
    "generated_tokens": ("tenant_generation_tokens", "tokens generated"),
}


class TenantMetrics:
    """The first `MAX_USERS` users that were seen have a label each, as has every key."""

    def __init__(self) -> None:
        self._users: set[str] = set()

    def collect(self, tenants: Mapping[str, Mapping[str, int]]) -> Iterable[Metric]:
        """The families of all figures; `tenants` holds those of the engine by tenant."""
        totals: dict[str, Counter[str]] = {}
        for name, figures in tenants.items():
            totals.setdefault(self._label(name), Counter()).update(figures)
        for kind, families in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for key, (name, help_text) in families.items():
                family = kind(f"sglang:{name}", f"{help_text}, by tenant", labels=["tenant"])
                for label, figures in totals.items():
                    family.add_metric([label], figures[key])
                yield family

    def _label(self, tenant: str) -> str:
        if not tenant.startswith(USER_PREFIX) or tenant in self._users:
            return tenant
        if len(self._users) >= MAX_USERS:
            return OTHER_USERS
        self._users.add(tenant)
        return tenant

"""Tenants, and their shares of a total, such as queue capacity, so that none can exhaust it."""

from collections import Counter

import msgspec

# Prefix of tenant names from the field `user`. Names of API keys contain no space, so a client
# cannot impersonate the tenant of a key.
USER_PREFIX = "user "
# Default part of the units not held by other tenants that one tenant may hold.
DEFAULT_PART = 0.75


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The customer of a request. All requests with one name share the limits below.

    Args:
        weight: share of the engine under contention, relative to other tenants; above 0.
        max_queued: maximum waiting requests; further requests are refused. 0: no limit.
        max_running: maximum running requests; further requests wait. 0: no limit.
        is_pooled: share one part with all such tenants and all requests without a tenant, because
            clients can invent any number of such names.
    """

    name: str
    weight: float = 1.0
    max_queued: int = 0
    max_running: int = 0
    is_pooled: bool = False


def holder_of(tenant: Tenant | None) -> str:
    """Return the name under which a tenant's share is counted."""
    return "" if tenant is None or tenant.is_pooled else tenant.name


def shared_chunk_tokens(chunk_tokens: int) -> int:
    """Return the most prompt tokens of a step that also decodes while tenants share the engine."""
    return -(-chunk_tokens // 8)


def tenant_text(tenant: str) -> str:
    """Name a tenant in a message to its clients; "" stands for all pooled tenants."""
    return f"tenant {tenant!r}" if tenant else "the clients that share a key or have none"


class Shares:
    """Counts the units of a total held by each tenant, and limits further units.

    A tenant may hold `part` of the units not held by other tenants, and at least one. A single
    tenant therefore leaves some units for the next tenant, and tenants that take as many as
    possible converge to equal shares. With a part of 1, only the total is a limit.
    """

    def __init__(self, total: int, part: float, most_kept: int | None = None) -> None:
        self.total = total
        self._part = part
        self._most_kept = total if most_kept is None else most_kept
        self._held: Counter[str] = Counter()  # units by tenant, without zero entries
        self.num_held = 0

    def held_by(self, tenant: str) -> int:
        return self._held[tenant]

    def add(self, tenant: str, change: int) -> None:
        """Add `change` units to the tenant's count; negative to subtract."""
        self.num_held += change
        self._held[tenant] += change
        if not self._held[tenant]:
            del self._held[tenant]

    def most(self, tenant: str) -> int:
        """Return the units that the tenant may hold, given the present units of other tenants."""
        return self._most_of(self.total - (self.num_held - self._held[tenant]))

    @property
    def most_alone(self) -> int:
        """Return the units that a tenant may hold while no other tenant holds any."""
        return self._most_of(self.total)

    def may_add(self, tenant: str, num_units: int) -> bool:
        return self._held[tenant] + num_units <= self.most(tenant)

    def larger_than(self, num_units: int) -> list[str]:
        """Return the tenants with more than `num_units` units, largest first."""
        larger = [tenant for tenant, held in self._held.items() if held > num_units]
        return sorted(larger, key=lambda tenant: -self._held[tenant])

    def _most_of(self, left: int) -> int:
        kept = min(left - int(self._part * left), self._most_kept)
        return max(left - kept, min(left, 1))

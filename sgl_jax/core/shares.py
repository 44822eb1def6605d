"""Shares of a total, such as the places of the queue, by which no tenant can exhaust it."""

from collections import Counter

# The default part of the rest, after all others have theirs, that a tenant may hold.
DEFAULT_PART = 0.75


def tenant_text(tenant: str) -> str:
    """A tenant in a message to its clients; "" are all that have no share of their own."""
    return f"tenant {tenant!r}" if tenant else "the clients without a key of their own"


class Shares:
    """Counts the units of a total that each tenant holds, and limits how many more it may take.

    A tenant may hold `part` of the units that others do not hold, and at least one. So a tenant
    that is alone leaves some units to the next one, and tenants that take all they can get end with
    equal shares. With a part of 1 only the total is a limit.
    """

    def __init__(self, total: int, part: float, most_kept: int | None = None) -> None:
        """`most_kept`: units that a tenant leaves to others at most."""
        self.total = total
        self._part = part
        self._most_kept = total if most_kept is None else most_kept
        self._held: Counter[str] = Counter()  # by tenant, none with 0
        self.num_held = 0

    def held_by(self, tenant: str) -> int:
        return self._held[tenant]

    def add(self, tenant: str, change: int) -> None:
        """Count that a tenant holds `change` units more, or fewer if it is negative."""
        self.num_held += change
        self._held[tenant] += change
        if not self._held[tenant]:
            del self._held[tenant]

    def most(self, tenant: str) -> int:
        """Units that the tenant may hold beside the present ones of others."""
        return self._most_of(self.total - (self.num_held - self._held[tenant]))

    @property
    def most_alone(self) -> int:
        """Units that a tenant may hold while others hold none."""
        return self._most_of(self.total)

    def may_add(self, tenant: str, num_units: int) -> bool:
        """Return whether the tenant may hold so many units more."""
        return self._held[tenant] + num_units <= self.most(tenant)

    def larger_than(self, num_units: int) -> list[str]:
        """The tenants that hold more than so many units, those with most first."""
        larger = [tenant for tenant, held in self._held.items() if held > num_units]
        return sorted(larger, key=lambda tenant: -self._held[tenant])

    def _most_of(self, left: int) -> int:
        kept = min(left - int(self._part * left), self._most_kept)
        return max(left - kept, min(left, 1))

"""How much each tenant was served, and whose turn it is.

Every tenant has a virtual counter: the tokens that it was served, weighted, over its own weight
(virtual token counters; Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
Prompt tokens count once and only if they are computed, output tokens twice. A tenant without
waiting requests is lifted to the lowest counter of those that have some when it comes back, so that
no share is saved up.

Counters that differ by less than a quantum are equal, and among their requests the ordinary order
decides, so that a cached prefix is used while it is there (a deficit; Cao et al., "Locality-aware
Fair Scheduling in LLM Serving", 2025). In its turn a tenant's requests go first whose prefix most
other waiting requests continue: these find it cached then. A tenant that is served early is served
before its conversations' next requests have come, and finds their prefixes evicted when they do.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import Tenant
from sgl_jax.core.step_plan import BoolArray, Int32Array, RowIndex

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
# Tenants that are remembered; of those without a request the least served is forgotten first. It is
# lifted when it comes back, as it would have been anyway.
MAX_TENANTS = 4096
# Levels of counters above the lowest that are told apart.
NUM_LEVELS = 64
# A quantum is this part of the tokens that the KV pools hold: enough to use cached prefixes, and
# less than the running requests are served until they end.
_QUANTUM_PART = 8
NO_TENANT = 0  # the number of all requests that name none

_Float64Array = NDArray[np.float64]


class TenantCounts(NamedTuple):
    """Requests of a tenant now, and tokens since the start."""

    num_queued: int
    num_running: int
    prompt_tokens: int
    cached_tokens: int  # of these
    generated_tokens: int


class Turns(NamedTuple):
    """Whose turn it is, by number of the tenant."""

    level: NDArray[np.int64]  # quanta above the lowest counter of those that wait
    order: Int32Array  # 0 for the lowest counter
    is_lagging: BoolArray  # another was served so much more that nothing passes over its requests


class Tenants:
    """The tenants of an engine of the given sizes, by number; `is_fair` orders them by shares."""

    def __init__(self, sizes: EngineSizes, *, is_fair: bool) -> None:
        self.is_fair = is_fair
        most_tokens = sizes.dp_size * (sizes.pool_pages[0] - 1) * sizes.page_size
        self._quantum = max(PROMPT_WEIGHT * most_tokens // _QUANTUM_PART, 1)
        # Half of the bound of the paper: what runs already may be served the other half.
        largest = PROMPT_WEIGHT * sizes.max_request_tokens
        self._max_lag = self._quantum + max(largest, OUTPUT_WEIGHT * most_tokens)
        self._numbers = {"": NO_TENANT}
        self._free = list(range(MAX_TENANTS, 0, -1))
        size = MAX_TENANTS + 1
        self._served: _Float64Array = np.zeros(size)
        self._weight: _Float64Array = np.ones(size)
        self._max_running = np.zeros(size, np.int32)
        self._num_requests = np.zeros(size, np.int32)
        self._num_queued = np.zeros(size, np.int32)
        self._tokens = np.zeros((3, size), np.int64)  # of prompts, cached, generated

    # -- requests come and go -----------------------------------------------------------------

    def may_queue(self, tenant: Tenant | None) -> bool:
        """Whether another request of a tenant may wait."""
        if tenant is None or not tenant.max_queued:
            return True
        number = self._numbers.get(tenant.name)
        return number is None or int(self._num_queued[number]) < tenant.max_queued

    def enter(self, tenant: Tenant | None) -> int:
        """A request of a tenant arrives; the tenant's number. To be ended by `leave`."""
        number = NO_TENANT if tenant is None else self._number(tenant.name)
        if tenant is not None and number != NO_TENANT:
            self._weight[number], self._max_running[number] = tenant.weight, tenant.max_running
        if not self._num_queued[number]:
            self._served[number] = max(self._served[number], self._lowest())
        self._num_requests[number] += 1
        return number

    def _lowest(self) -> float:
        """The counter that a tenant without waiting requests comes back at: the lowest of those
        that wait, or of those that run; if none does, the highest of all."""
        for present in (self._num_queued > 0, self._num_requests > 0):
            if present.any():
                return float(self._served[present].min())
        return float(self._served.max())

    def leave(self, number: int) -> None:
        """A request ended."""
        self._num_requests[number] -= 1

    def queue(self, number: int, change: int) -> None:
        """A request more (1) or less (-1) waits."""
        self._num_queued[number] += change

    def _number(self, name: str) -> int:
        """The tenant's number; `NO_TENANT` if as many as may be remembered have requests."""
        number = self._numbers.get(name)
        if number is not None:
            return number
        if not self._free:
            idle = [n for n in self._numbers.values() if n and not self._num_requests[n]]
            if not idle:
                return NO_TENANT
            least = min(idle, key=lambda n: (self._served[n], n))
            del self._numbers[next(key for key, n in self._numbers.items() if n == least)]
            self._free.append(least)
        number = self._numbers[name] = self._free.pop()
        self._served[number] = 0.0
        self._tokens[:, number] = 0
        return number

    # -- what they are served -----------------------------------------------------------------

    def serve_prompt(self, number: int, num_tokens: int, num_cached: int) -> None:
        """A prompt starts to be computed, but for the tokens that are cached."""
        self._tokens[:2, number] += num_tokens, num_cached
        cost = PROMPT_WEIGHT * (num_tokens - num_cached)
        self._served[number] += cost / self._weight[number]

    def serve_outputs(
        self, numbers: Int32Array, rows: RowIndex, counts: Int32Array, num_tokens: int
    ) -> None:
        """Requests in `rows`, of the tenants that `numbers` has by row, gained `counts` tokens,
        int32[len(rows)], together `num_tokens`."""
        if len(self._numbers) == 1:
            self._tokens[2, NO_TENANT] += num_tokens
            return
        gained = np.bincount(numbers[rows], counts, len(self._served))
        self._tokens[2] += gained.astype(np.int64)
        self._served += OUTPUT_WEIGHT * gained / self._weight

    # -- whose turn it is ---------------------------------------------------------------------

    def may_run(self, number: int) -> bool:
        """Whether another request of a tenant may run."""
        most = int(self._max_running[number])
        return not most or int(self._num_requests[number] - self._num_queued[number]) < most

    @property
    def is_full(self) -> BoolArray:
        """By number, whether so many requests run as may."""
        running = self._num_requests - self._num_queued
        is_full: BoolArray = (self._max_running > 0) & (running >= self._max_running)
        return is_full

    def turns(self) -> Turns | None:
        """Whose turn it is; None where shares do not count, or one tenant alone waits."""
        if not self.is_fair or len(self._numbers) == 1:
            return None
        waiting = np.flatnonzero(self._num_queued)
        if not len(waiting):
            return None
        size = len(self._served)
        level = np.zeros(size, np.int64)
        order = np.zeros(size, np.int32)
        excess = self._served[waiting] - self._served[waiting].min()
        level[waiting] = np.minimum(excess // self._quantum, NUM_LEVELS - 1)
        present = np.flatnonzero(self._num_requests)
        order[present[np.argsort(self._served[present], kind="stable")]] = np.arange(len(present))
        # In tokens of its own.
        lag = (self._served[present].max() - self._served) * self._weight
        is_lagging = (self._num_queued > 0) & (lag > self._max_lag)
        return Turns(level, order, is_lagging)

    def counts(self) -> dict[str, TenantCounts]:
        """By name; requests that name no tenant are under the empty one."""
        return {
            name: TenantCounts(
                int(self._num_queued[number]),
                int(self._num_requests[number] - self._num_queued[number]),
                *self._tokens[:, number].tolist(),
            )
            for name, number in self._numbers.items()
        }

"""Counts the service of each tenant, and orders tenants by turns.

Every tenant has a virtual counter: its weighted served tokens, divided by the tenant's weight
(virtual token counters; Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
Prompt tokens count once and only if they are computed, output tokens twice. A tenant that returns
to the queue is lifted to the lowest counter of the waiting tenants, so that no share is saved up.

Counters that differ by less than a quantum are equal, and the ordinary order decides among their
requests, so that a cached prefix is used while present (a deficit; Cao et al., "Locality-aware Fair
Scheduling in LLM Serving", 2025). Within a tenant's turn, requests with the prefix that most other
waiting requests continue go first: the rest then find it cached. If tenants are served early, the
next requests of their conversations arrive later, and find their prefixes evicted.
"""

from heapq import heappop, heappush, heapreplace
from itertools import starmap
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.shares import Tenant
from sgl_jax.core.step_plan import BoolArray, Int32Array, RowIndex

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
# Limit of remembered tenants; among tenants without a request the least served is dropped first. A
# returning tenant is lifted anyway.
MAX_TENANTS = 4096
# Number of distinguished levels of counters, from the lowest up.
NUM_LEVELS = 64
# A quantum is this part of the tokens in the KV pools: enough to use cached prefixes, and less than
# the service of the running requests until they end.
_QUANTUM_PART = 8
NO_TENANT = 0  # the number of all requests without a tenant

_Float64Array = NDArray[np.float64]


class TenantCounts(NamedTuple):
    """Requests of a tenant now, and tokens since the start."""

    num_queued: int
    num_running: int
    prompt_tokens: int
    cached_tokens: int  # part of `prompt_tokens`
    generated_tokens: int


class Turns(NamedTuple):
    """The order in which tenants are served next; each array is indexed by a tenant's number."""

    level: NDArray[np.int64]  # quanta above the lowest counter of the waiting tenants
    order: Int32Array  # 0 for the lowest counter
    is_lagging: BoolArray  # another tenant is so far ahead that no request may pass its requests


class Tenants:
    """The tenants of an engine of the given sizes, by number; `is_fair` orders them by shares."""

    def __init__(self, sizes: EngineSizes, *, is_fair: bool) -> None:
        self.is_fair = is_fair
        most_tokens = sizes.dp_size * (sizes.pool_pages[0] - 1) * sizes.page_size
        self._quantum = max(PROMPT_WEIGHT * most_tokens // _QUANTUM_PART, 1)
        # Half of the paper's bound: running requests may be served the other half.
        largest = PROMPT_WEIGHT * sizes.max_request_tokens
        self._max_lag = self._quantum + max(largest, OUTPUT_WEIGHT * most_tokens)
        self._numbers = {"": NO_TENANT}
        self._names = [""] * (MAX_TENANTS + 1)
        # Tenants without a request: a heap of the tokens served when they were listed, and their
        # numbers. Each is listed once at most, and may have requests again.
        self._idle: list[tuple[float, int]] = []
        self._is_idle_listed = [False] * (MAX_TENANTS + 1)
        self._free = list(range(MAX_TENANTS, 0, -1))
        size = MAX_TENANTS + 1
        self._served: _Float64Array = np.zeros(size)
        self._weight: _Float64Array = np.ones(size)
        self._max_running = np.zeros(size, np.int32)
        self.limits_running = False  # whether any tenant had a limit of running requests
        self._num_requests = np.zeros(size, np.int32)
        self._num_present = 0  # tenants with requests
        self.is_shared = False  # whether shares count and several tenants have requests
        self._num_queued = np.zeros(size, np.int32)
        self._tokens = np.zeros((3, size), np.int64)  # of prompts, cached, generated

    # -- requests come and go -----------------------------------------------------------------

    def may_queue(self, tenant: Tenant | None) -> bool:
        if tenant is None or not tenant.max_queued:
            return True
        number = self._numbers.get(tenant.name)
        return number is None or int(self._num_queued[number]) < tenant.max_queued

    def enter(self, tenant: Tenant | None) -> int:
        """Add a request of a tenant and return the tenant's number; `leave` removes the request."""
        number = NO_TENANT if tenant is None else self._number(tenant.name)
        if tenant is not None and number != NO_TENANT:
            self._weight[number], self._max_running[number] = tenant.weight, tenant.max_running
            self.limits_running |= tenant.max_running > 0
        if not self._num_queued[number]:
            self._served[number] = max(self._served[number], self._lowest())
        if not self._num_requests[number]:
            self._count_present(1)
        self._num_requests[number] += 1
        return number

    def _count_present(self, change: int) -> None:
        self._num_present += change
        self.is_shared = self.is_fair and self._num_present > 1

    def _lowest(self) -> float:
        """Return the counter of a tenant that returns to the queue: the lowest of the waiting
        tenants, else of the running ones, else the highest of all."""
        for present in (self._num_queued > 0, self._num_requests > 0):
            if present.any():
                return float(self._served[present].min())
        return float(self._served.max())

    def leave(self, number: int) -> None:
        self._num_requests[number] -= 1
        if self._num_requests[number]:
            return
        self._count_present(-1)
        if number and not self._is_idle_listed[number]:
            self._is_idle_listed[number] = True
            heappush(self._idle, (float(self._served[number]), number))

    def queue(self, number: int, change: int) -> None:
        """Change the number of the tenant's queued requests by `change`."""
        self._num_queued[number] += change

    def _number(self, name: str) -> int:
        """Return the tenant's number; `NO_TENANT` if none is free and all tenants have requests."""
        number = self._numbers.get(name)
        if number is not None:
            return number
        if not self._free:
            least = self._take_idle()
            if least is None:
                return NO_TENANT
            del self._numbers[self._names[least]]
            self._free.append(least)
        number = self._numbers[name] = self._free.pop()
        self._names[number] = name
        self._served[number] = 0.0
        self._tokens[:, number] = 0
        return number

    def _take_idle(self) -> int | None:
        """Unlist and return the least served tenant without a request; None if there is none."""
        while self._idle:
            served, number = self._idle[0]
            now = float(self._served[number])
            if now > served and not self._num_requests[number]:
                heapreplace(self._idle, (now, number))  # it was served after it was listed
                continue
            heappop(self._idle)
            self._is_idle_listed[number] = False
            if not self._num_requests[number]:
                return number
        return None

    # -- served tokens ------------------------------------------------------------------------

    def serve_prompt(self, number: int, num_tokens: int, num_cached: int) -> None:
        """Count a prompt that starts, except its cached tokens."""
        self._tokens[0, number] += num_tokens
        self._tokens[1, number] += num_cached
        cost = PROMPT_WEIGHT * (num_tokens - num_cached)
        self._served[number] += cost / self._weight[number]

    def serve_outputs(
        self, numbers: Int32Array, rows: RowIndex, counts: Int32Array, num_tokens: int
    ) -> None:
        """Count `counts` tokens, int32[len(rows)], together `num_tokens`, gained by requests in
        `rows`; `numbers` holds the tenants by row."""
        if len(self._numbers) == 1:
            self._tokens[2, NO_TENANT] += num_tokens
            return
        gained = np.bincount(numbers[rows], counts, len(self._served))
        self._tokens[2] += gained.astype(np.int64)
        self._served += OUTPUT_WEIGHT * gained / self._weight

    # -- turns --------------------------------------------------------------------------------

    def may_run(self, number: int) -> bool:
        most = int(self._max_running[number])
        return not most or int(self._num_requests[number] - self._num_queued[number]) < most

    @property
    def num_numbers(self) -> int:
        """Return the number above the greatest that any tenant ever had."""
        return MAX_TENANTS + 1 - len(self._free)

    def step_weights(self) -> _Float64Array | None:
        """Return the weights by which tenants share the prompt tokens of a step, by number; None if
        shares do not count, or there is only one tenant."""
        return self._weight if self.is_fair and len(self._numbers) > 1 else None

    @property
    def is_full(self) -> BoolArray:
        """Return, by number, whether the tenant's running requests are at its limit."""
        running = self._num_requests - self._num_queued
        is_full: BoolArray = (self._max_running > 0) & (running >= self._max_running)
        return is_full

    def turns(self) -> Turns | None:
        """Return the turns; None if shares do not count, or only one tenant waits."""
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
        # In weighted tokens of the tenant.
        lag = (self._served[present].max() - self._served) * self._weight
        is_lagging = (self._num_queued > 0) & (lag > self._max_lag)
        return Turns(level, order, is_lagging)

    def counts(self) -> dict[str, TenantCounts]:
        """Return counts by name; requests without a tenant are under the empty name."""
        numbers = list(self._numbers.values())
        queued, requests = self._num_queued[numbers], self._num_requests[numbers]
        columns = (queued, requests - queued, *self._tokens[:, numbers])
        lines = zip(*(column.tolist() for column in columns), strict=True)
        return dict(zip(self._numbers, starmap(TenantCounts, lines), strict=True))

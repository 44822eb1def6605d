"""One run of a fleet: traffic through a routing policy to engines, interval by interval.

The clock is logical. The figures depend only on the inputs, not on the number of processes.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.bench.fleet.engine import ServedRequest
from sgl_jax.bench.fleet.policies import POLICIES, RouterView
from sgl_jax.bench.fleet.traffic import Traffic
from sgl_jax.bench.fleet.workers import EngineTotals, FleetShape, Interval, Report, Workers

# First and last tokens and KV events reach the router after one to two intervals.
INTERVAL_S = 0.05


class FleetRun(NamedTuple):
    """The figures of one run: an entry for each request, in order of arrival; seconds."""

    arrivals_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]  # after the arrival; NaN if refused
    end_s: NDArray[np.float64]  # after the arrival
    engines: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    is_refused: NDArray[np.bool_]
    totals: list[EngineTotals]

    @property
    def duration_s(self) -> float:
        """Return the time from the first arrival to the last token."""
        return float((self.arrivals_s + self.end_s).max())

    @property
    def busy(self) -> NDArray[np.float64]:
        """Return each engine's busy share of the duration, float64[engines]."""
        return np.array([total.busy_s for total in self.totals]) / self.duration_s


class FleetRouter:
    """Sends requests by a policy, and passes the engines' reports to it."""

    def __init__(self, policy_name: str, shape: FleetShape) -> None:
        self.view = RouterView(shape.num_engines)
        self.policy = POLICIES[policy_name](self.view, shape.sizes.page_size)
        self.served: list[ServedRequest] = []

    def route(self, traffic: Traffic, begin: int, end: int, end_s: float) -> Interval:
        """Return the interval until `end_s` with the requests [begin, end)."""
        engines = []
        for number in range(begin, end):
            request = traffic.request(number)
            engine, num_cached = self.policy.choose(request)
            self.view.record_sent(number, engine, request.traced.input_len - num_cached)
            engines.append(engine)
        return Interval(end_s, list(range(begin, end)), engines)

    def take(self, report: Report) -> None:
        for number in report.began:
            self.view.record_first_token(number)
        for served in report.served:
            self.view.record_end(served.number)
        self.served.extend(report.served)
        for event in report.events:
            change = self.policy.stored if event.is_stored else self.policy.removed
            change(event.engine, event.page_hashes)


def run_fleet(policy_name: str, shape: FleetShape, num_processes: int) -> FleetRun:
    """Serve all traffic by the policy of that name in `POLICIES`. Raises RuntimeError if a process
    ends or an answer is short, or the error of an engine."""
    traffic = Traffic(shape.trace, shape.copies, shape.speedup)
    router = FleetRouter(policy_name, shape)
    workers = Workers(shape, router.policy.reads_events, num_processes)
    try:
        num_sent, num_intervals, num_unread = 0, 0, 0
        while len(router.served) < len(traffic):
            num_intervals += 1
            end_s = num_intervals * INTERVAL_S
            end = int(np.searchsorted(traffic.arrivals_s, end_s))
            workers.send(router.route(traffic, num_sent, end, end_s))
            num_sent, num_unread = end, num_unread + 1
            if num_unread > 1:
                router.take(workers.receive())
                num_unread -= 1
        for _ in range(num_unread):
            router.take(workers.receive())
        return _figures(traffic, router.served, workers.totals())
    finally:
        workers.close()


def _figures(traffic: Traffic, served: list[ServedRequest], totals: list[EngineTotals]) -> FleetRun:
    # Each field is an array over the requests.
    columns: Any = ServedRequest._make(map(np.array, zip(*sorted(served), strict=True)))
    is_refused = columns.is_refused
    wanted = traffic.output_lens
    if (wrong := ~is_refused & (columns.output_tokens != wanted)).any():
        first = int(wrong.argmax())
        raise RuntimeError(
            f"request {first} got {columns.output_tokens[first]} tokens of {wanted[first]}"
        )
    return FleetRun(
        arrivals_s=traffic.arrivals_s,
        first_token_s=np.where(is_refused, np.nan, columns.first_token_s - traffic.arrivals_s),
        end_s=columns.end_s - traffic.arrivals_s,
        engines=columns.engine,
        prompt_tokens=traffic.input_lens,
        cached_tokens=columns.cached_tokens,
        output_tokens=columns.output_tokens,
        is_refused=is_refused,
        totals=totals,
    )

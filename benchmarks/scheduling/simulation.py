"""A load through a scheduler on a logical clock.

Steps overlap as in the engine: step N + 1 is planned and launched before the result of N is read.
The time of the host is not modelled.
"""

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.scheduling.traffic import Client, Load, LoadRequest
from sgl_jax.bench.trace.step_time import LinearStepTime, RankLoad

# Of an 8B model on eight v6e chips: see `sgl_jax/bench/trace/simulated_engine.py`.
STEP_TIME = LinearStepTime(3.6, 12.0, 10.0, 10.0)
_SAMPLE_INTERVAL = 8  # steps between two looks at the pages


class Step(Protocol):
    """A planned step: the load of each rank, and the numbers of the requests that start in it."""

    @property
    def loads(self) -> list[RankLoad]: ...
    @property
    def started(self) -> list[int]: ...


Float64Array = NDArray[np.float64]
S = TypeVar("S", bound=Step)


class Output(NamedTuple):
    """Tokens that a request gained by a step."""

    number: int
    num_tokens: int
    is_end: bool


class Engine(ABC, Generic[S]):
    """A scheduler under test; requests are known by their numbers."""

    @abstractmethod
    def submit(self, number: int, request: LoadRequest) -> None:
        """Queue a request."""

    @abstractmethod
    def abort(self, number: int) -> None:
        """End a running or waiting request."""

    @abstractmethod
    def plan(self, now_s: float) -> S | None:
        """Plan a step; None if there is nothing to compute."""

    def launch(self, step: S, begin_s: float) -> None:
        """Run a planned step."""

    @abstractmethod
    def read(self, step: S, end_s: float) -> list[Output]:
        """Apply the result of a step, and return what its requests gained."""

    @property
    @abstractmethod
    def utilization(self) -> float:
        """Return the share of pages that running requests hold."""

    @abstractmethod
    def counts(self) -> dict[str, Any]:
        """Return the fields of `Result` that the simulation cannot see."""

    @property
    def next_end_s(self) -> float | None:
        """Return the time at which the next transfer ends; a step may be planned then."""
        return None


@dataclass
class RequestTimes:
    """One request: seconds of the clock, NaN until known."""

    request: LoadRequest
    client: Client
    arrival_s: float
    start_s: float = float("nan")
    first_token_s: float = float("nan")
    num_output: int = 0
    has_ended: bool = False


@dataclass
class GroupResult:
    """Times of the requests of one group, in milliseconds.

    If the run ends before a request starts or has a token, its time until then counts.
    """

    count: int
    mean_wait_ms: float
    p99_wait_ms: float
    mean_first_token_ms: float


@dataclass
class Result:
    """The figures of one run. `tokens_per_s` counts prompts, once they have a token, and output."""

    seconds: float
    steps: int
    requests: int  # ended requests, aborted requests included
    output_tokens: int
    tokens_per_s: float
    output_per_s: float
    mean_wait_ms: float
    utilization: float
    retracts: int
    recomputed: int  # tokens, after retracts
    preemptions: int = 0
    # Of waiting requests that the check saw, in steps, and of those that could have started, by the
    # scheduler's reason; only of ours.
    waiting_seen: int = 0
    could_start: dict[str, int] = field(default_factory=dict)
    groups: dict[str, GroupResult] = field(default_factory=dict)


class Simulation(Generic[S]):
    """One run; `requests` are in order of arrival."""

    def __init__(self, load: Load, engine: Engine[S]) -> None:
        self._engine = engine
        self._seconds = load.seconds
        self.requests: list[RequestTimes] = []
        self._arrivals: list[tuple[float, int, Client]] = []  # a heap
        for number, client in enumerate(load.clients()):
            heapq.heappush(self._arrivals, (client.start_s, number, client))
        self._num_pushed = len(self._arrivals)
        self._in_flight: deque[tuple[S, float]] = deque()  # with the time of its end
        self._now_s = self._free_s = 0.0
        self._steps = self._num_live = 0
        self._utilization: list[float] = []

    def run(self) -> Result:
        """Serve until the end of the load."""
        while self._now_s < self._seconds and (self._arrivals or self._num_live):
            self._submit_due()
            self._turn()
        return self._result()

    def _submit_due(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now_s:
            arrival_s, _, client = heapq.heappop(self._arrivals)
            request = next(client.requests, None)
            if request is not None:
                self._engine.submit(len(self.requests), request)
                self._num_live += 1
                self.requests.append(RequestTimes(request, client, arrival_s))

    def _turn(self) -> None:
        """Plan and launch a step; read the oldest if two are in flight or none was planned."""
        engine = self._engine
        step = engine.plan(self._now_s)
        if step is not None:
            self._launch(step)
        if self._in_flight and (step is None or len(self._in_flight) > 1):
            oldest, end_s = self._in_flight.popleft()
            self._now_s = max(self._now_s, end_s)
            for output in engine.read(oldest, end_s):
                self._log(*output)
        elif step is None:
            self._wait()

    def _launch(self, step: S) -> None:
        begin_s = max(self._now_s, self._free_s)
        self._free_s = begin_s + STEP_TIME.seconds(step.loads)
        self._engine.launch(step, begin_s)
        self._in_flight.append((step, self._free_s))
        for number in step.started:
            if np.isnan(self.requests[number].start_s):
                self.requests[number].start_s = begin_s
        if self._steps % _SAMPLE_INTERVAL == 0:
            self._utilization.append(self._engine.utilization)
        self._steps += 1

    def _wait(self) -> None:
        """Advance the clock to the next arrival or end of a transfer."""
        times = [self._engine.next_end_s, self._arrivals[0][0] if self._arrivals else None]
        known = [each for each in times if each is not None]
        if known:
            self._now_s = min(max(self._now_s, min(known)), self._seconds)
        elif self._num_live:
            raise RuntimeError("requests wait, and no step can be planned")

    def _log(self, number: int, num_tokens: int, is_end: bool) -> None:
        times = self.requests[number]
        if num_tokens and not times.num_output:
            times.first_token_s = self._now_s
        times.num_output += num_tokens
        most = times.request.abort_after
        if most and times.num_output >= most and not is_end and not times.has_ended:
            self._engine.abort(number)
            is_end = True
        if is_end:
            times.has_ended = True
            self._num_live -= 1
            self._num_pushed += 1
            next_s = self._now_s + times.client.think_s
            heapq.heappush(self._arrivals, (next_s, self._num_pushed, times.client))

    # -- results ------------------------------------------------------------------------------

    def _result(self) -> Result:
        times, seconds = self.requests, max(self._now_s, 1e-9)
        output = sum(each.num_output for each in times)
        prompts = sum(len(each.request.prompt) for each in times if each.num_output)
        by_group: dict[str, list[RequestTimes]] = {}
        for each in times:
            by_group.setdefault(each.request.group, []).append(each)
        return Result(
            seconds=seconds,
            steps=self._steps,
            requests=sum(each.has_ended for each in times),
            output_tokens=output,
            tokens_per_s=(prompts + output) / seconds,
            output_per_s=output / seconds,
            mean_wait_ms=float(self._since_arrival(times, "start_s").mean()),
            utilization=float(np.mean(self._utilization)),
            **self._engine.counts(),
            groups={name: self._group(own) for name, own in sorted(by_group.items())},
        )

    def _group(self, times: Sequence[RequestTimes]) -> GroupResult:
        waits = self._since_arrival(times, "start_s")
        return GroupResult(
            count=len(times),
            mean_wait_ms=float(waits.mean()),
            p99_wait_ms=float(np.percentile(waits, 99)),
            mean_first_token_ms=float(self._since_arrival(times, "first_token_s").mean()),
        )

    def _since_arrival(self, times: Sequence[RequestTimes], name: str) -> Float64Array:
        ends = np.array([getattr(each, name) for each in times])
        ends = np.where(np.isnan(ends), self._now_s, ends)
        since: Float64Array = 1e3 * (ends - np.array([each.arrival_s for each in times]))
        return since

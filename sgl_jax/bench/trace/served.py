"""Recorded traffic through the real scheduler and memory, on a logical clock.

Requests arrive at their recorded times and generate their recorded number of tokens. In a closed
loop, an agent's next request arrives its recorded pause after the end of the answer. Steps overlap
as in the engine: step N + 1 is planned and launched before the result of N is read. Host time is
measured but does not advance the clock, so a run is a function of its inputs.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from sgl_jax.bench.trace.fake_executor import DistinctAnswers
from sgl_jax.bench.trace.host_link import HostLink
from sgl_jax.bench.trace.load_or_compute import LoadChoices
from sgl_jax.bench.trace.reading import TracedRequest, prompt_tokens, reuse_of
from sgl_jax.bench.trace.step_time import StepSeconds, step_loads
from sgl_jax.bench.trace.turns import previous_turns
from sgl_jax.core.engine_messages import OutputBatch
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import StepHandle, StepPlan
from sgl_jax.core.transfers import Transfers
from sgl_jax.engine.loop.offload_transfers import PrefillMeter
from sgl_jax.scheduler.events import (
    PlanStep,
    PrefillRate,
    ResultRead,
    TakeOutputs,
    TakeTransfers,
    Tick,
    TransferEnded,
)
from sgl_jax.scheduler.scheduler import Scheduler

T = TypeVar("T")

_SAMPLE_INTERVAL_S = 1.0  # of the clock


class Sample(NamedTuple):
    """The state at one moment; page counts are summed over ranks."""

    time_s: float
    num_running: int
    num_waiting: int
    free_pages: int
    leased_pages: int
    cached_pages: int
    locked_pages: int  # cached pages in use by running requests
    prompt_tokens: int  # total of the requests admitted so far
    cached_tokens: int


@dataclass
class RequestLog:
    """The history of one request; times in seconds of the clock, NaN until known. In a closed loop,
    the arrival is known once the agent's last answer has ended."""

    arrival_s: float
    start_s: float = float("nan")  # start of the first step
    first_token_s: float = float("nan")
    end_s: float = float("nan")
    output_len: int = 0
    cached_tokens: int = 0
    refusal: str | None = None


@dataclass
class ServedRun:
    """Results of a run. `host_s` is CPU time of plan, result and outputs for each step."""

    requests: list[RequestLog]
    samples: list[Sample] = field(default_factory=list)
    # `LoadChoices.totals` about host memory and about the store, if present.
    fetch_choices: dict[str, float] = field(default_factory=dict)
    load_choices: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    host_s: list[float] = field(default_factory=list)
    arrivals_host_s: float = 0.0  # total CPU time of arrivals
    duration_s: float = 0.0  # clock time from the first arrival to the last token
    busy_s: float = 0.0  # clock time with a step on the device


class _Replay:
    """The engine's loop on a logical clock."""

    def __init__(
        self,
        trace: Sequence[TracedRequest],
        sizes: EngineSizes,
        args: SchedulerArgs,
        step_seconds: StepSeconds,
        speedup: float,
        link: HostLink | None,
        closed_s: float | None,
    ) -> None:
        self._trace = trace
        self._speedup = speedup
        self._closed_s = closed_s
        self._link = link
        self._meter = PrefillMeter()
        self._scheduler = Scheduler(sizes, args)
        self._executor = DistinctAnswers(sizes)
        self._step_seconds = step_seconds
        # Plan, handle and end time of each launched step.
        self._in_flight: deque[tuple[StepPlan, StepHandle, float]] = deque()
        first_ms = trace[0].arrival_ms
        logs = [RequestLog((r.arrival_ms - first_ms) * 1e-3 / speedup) for r in trace]
        self._run = ServedRun(logs)
        self._next_turns: dict[int, int] = {}
        if closed_s is not None:
            before = previous_turns(trace)
            self._next_turns = {i: n for n, i in enumerate(before) if i is not None}
            for index, log in enumerate(logs):
                if before[index] is not None or log.arrival_s >= closed_s:
                    log.arrival_s = float("nan")
        # Known arrivals to come: time and index.
        self._due = [
            (log.arrival_s, i) for i, log in enumerate(logs) if not np.isnan(log.arrival_s)
        ]
        heapq.heapify(self._due)
        self._now_s = 0.0
        self._device_free_s = 0.0
        self._step_host_s = 0.0
        self._choices: LoadChoices | None = None
        if link is not None:
            self._choices = LoadChoices(link, sizes, step_seconds, lambda: self._now_s)
            for rank in self._scheduler.ranks:
                self._choices.watch(rank)

    def run(self) -> ServedRun:
        while self._due or not self._scheduler.is_idle:
            self._submit_due()
            self._turn()
            self._sample()
        run = self._run
        self._scheduler.audit()
        self._check_answers()
        run.counters = self._scheduler.counters()
        run.duration_s = self._now_s
        if self._choices is not None:
            run.fetch_choices = self._choices.totals(from_store=False)
            run.load_choices = self._choices.totals(from_store=True)
        return run

    # -- arrivals ---------------------------------------------------------------------------

    def _submit_due(self) -> None:
        if self._scheduler.needs_tick(self._now_s):
            self._timed(self._scheduler.handle, Tick(self._now_s))
        while self._due and self._due[0][0] <= self._now_s:
            _, index = heapq.heappop(self._due)
            request = self._trace[index]
            message = GenerateRequest(
                rid=str(index),
                input_ids=prompt_tokens(request).tolist(),
                sampling=SamplingParams(max_new_tokens=request.output_len, ignore_eos=True),
                reuse=reuse_of(request),
            )
            start = time.thread_time()
            self._scheduler.handle(message)
            self._run.arrivals_host_s += time.thread_time() - start

    # -- steps ------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Plan and launch one step; read the oldest if two are in flight or none was planned."""
        if self._link is not None:
            self._transfer(self._link)
        plan = self._timed(self._scheduler.handle, PlanStep())
        if plan is not None:
            self._launch(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > 1):
            self._read_oldest()
        elif plan is None and not self._scheduler.offload.has_transfers:
            self._wait_for_arrival()
        batch = self._timed(self._scheduler.handle, TakeOutputs())
        if batch is not None:
            self._log_outputs(batch)
        if plan is not None:
            self._run.host_s.append(self._step_host_s)
            self._step_host_s = 0.0

    def _transfer(self, link: HostLink) -> None:
        for end in link.ended(self._now_s):
            self._timed(self._scheduler.handle, TransferEnded(end))
        if self._scheduler.offload.has_transfers:
            link.begin(self._timed(self._scheduler.handle, TakeTransfers()), self._now_s)

    def _timed(self, call: Callable[..., T], *values: Any) -> T:
        """Call, and add the CPU time to the step's."""
        start = time.thread_time()
        answer = call(*values)
        self._step_host_s += time.thread_time() - start
        return answer

    def _launch(self, plan: StepPlan) -> None:
        begin_s = max(self._now_s, self._device_free_s)
        seconds = self._step_seconds(step_loads(plan))
        self._device_free_s = begin_s + seconds
        self._run.busy_s += seconds
        if self._link is not None:
            self._link.begin(Transfers(copies=tuple(plan.saved)), begin_s)
            self._meter.launched(plan, begin_s)
        self._in_flight.append((plan, self._executor.launch(plan), self._device_free_s))
        for rank, rank_plan in zip(self._scheduler.ranks, plan.ranks, strict=True):
            for admission in rank_plan.admissions:
                log = self._run.requests[int(rank.columns.rids[admission.row])]
                if np.isnan(log.start_s):  # else restarted after a retract
                    log.start_s = begin_s

    def _read_oldest(self) -> None:
        plan, handle, end_s = self._in_flight.popleft()
        self._now_s = max(self._now_s, end_s)
        rate = None if self._link is None else self._meter.ended(plan, end_s)
        if rate is not None:
            self._scheduler.handle(PrefillRate(rate))
        self._timed(self._scheduler.handle, ResultRead(plan.step_id, self._executor.result(handle)))

    def _wait_for_arrival(self) -> None:
        """Advance the clock to the next arrival, or the next end of a transfer."""
        next_s = [] if self._link is None else [self._link.next_end_s]
        if self._due:
            next_s.append(self._due[0][0])
        times = [each for each in next_s if each is not None]
        if times:
            self._now_s = max(self._now_s, min(times))
        elif not self._scheduler.is_idle:
            raise RuntimeError(
                f"{self._scheduler.num_waiting} requests wait, and no step can be planned"
            )

    def _log_outputs(self, batch: OutputBatch) -> None:
        logs = self._run.requests
        for rid in batch.rids:
            logs[int(rid)].output_len += 1
        for output in batch.outputs:
            log = logs[int(output.rid)]
            if output.token_ids and not log.output_len:
                log.first_token_s = self._now_s
            log.output_len += len(output.token_ids)
            log.cached_tokens = output.cached_tokens
            if output.finish is not None:
                log.end_s = self._now_s
                self._begin_pause(int(output.rid))
                if output.finish.type == "abort":
                    log.refusal = output.finish.message or "aborted"

    def _begin_pause(self, index: int) -> None:
        """Set the arrival of the agent's next turn, unless that is after the end of the loop."""
        following = self._next_turns.get(index)
        if following is None or self._closed_s is None:
            return
        arrival_s = self._now_s + self._trace[following].think_s / self._speedup
        if arrival_s < self._closed_s:
            self._run.requests[following].arrival_s = arrival_s
            heapq.heappush(self._due, (arrival_s, following))

    # -- results ----------------------------------------------------------------------------

    def _sample(self) -> None:
        samples = self._run.samples
        if samples and self._now_s < samples[-1].time_s + _SAMPLE_INTERVAL_S:
            return
        scheduler = self._scheduler
        views, counters = scheduler.memory_views(), scheduler.counters()
        samples.append(
            Sample(
                time_s=self._now_s,
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                free_pages=sum(view.free_pages for view in views),
                leased_pages=sum(view.leased_pages for view in views),
                cached_pages=sum(view.cached_pages for view in views),
                locked_pages=sum(view.protected_pages for view in views),
                prompt_tokens=counters["prompt_tokens"],
                cached_tokens=counters["cached_tokens"],
            )
        )

    def _check_answers(self) -> None:
        """Raise RuntimeError unless each request that was not refused got all its tokens."""
        for index, (request, log) in enumerate(zip(self._trace, self._run.requests, strict=True)):
            if np.isnan(log.arrival_s):
                continue  # the loop ended before it
            if log.refusal is None and log.output_len != request.output_len:
                raise RuntimeError(
                    f"request {index} got {log.output_len} tokens of {request.output_len}"
                )


def serve_trace(
    trace: Sequence[TracedRequest],
    sizes: EngineSizes,
    args: SchedulerArgs,
    step_seconds: StepSeconds,
    *,
    speedup: float = 1.0,
    link: HostLink | None = None,
    closed_s: float | None = None,
) -> ServedRun:
    """Serve `trace` with an engine of the given sizes.

    Args:
        trace: at least one request, in order of arrival.
        sizes: the engine's sizes; the vocabulary has at least `reading.VOCAB_SIZE` tokens.
        args: the scheduler's settings; `check_memory` "busy" checks the ledger after each step.
        step_seconds: the duration of each step.
        speedup: factor by which arrivals are faster than recorded.
        link: link to host memory, if `sizes` has host blocks.
        closed_s: if set, run a closed loop: an agent's request arrives its recorded pause after the
            last answer, its first as recorded, and none arrives after `closed_s` seconds.

    Raises `MemoryDefectError` if the memory does not match its ledger; a full audit follows the
    last request.
    """
    return _Replay(trace, sizes, args, step_seconds, speedup, link, closed_s).run()

"""Processes that each run a part of a fleet's engines, one interval of the clock at a time.

The engines of a fleet share only the router, so a process can run its engines through an interval
once it has the requests that arrive within. The router sends the next interval's requests before it
reads the reports on the current one: all processes are busy, and reports reach the router one to
two intervals late, as over a network.
"""

import gc
import multiprocessing
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import NamedTuple

import numpy as np

from sgl_jax.bench.fleet.engine import FleetEngine, ServedRequest
from sgl_jax.bench.fleet.traffic import Traffic
from sgl_jax.bench.trace.reading import TracedRequest
from sgl_jax.bench.trace.step_time import StepSeconds
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.mem_cache.tree.block_log import BlocksRemoved, BlocksStored

# Requests live for minutes: frequent garbage collections would find nothing.
_GC_THRESHOLD = 500_000


class FleetShape(NamedTuple):
    """Everything a process needs to build its engines; `sizes` come from `fleet_sizes`."""

    num_engines: int
    sizes: EngineSizes
    args: SchedulerArgs
    step_seconds: StepSeconds
    trace: Sequence[TracedRequest]
    copies: int
    speedup: float


class Interval(NamedTuple):
    """One interval of the clock: its end, and its requests in order of arrival."""

    end_s: float
    numbers: list[int]
    engines: list[int]


class PageEvents(NamedTuple):
    """Pages that entered or left the cache of one engine."""

    engine: int
    is_stored: bool
    page_hashes: list[int]


class Report(NamedTuple):
    """The engines' work in one interval."""

    began: list[int]  # requests that got their first token
    served: list[ServedRequest]
    events: list[PageEvents]


class EngineTotals(NamedTuple):
    """One engine's work in the whole run."""

    engine: int
    num_steps: int
    num_plans: int
    busy_s: float
    cached_pages: int  # at the end


class EngineGroup:
    """The engines of one process: `first`, `first + stride`, and so on."""

    def __init__(self, shape: FleetShape, logs_blocks: bool, first: int, stride: int) -> None:
        self._traffic = Traffic(shape.trace, shape.copies, shape.speedup)
        self._logs_blocks = logs_blocks
        self._engines = {
            index: FleetEngine(
                index, shape.sizes, shape.args, shape.step_seconds, logs_blocks=logs_blocks
            )
            for index in range(first, shape.num_engines, stride)
        }
        self._ends_s = np.full(shape.num_engines, np.inf)  # of the step of each engine

    def run(self, interval: Interval) -> Report:
        for number, index in zip(interval.numbers, interval.engines, strict=True):
            self._engines[index].submit(self._traffic.request(number))
        report = Report([], [], [])
        ended = np.flatnonzero(self._ends_s <= interval.end_s).tolist()
        for index in sorted({*interval.engines, *ended}):
            engine = self._engines[index]
            engine.run_until(interval.end_s)
            self._ends_s[index] = engine.next_end_s
            report.began.extend(engine.take_began())
            report.served.extend(engine.take_served())
            if self._logs_blocks:
                report.events.extend(self._events(index, engine))
        return report

    def totals(self) -> list[EngineTotals]:
        """Audit the memory of all engines, and return the work of each. Raises `MemoryDefectError`
        if an engine's memory does not match its ledger."""
        for engine in self._engines.values():
            engine.audit()
        return [
            EngineTotals(
                index, engine.num_steps, engine.num_plans, engine.busy_s, engine.cached_pages
            )
            for index, engine in self._engines.items()
        ]

    def _events(self, index: int, engine: FleetEngine) -> list[PageEvents]:
        events = []
        for event in engine.take_block_events():
            assert isinstance(event, BlocksStored | BlocksRemoved)  # caches are never cleared
            is_stored = isinstance(event, BlocksStored)
            events.append(PageEvents(index, is_stored, event.hashes.tolist()))
        return events


_groups: list[EngineGroup] = []  # of this process, set by `_start`


def _start(shape: FleetShape, logs_blocks: bool, first: int, stride: int) -> None:
    _groups.append(EngineGroup(shape, logs_blocks, first, stride))
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def _run(interval: Interval) -> Report:
    return _groups[0].run(interval)


def _totals() -> list[EngineTotals]:
    return _groups[0].totals()


class Workers:
    """The processes of a fleet, an executor for each. Call `close` at the end."""

    def __init__(self, shape: FleetShape, logs_blocks: bool, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")  # numpy's threads do not survive a fork
        self._executors = [ProcessPoolExecutor(1, context) for _ in range(num_processes)]
        self._starts = [
            executor.submit(_start, shape, logs_blocks, first, num_processes)
            for first, executor in enumerate(self._executors)
        ]
        self._running: deque[list[Future[Report]]] = deque()  # by interval

    def send(self, interval: Interval) -> None:
        """Start an interval. Raises RuntimeError if a process ended."""
        count = len(self._executors)
        parts = [Interval(interval.end_s, [], []) for _ in range(count)]
        for number, engine in zip(interval.numbers, interval.engines, strict=True):
            parts[engine % count].numbers.append(number)
            parts[engine % count].engines.append(engine)
        pairs = zip(self._executors, parts, strict=True)
        self._running.append([executor.submit(_run, part) for executor, part in pairs])

    def receive(self) -> Report:
        """Return the work of all engines in the first interval not yet received. Raises
        RuntimeError if a process ended, or the error of an engine."""
        for start in self._starts:
            start.result()
        report = Report([], [], [])
        for part in self._running.popleft():
            began, served, events = part.result()
            report.began.extend(began)
            report.served.extend(served)
            report.events.extend(events)
        return report

    def totals(self) -> list[EngineTotals]:
        """Audit all engines; return the work of each in order. Raises RuntimeError if a process
        ended, `MemoryDefectError` if its memory does not match its ledger."""
        parts = [executor.submit(_totals) for executor in self._executors]
        return sorted(total for part in parts for total in part.result())

    def close(self) -> None:
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)

"""Host time of steps in which all rows decode."""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np

from benchmarks.host.timing import Timing, timed, timed_once
from sgl_jax.bench.trace.fake_executor import FakeExecutor
from sgl_jax.core.engine_messages import OutputBatch
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import Executor, StepHandle, StepPlan
from sgl_jax.engine.loop.memory_audit import BackgroundAudit
from sgl_jax.scheduler.events import PlanStep, ResultRead, TakeOutputs
from sgl_jax.scheduler.record.event_log import EventWriter
from sgl_jax.scheduler.record.recorder import RecordedScheduler
from sgl_jax.scheduler.scheduler import Scheduler

DP_SIZE = 8
ROWS_PER_RANK = 256
CONTEXT_LEN = 1000
VOCAB_SIZE = 32_000
_TIMER_S = 2e-5  # a call that does nothing takes less
SIZES = EngineSizes(
    dp_size=DP_SIZE,
    page_size=16,
    pool_pages=(40_000,),
    num_rows=ROWS_PER_RANK + 1,
    max_context_len=4000,
    max_step_tokens=2048 + ROWS_PER_RANK,
    max_prompt_logprob_tokens=1024,
    vocab_size=VOCAB_SIZE,
)


class StepLoop:
    """The engine's loop around `scheduler`, one step in flight; by default on a fake executor."""

    def __init__(self, scheduler: Scheduler, executor: Executor | None = None) -> None:
        self.scheduler = scheduler
        self.outputs: OutputBatch | None = None  # of the last turn
        self.executor = executor or FakeExecutor(scheduler.sizes)
        self._before: tuple[StepPlan, StepHandle] | None = None

    def turn(self) -> float:
        """Plan and launch a step, apply the result of the one before, take the outputs.

        Returns the scheduler's seconds; the executor's are left out.
        """
        scheduler, executor = self.scheduler, self.executor
        start = time.thread_time()
        plan = scheduler.handle(PlanStep())
        seconds = time.thread_time() - start
        launched = None if plan is None else (plan, executor.launch(plan))
        if self._before is not None:
            done, handle = self._before
            results = executor.result(handle)
            start = time.thread_time()
            scheduler.handle(ResultRead(done.step_id, results))
            seconds += time.thread_time() - start
        start = time.thread_time()
        self.outputs = scheduler.handle(TakeOutputs())
        self._before = launched
        return seconds + time.thread_time() - start


def decoding_loop(
    page_size: int,
    dp_size: int = DP_SIZE,
    make_executor: Callable[[EngineSizes], Executor] = FakeExecutor,
    max_context_len: int = 2 * CONTEXT_LEN,
    make_scheduler: Callable[[EngineSizes, SchedulerArgs], Scheduler] = Scheduler,
) -> StepLoop:
    """Return a loop in which every row of every rank decodes at about `CONTEXT_LEN` tokens."""
    tokens_per_row = 2 * CONTEXT_LEN
    sizes = SIZES._replace(
        dp_size=dp_size,
        page_size=page_size,
        pool_pages=(1 + ROWS_PER_RANK * tokens_per_row // page_size,),
        max_context_len=max_context_len,
        max_step_tokens=16_384 + ROWS_PER_RANK,
    )
    scheduler = make_scheduler(sizes, SchedulerArgs(schedule_policy="fcfs"))
    rng = np.random.default_rng(0)
    for i in range(dp_size * ROWS_PER_RANK):
        prompt = rng.integers(0, VOCAB_SIZE, CONTEXT_LEN - 100).tolist()
        sampling = SamplingParams(max_new_tokens=CONTEXT_LEN)
        scheduler.handle(GenerateRequest(rid=str(i), input_ids=prompt, sampling=sampling))
    loop = StepLoop(scheduler, make_executor(sizes))
    for _ in range(100):
        loop.turn()
    assert scheduler.num_running == dp_size * ROWS_PER_RANK, "the load does not fit the sizes"
    assert scheduler.num_waiting == 0
    return loop


def bench_steps(page_size: int, repeats: int) -> Iterator[Timing]:
    """Time a decode step, and the check and the audit of the memory after it."""
    loop = decoding_loop(page_size)
    scheduler = loop.scheduler
    load = f"{DP_SIZE} ranks x {ROWS_PER_RANK} rows, page {page_size}"
    num_tokens = DP_SIZE * ROWS_PER_RANK
    seconds = [loop.turn() for _ in range(repeats)]
    yield Timing(f"decode step, {load}", seconds, num_ops=num_tokens)
    yield timed(f"check_balance of all ranks, {load}", scheduler.check_balance, repeats=repeats)
    yield timed(f"audit of all ranks, {load}", scheduler.audit, repeats=5)


def busy_check_line(dp_size: int, page_size: int, repeats: int) -> str:
    """Return a line with the time that `--check-memory busy` adds to a decode step.

    Steps with and without the check alternate.
    """
    loop = decoding_loop(page_size, dp_size)
    bare: list[float] = []
    checked: list[float] = []
    for _ in range(repeats):
        bare.append(loop.turn())
        checked.append(loop.turn() + timed_once(loop.scheduler.check_balance))
    share = median(checked) / median(bare) - 1
    name = f"busy check share of a step, {dp_size} x {ROWS_PER_RANK} rows, page {page_size}"
    with_us, without_us = median(checked) * 1e6, median(bare) * 1e6
    return f"{name:<62} {share:>11.1%} ({with_us:,.1f} us, {without_us:,.1f} without)"


def recording_line(repeats: int) -> str:
    """Return a line with the time that `--record-events` adds to a decode step of one rank.

    Steps with and without it alternate.
    """
    bare = decoding_loop(16, 1)
    with tempfile.TemporaryFile() as file:
        writer = EventWriter(file)

        def recorded_scheduler(sizes: EngineSizes, args: SchedulerArgs) -> Scheduler:
            return RecordedScheduler(sizes, args, writer.write)

        recorded = decoding_loop(16, 1, make_scheduler=recorded_scheduler)
        num_bytes = file.tell()
        pairs = [(bare.turn(), recorded.turn()) for _ in range(repeats)]
        num_bytes = (file.tell() - num_bytes) // repeats
    without_us, with_us = (median(seconds) * 1e6 for seconds in zip(*pairs, strict=True))
    name = f"decode step, 1 x {ROWS_PER_RANK} rows, recorded"
    return f"{name:<62} {with_us:,.1f} us, {without_us:,.1f} without; {num_bytes:,} bytes a step"


def background_audit_line(dp_size: int, page_size: int, repeats: int) -> str:
    """Return a line with the time that the audit in slices adds to decode steps.

    Steps with and without it alternate. The audit's clock counts only the scheduler's time, as
    if the
    loop did nothing else.
    """
    loop = decoding_loop(page_size, dp_size)
    audit = BackgroundAudit(loop.scheduler.audit_slices, 0.0)
    bare: list[float] = []
    walked: list[float] = []
    slices: list[float] = []
    for _ in range(repeats):
        bare.append(loop.turn())
        walked.append(loop.turn())
        cost = timed_once(partial(audit.run_if_due, sum(walked) + sum(slices)))
        if cost > _TIMER_S:
            slices.append(cost)
    added, name = sum(slices), f"{dp_size} x {ROWS_PER_RANK} rows, page {page_size}"
    alone, between = 1 + added / sum(walked), (sum(walked) + added) / sum(bare)
    return (
        f"{f'steps with a walk in slices, {name}':<62} {alone:>11.4f} ({between:.4f} of the steps "
        f"between; {len(slices)} slices in {sum(walked):.2f} s, {max(slices) * 1e3:.2f} ms at most)"
    )

"""One engine of a fleet: the real scheduler and memory on a logical clock.

A pure decode step is the first of a *burst* of such steps: the scheduler plans the burst as one
step with drafts, all of which are accepted. A burst ends when the first of its requests may end,
after `BURST_STEPS` steps, or at the end of the step during which another request arrives. So each
request starts, and gets its first and last token, at the same time as if each step were planned;
one plan instead of up to 128 makes a thousand engines feasible. While memory is short, each step is
planned separately: a burst takes its pages at its start, which would change the decisions of
admission and retraction.
"""

from typing import Any, NamedTuple

import numpy as np

from sgl_jax.bench.fleet.traffic import FleetRequest
from sgl_jax.bench.trace.reading import prompt_tokens, reuse_of
from sgl_jax.bench.trace.step_time import StepSeconds, rank_load
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import RankPlan, RankResult, StepPlan
from sgl_jax.mem_cache.tree.block_log import BlockEvent
from sgl_jax.scheduler.draft_policy import start_drafting
from sgl_jax.scheduler.events import PlanStep, ResultRead, TakeOutputs
from sgl_jax.scheduler.scheduler import Scheduler

BURST_STEPS = 128  # maximum decode steps per plan


class ServedRequest(NamedTuple):
    """The end of one request; times in seconds of the clock."""

    number: int
    engine: int
    first_token_s: float
    end_s: float
    cached_tokens: int
    output_tokens: int
    is_refused: bool


class _Flight(NamedTuple):
    """The step on the device, or the burst of decode steps."""

    plan: StepPlan
    start_s: float
    step_s: float
    num_steps: int

    @property
    def end_s(self) -> float:
        return self.start_s + self.num_steps * self.step_s


def fleet_sizes(sizes: EngineSizes, burst_steps: int = BURST_STEPS) -> EngineSizes:
    """Return `sizes` for a scheduler that plans bursts of decode steps."""
    num_drafts = burst_steps - 1
    drafted = (sizes.num_rows - 1) * num_drafts
    return sizes._replace(
        max_draft_tokens=num_drafts,
        max_step_tokens=sizes.max_step_tokens + drafted,
        step_token_shapes=(),
    )


class FleetEngine:
    """An engine that takes requests in order of arrival, and runs up to any time.

    `sizes` come from `fleet_sizes`, with one rank. With `logs_blocks` it records KV events.
    """

    def __init__(
        self,
        index: int,
        sizes: EngineSizes,
        args: SchedulerArgs,
        step_seconds: StepSeconds,
        *,
        logs_blocks: bool,
    ) -> None:
        self._index = index
        self._sizes = sizes
        self._scheduler = Scheduler(sizes, args)
        self._step_seconds = step_seconds
        self._flight: _Flight | None = None
        self._first_token_s: dict[str, float] = {}  # by running request
        self._num_outputs: dict[str, int] = {}  # output tokens by unfinished request
        self._began: list[int] = []
        self._served: list[ServedRequest] = []
        self._all_rows = np.arange(sizes.num_rows)
        self._seeds = np.zeros(sizes.num_rows, np.int64)
        self._log = self._scheduler.ranks[0].memory.log_blocks() if logs_blocks else None
        self.num_steps = 0  # device steps; a burst counts all its steps
        self.num_plans = 0
        self.busy_s = 0.0

    @property
    def next_end_s(self) -> float:
        """Return the end of the step on the device; infinity if the device is idle."""
        return float("inf") if self._flight is None else self._flight.end_s

    def submit(self, request: FleetRequest) -> None:
        """Add a request that arrives no earlier than all previous requests."""
        now_s = request.arrival_s
        self.run_until(now_s)
        traced, rid = request.traced, str(request.number)
        self._num_outputs[rid] = 0
        # An array: building and reading a list would take longer than everything else.
        tokens: Any = prompt_tokens(traced)
        message = GenerateRequest(
            rid=rid,
            input_ids=tokens,
            sampling=SamplingParams(max_new_tokens=traced.output_len, ignore_eos=True),
            reuse=reuse_of(traced),
        )
        self._scheduler.handle(message)
        self._take_outputs(now_s)  # a refusal
        if self._flight is None:
            self._start(now_s)
        else:
            self._shorten(now_s)

    def run_until(self, now_s: float) -> None:
        """End the steps that are over by `now_s`, and start the following steps."""
        while self._flight is not None and self._flight.end_s <= now_s:
            flight, self._flight = self._flight, None
            self.busy_s += flight.end_s - flight.start_s
            self.num_steps += flight.num_steps
            result = self._result(flight.plan.ranks[0], flight.num_steps)
            self._scheduler.handle(ResultRead(flight.plan.step_id, (result,)))
            self._take_outputs(flight.end_s)
            self._start(flight.end_s)

    def take_began(self) -> list[int]:
        """Return the requests that got their first token since the last call."""
        began, self._began = self._began, []
        return began

    def take_served(self) -> list[ServedRequest]:
        """Return the requests that ended since the last call."""
        served, self._served = self._served, []
        return served

    def take_block_events(self) -> list[BlockEvent]:
        """Return the KV events since the last call."""
        assert self._log is not None
        return self._log.take()

    @property
    def cached_pages(self) -> int:
        """Return the number of pages in the prefix cache, including pages in use."""
        (view,) = self._scheduler.memory_views()
        return view.cached_pages

    def audit(self) -> None:
        """Raise `MemoryDefectError` if the memory does not match its ledger."""
        self._scheduler.audit()

    def _start(self, now_s: float) -> None:
        running = self._scheduler.ranks[0].columns
        if self._has_room_for_bursts():  # a burst cut short is not a reason to draft less
            start_drafting(running, self._all_rows, self._sizes.max_draft_tokens)
        else:
            running.draft_from_len[:] = self._sizes.max_context_len
        plan = self._scheduler.handle(PlanStep())
        if plan is None:
            self._take_outputs(now_s)
            if not self._scheduler.is_idle:
                raise RuntimeError(
                    f"{self._scheduler.num_waiting} requests wait, and no step can be planned"
                )
            return
        self.num_plans += 1
        (rank_plan,) = plan.ranks
        for admission in rank_plan.admissions:
            self._seeds[admission.row] = admission.seed
        is_burst = rank_plan.num_decode == len(rank_plan.rows)
        num_steps = int(rank_plan.q_lens.min()) if is_burst else 1
        self._flight = _Flight(plan, now_s, self._seconds(plan, num_steps), num_steps)

    def _has_room_for_bursts(self) -> bool:
        """Return True if memory is far from short, even with a burst's pages."""
        rank = self._scheduler.ranks[0]
        pages = len(rank.running) * self._sizes.pages_for(1 + self._sizes.max_draft_tokens)
        return rank.memory.num_available_pages - 2 * pages > self._sizes.pool_pages[0] // 8

    def _seconds(self, plan: StepPlan, num_steps: int) -> float:
        """Return the time per step of a burst, measured at its middle step, since KV grows."""
        (rank_plan,) = plan.ranks
        middle = rank_plan._replace(kv_starts=rank_plan.kv_starts + (num_steps - 1) // 2)
        return self._step_seconds([rank_load(middle)])

    def _shorten(self, now_s: float) -> None:
        """End a burst of decode steps with its step at `now_s`."""
        assert self._flight is not None
        steps = max(int(np.ceil((now_s - self._flight.start_s) / self._flight.step_s)), 1)
        if steps < self._flight.num_steps:
            self._flight = self._flight._replace(num_steps=steps)

    def _result(self, plan: RankPlan, num_steps: int) -> RankResult:
        """Return tokens that depend on position and seed: equal prompts get different outputs."""
        tokens = np.full((len(plan.rows), 1 + self._sizes.max_draft_tokens), -1, np.int32)
        ends = plan.kv_starts.astype(np.int64)
        ends[plan.num_decode :] += plan.q_lens[plan.num_decode :] - 1
        first = ends * 31 + self._seeds[plan.rows]
        made_up = np.add.outer(first, 31 * np.arange(num_steps)) % self._sizes.vocab_size
        tokens[:, :num_steps] = np.where(plan.samples[:, None], made_up, -1)
        return RankResult(tokens)

    def _take_outputs(self, now_s: float) -> None:
        batch = self._scheduler.handle(TakeOutputs())
        if batch is None:
            return
        for rid in batch.rids:
            self._num_outputs[rid] += 1
        for output in batch.outputs:
            rid = output.rid
            if output.token_ids:
                if rid not in self._first_token_s:
                    self._first_token_s[rid] = now_s
                    self._began.append(int(rid))
                self._num_outputs[rid] += len(output.token_ids)
            if output.finish is not None:
                self._served.append(
                    ServedRequest(
                        number=int(rid),
                        engine=self._index,
                        first_token_s=self._first_token_s.pop(rid, now_s),
                        end_s=now_s,
                        cached_tokens=output.cached_tokens,
                        output_tokens=self._num_outputs.pop(rid),
                        is_refused=output.finish.type == "abort",
                    )
                )

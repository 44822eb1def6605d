"""Our scheduler as an engine of `simulation.py`; a load determines its executor's outputs."""

from typing import Any

import numpy as np

from benchmarks.scheduling.simulation import Engine, Output
from benchmarks.scheduling.traffic import STOP_ID, LoadRequest, generated_tokens
from benchmarks.scheduling.worst_case import WorstCaseCheck
from sgl_jax.bench.trace.fake_executor import FakeExecutor
from sgl_jax.bench.trace.host_link import HostLink
from sgl_jax.bench.trace.step_time import RankLoad, step_loads
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import AbortRequest, GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.core.step_plan import RankPlan, RankResult, StepHandle, StepPlan
from sgl_jax.core.transfers import Transfers
from sgl_jax.engine.loop.offload_transfers import PrefillMeter
from sgl_jax.scheduler.events import (
    PlanStep,
    PrefillRate,
    ResultRead,
    TakeOutputs,
    TakeTransfers,
    TransferEnded,
)
from sgl_jax.scheduler.scheduler import Scheduler

_DRAFT_SHARE = 5  # right drafts of eight


class LoadExecutor(FakeExecutor):
    """Generates `generated_tokens` of each request, and a stop token at its end."""

    def __init__(self, sizes: EngineSizes) -> None:
        super().__init__(sizes)
        rows = (sizes.dp_size, sizes.num_rows)
        self._seeds = np.zeros(rows, np.int64)
        self._lens = np.zeros(rows, np.int64)  # tokens of each row on the device
        self._stop_lens = np.zeros(rows, np.int64)  # of each row with its stop token
        self._requests: dict[int, LoadRequest] = {}

    def add(self, request: LoadRequest) -> None:
        """Make the length of a request's output known."""
        self._requests[request.seed] = request

    def launch(self, plan: StepPlan) -> StepHandle:
        return tuple(self._run_rank(rank, rank_plan) for rank, rank_plan in enumerate(plan.ranks))

    def _run_rank(self, rank: int, plan: RankPlan) -> RankResult:
        seeds, lens, stop_lens = self._seeds[rank], self._lens[rank], self._stop_lens[rank]
        for admission in plan.admissions:
            row, request = admission.row, self._requests[admission.seed]
            seeds[row] = admission.seed
            lens[row] = admission.start + len(admission.tokens)
            stop_lens[row] = len(request.prompt) + request.output_len
        rows, n = plan.rows, plan.num_decode
        tokens = np.full((len(rows), 1 + self.sizes.max_draft_tokens), -1, np.int32)
        first = np.where(np.arange(len(rows)) < n, lens[rows], plan.kv_starts + plan.q_lens)
        positions = first[:, None] + np.arange(tokens.shape[1])
        made_up = generated_tokens(seeds[rows, None], positions)
        is_last = positions + 1 >= stop_lens[rows, None]
        num_drafts = np.where(np.arange(len(rows)) < n, plan.q_lens - 1, 0)
        # A draft is right or wrong by the token that it is compared with; none follows a wrong one.
        is_right = (made_up[:, :-1] % 8 < _DRAFT_SHARE) & ~is_last[:, :-1]
        is_right &= np.arange(tokens.shape[1] - 1) < num_drafts[:, None]
        is_kept = np.ones(tokens.shape, np.bool_)
        is_kept[:, 1:] = np.logical_and.accumulate(is_right, axis=1)
        is_kept &= plan.samples[:, None]
        tokens[is_kept] = np.where(is_last, STOP_ID, made_up)[is_kept]
        lens[rows] = np.where(plan.samples, first + is_kept.sum(axis=1), lens[rows])
        return RankResult(tokens)


class ServedStep:
    def __init__(self, plan: StepPlan, loads: list[RankLoad], started: list[int]) -> None:
        self.plan, self.loads, self.started = plan, loads, started
        self.handle: StepHandle = None


class ServedEngine(Engine[ServedStep]):
    """The real scheduler and memory of a rank group, a fake executor, and a link to the host."""

    def __init__(self, sizes: EngineSizes, args: SchedulerArgs, link: HostLink | None) -> None:
        self.scheduler = Scheduler(sizes, args)
        self.worst_case = WorstCaseCheck(self.scheduler)
        self._executor = LoadExecutor(sizes)
        self._link = link
        self._meter = PrefillMeter()
        self._lost: dict[str, int] = {}  # tokens computed again, by request

    def submit(self, number: int, request: LoadRequest) -> None:
        self._executor.add(request)
        self.scheduler.handle(
            GenerateRequest(
                rid=str(number),
                input_ids=request.prompt.tolist(),
                sampling=SamplingParams(max_new_tokens=request.limit, seed=request.seed),
                dp_rank=request.dp_rank,
                priority=request.priority,
                tenant=Tenant(name=request.tenant) if request.tenant else None,
            )
        )

    def abort(self, number: int) -> None:
        self.scheduler.handle(AbortRequest(rid=str(number)))

    def plan(self, now_s: float) -> ServedStep | None:
        scheduler = self.scheduler
        if self._link is not None:
            for end in self._link.ended(now_s):
                scheduler.handle(TransferEnded(end))
            if scheduler.offload.has_transfers:
                self._link.begin(scheduler.handle(TakeTransfers()), now_s)
        plan = scheduler.handle(PlanStep())
        if plan is None:
            return None
        self.worst_case.after(plan)
        started = []
        for rank, rank_plan in zip(scheduler.ranks, plan.ranks, strict=True):
            for admission in rank_plan.admissions:
                request = rank.running.request(admission.row)
                started.append(int(request.rid))
                if request.num_lost:
                    self._lost[request.rid] = request.num_lost
        return ServedStep(plan, step_loads(plan), started)

    def launch(self, step: ServedStep, begin_s: float) -> None:
        if self._link is not None:
            self._link.begin(Transfers(copies=tuple(step.plan.saved)), begin_s)
            self._meter.launched(step.plan, begin_s)
        step.handle = self._executor.launch(step.plan)

    def read(self, step: ServedStep, end_s: float) -> list[Output]:
        rate = None if self._link is None else self._meter.ended(step.plan, end_s)
        if rate is not None:
            self.scheduler.handle(PrefillRate(rate))
        results = self._executor.result(step.handle)
        self.scheduler.handle(ResultRead(step.plan.step_id, results))
        return self._outputs()

    def _outputs(self) -> list[Output]:
        """Take what requests gained. Raise RuntimeError for a refused request."""
        batch = self.scheduler.handle(TakeOutputs())
        if batch is None:
            return []
        taken = [Output(int(rid), 1, False) for rid in batch.rids]
        for output in batch.outputs:
            finish = output.finish
            if finish is None or finish.type != "abort":
                num_tokens = len(output.token_ids)
                taken.append(Output(int(output.rid), num_tokens, finish is not None))
            elif finish.status_code is not None:
                raise RuntimeError(f"request {output.rid} was refused: {finish.message}")
        return taken

    @property
    def next_end_s(self) -> float | None:
        return None if self._link is None else self._link.next_end_s

    @property
    def utilization(self) -> float:
        views = self.scheduler.memory_views()
        held = sum(view.leased_pages + view.protected_pages for view in views)
        return held / sum(view.total_pages for view in views)

    def counts(self) -> dict[str, Any]:
        counters = self.scheduler.counters()
        return {
            "retracts": counters["requests_retracted"],
            "preemptions": counters["requests_preempted"],
            "recomputed": sum(self._lost.values()),
            "waiting_seen": self.worst_case.num_waiting,
            "could_start": dict(self.worst_case.could_start),
        }

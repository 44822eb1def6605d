"""Drives a scheduler with an executor as the engine loop does, and checks everything it can."""

import io
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.engine_messages import FinishReason, OutputBatch, Reply, TokenLogprobs
from sgl_jax.core.engine_sizes import FULL_ATTENTION, CacheGroup, EngineSizes
from sgl_jax.core.messages import (
    AbortRequest,
    ForkSession,
    GenerateRequest,
    OpenSession,
    PauseMode,
    SessionMessage,
)
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import Executor, RankPlan, StepHandle, StepPlan
from sgl_jax.executor.plan_check import check_plan
from sgl_jax.replay.player import Player
from sgl_jax.scheduler.events import (
    DecodeSteps,
    FailAll,
    Note,
    Pause,
    PlanStep,
    ResultRead,
    TakeOutputs,
    TakeTransfers,
    Tick,
    TransferEnded,
)
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.record.event_log import EventReader, EventWriter
from sgl_jax.scheduler.record.recorder import RecordedScheduler
from sgl_jax.scheduler.running_rows import NOT_SCORED  # type: ignore[attr-defined]
from sgl_jax.scheduler.scheduler import Scheduler
from sgl_jax.scheduler.waiting.waiting_queue import MAX_SKIP_COUNT
from tests.support.faults import StepFailedError
from tests.support.oracle_executor import OracleExecutor

MAX_RECORDING_BYTES = 64 << 20


def make_sizes(
    *,
    dp_size: int = 1,
    page_size: int = 4,
    num_pages: int = 32,
    num_rows: int = 9,
    max_context_len: int = 256,
    max_chunk_tokens: int = 8,
    vocab_size: int = 50,
    max_prompt_logprob_tokens: int | None = None,
    max_draft_tokens: int = 0,
    groups: tuple[CacheGroup, ...] = FULL_ATTENTION,
    states: tuple[int, int, int] | None = None,
    host_ratio: float = 0.0,
) -> EngineSizes:
    """Small sizes, as tests like them; `num_pages` of the first pool.

    With recurrent layers `states` are the slots for snapshots, and the intervals of prompts and
    outputs at which they are kept, in pages, the first in multiples of the second. The host's
    memory is `host_ratio` times the device's; 0: there is none.
    """
    sizes = EngineSizes(
        dp_size=dp_size,
        page_size=page_size,
        pool_pages=(num_pages,),
        num_rows=num_rows,
        max_context_len=max_context_len,
        max_step_tokens=max_chunk_tokens + (num_rows - 1) * (1 + max_draft_tokens),
        max_prompt_logprob_tokens=max_prompt_logprob_tokens or max_chunk_tokens,
        vocab_size=vocab_size,
        max_draft_tokens=max_draft_tokens,
        groups=groups,
    )
    # Of any other as many as all rows may hold at once.
    others = [group for group in groups if group.pool > 0 and not group.is_recurrent]
    chunk_pages = sizes.pages_for(max_chunk_tokens)
    held = [1 + (num_rows - 1) * sizes.resting_pages(group) + chunk_pages for group in others]
    sizes = sizes._replace(pool_pages=(num_pages, *held))
    if states is not None:
        num_snapshots, multiple, tail_pages = states
        sizes = sizes._replace(
            pool_pages=(*sizes.pool_pages, 1 + num_snapshots),
            snapshot_interval=multiple * tail_pages * page_size,
            tail_interval=tail_pages * page_size,
            max_step_snapshots=num_rows * (4 + 3 * max_draft_tokens),
        )
    if host_ratio:
        blocks = [1 + max(int(host_ratio * num_pages), 1) for num_pages in sizes.pool_pages]
        sizes = sizes._replace(host_blocks=tuple(blocks))
    return sizes


def price_retracts_fully(scheduler: Scheduler) -> None:
    """Let no retract be worth the steps that it saves, so that each moment of forecasts counts."""
    scheduler._all_ranks._empty_rooms["step_price"] = 0


def forecast_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let schedulers made from now on compute each step's forecast, however much memory is left."""
    start = RankScheduler.__init__

    def with_large_requests(rank: RankScheduler, *args: Any) -> None:
        start(rank, *args)
        rank.most_request_pages = 1 << 40

    monkeypatch.setattr(RankScheduler, "__init__", with_large_requests)


def forced_retract(interval: int) -> dict[str, Any]:
    """Settings for a forced retract every `interval` steps; none for 0."""
    return {"test_retract": interval > 0, "test_retract_interval": max(interval, 1)}


def generate(rid: str, prompt: list[int], max_new_tokens: int, **kwargs: Any) -> GenerateRequest:
    """A greedy request; keyword arguments go to `GenerateRequest`, or to its sampling."""
    fields = GenerateRequest.__struct_fields__
    sampling = {key: value for key, value in kwargs.items() if key not in fields}
    rest = {key: value for key, value in kwargs.items() if key in fields}
    return GenerateRequest(
        rid=rid,
        input_ids=prompt,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **sampling),
        **rest,
    )


class Driver:
    """One engine loop. With `overlap`, a step is planned before the last one is committed.

    `max_unread` steps may be in flight when one is planned; by default 1 with `overlap`, else 0.
    Every event of `scheduler.handle` is recorded, to be run again with `python -m sgl_jax.replay`.
    """

    def __init__(
        self,
        sizes: EngineSizes,
        config: SchedulerArgs | None = None,
        *,
        overlap: bool = True,
        max_unread: int | None = None,
        executor: Executor | None = None,
        max_skip_count: int = MAX_SKIP_COUNT,
    ) -> None:
        self.recording = io.BytesIO()
        self.record = EventWriter(self.recording, MAX_RECORDING_BYTES).write
        self.scheduler = RecordedScheduler(
            sizes, config or SchedulerArgs(), self.record, max_skip_count
        )
        if sizes.max_decode_steps > 1:
            self.scheduler.handle(DecodeSteps(sizes.max_decode_steps))
        self.oracle = OracleExecutor(sizes)
        self.executor: Executor = executor or self.oracle
        self.after_plan: Callable[[], None] | None = None
        self.max_unread = int(overlap) if max_unread is None else max_unread
        self.in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finish: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}
        self.prompt_tokens: dict[str, int] = {}  # as reported, of sessions' turns
        self.dp_rank: dict[str, int] = {}
        self.prompts: dict[str, list[int]] = {}
        self.namespaces: dict[str, str] = {}  # of requests that were not refused
        self.session_namespaces: dict[str, str] = {}
        self.logprob_start: dict[str, int] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
        self.wanted_ids: dict[str, list[int]] = {}
        self.wanted_top: dict[str, int] = {}  # of requests that want log-probabilities
        self.logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
        self.hidden: dict[str, bytes] = {}
        self.values: dict[tuple[str, str], bytes] = defaultdict(bytes)  # by rid and name
        self.plans: list[StepPlan] = []

    def submit(self, message: GenerateRequest, history: list[int] | None = None) -> None:
        """`history` is what the session of the request puts before its tokens."""
        self.prompts[message.rid] = (history or []) + message.input_ids
        self.logprob_start[message.rid] = message.logprob_start_len
        self.wanted_ids[message.rid] = message.token_ids_logprob
        if message.return_logprob:
            self.wanted_top[message.rid] = message.top_logprobs_num
        self.scheduler.handle(message)
        self.collect()
        if message.rid not in self.finish:
            session_id = "" if message.session is None else message.session.id
            inherited = self.session_namespaces.get(session_id, "")
            self.namespaces[message.rid] = message.namespace or inherited

    def abort(self, rid: str) -> None:
        self.scheduler.handle(AbortRequest(rid=rid))
        self.collect()

    def pause(self, mode: PauseMode) -> None:
        self.scheduler.handle(Pause(mode))
        self.collect()

    def session(self, message: SessionMessage) -> Reply:
        reply = self.scheduler.handle(message)
        if reply.ok and isinstance(message, OpenSession):
            self.session_namespaces[message.session_id] = message.namespace
        if reply.ok and isinstance(message, ForkSession):
            inherited = self.session_namespaces[message.session_id]
            self.session_namespaces[message.new_session_id] = inherited
        return reply

    def tick(self, now_s: float) -> None:
        self.scheduler.handle(Tick(now_s))
        self.collect()

    def step(self) -> bool:
        """One turn of the loop; False if there was nothing to do."""
        self.transfer()
        decoding = [_decoding_rows(rank) for rank in self.scheduler.ranks]
        is_resting = self.scheduler.is_resting
        plan: StepPlan | None = None if is_resting else self.scheduler.handle(PlanStep())
        if self.after_plan is not None:
            self.after_plan()
        if plan is not None:
            for rank, rank_plan, before in zip(
                self.scheduler.ranks, plan.ranks, decoding, strict=True
            ):
                check_step(rank, rank_plan, before, self.scheduler.sizes)
        try:
            self.launch_and_read(plan)
        except StepFailedError as failure:
            self.fail_all(str(failure))
        self.scheduler.check_balance()
        self.collect()
        return plan is not None or bool(self.in_flight)

    def transfer(self) -> None:
        """Report the transfers that have ended, and begin others."""
        for end in self.oracle.host.ended():
            self.scheduler.handle(TransferEnded(end))
        if self.scheduler.offload.has_transfers:
            self.oracle.host.transfer(self.scheduler.handle(TakeTransfers()))

    def launch_and_read(self, plan: StepPlan | None) -> None:
        """Launch `plan`; commit the oldest step once enough are unread."""
        if plan is not None:
            self.plans.append(plan)
            check_plan(plan, self.scheduler.sizes)  # as the real executor does
            self.in_flight.append((plan, self.executor.launch(plan)))
        if self.in_flight and (plan is None or len(self.in_flight) > self.max_unread):
            done, handle = self.in_flight.popleft()
            result = ResultRead(done.step_id, self.executor.result(handle))
            self.scheduler.handle(result)

    def fail_all(self, reason: str) -> None:
        """The device lost its state."""
        self.in_flight.clear()
        self.oracle.host.forget()
        self.scheduler.handle(FailAll(reason))
        self.collect()

    def retract(self, rid: str) -> None:
        """Take a running request's memory and queue it again, as a rank that is short does."""
        request = self.scheduler._requests[rid]
        assert request.lease is not None, f"{rid} does not run"
        self.record(Note(f"the test retracts {rid}"))
        rank = self.scheduler.ranks[request.lease.dp_rank]
        self.scheduler._waiting.add(rank.retract(request.lease.row))

    def check_replay(self) -> None:
        """A fresh scheduler that is told the same decides the same."""
        reader = EventReader(io.BytesIO(self.recording.getvalue()))
        player = Player(reader.started)
        for event in reader:
            player.feed(event)
        player.finish()
        assert player.scheduler.counters() == self.scheduler.counters()
        assert player.scheduler.memory_views() == self.scheduler.memory_views()

    def save_recording(self, folder: Path) -> Path:
        """Write what was recorded to a file."""
        path = folder / "scheduler.events"
        path.write_bytes(self.recording.getvalue())
        return path

    def run(self, max_steps: int = 5000) -> None:
        """Step until idle, then prove the ledger."""
        for _ in range(max_steps):
            self.step()
            is_moving = self.scheduler.offload.has_transfers or self.oracle.host.num_in_flight
            if self.scheduler.is_idle and not self.in_flight and not is_moving:
                self.check_idle()
                return
        raise AssertionError(f"not idle after {max_steps} steps")

    def collect(self) -> None:
        if not self.scheduler.has_outputs:
            return
        batch: OutputBatch = self.scheduler.handle(TakeOutputs())
        for rid, token in zip(batch.rids, batch.token_ids(), strict=True):
            assert rid not in self.finish, f"{rid} got a token after its end"
            self.tokens[rid].append(token)
        for output in batch.outputs:
            assert output.rid not in self.finish, f"{output.rid} got an output after its end"
            self.tokens[output.rid].extend(output.token_ids)
            self.prompt_logprobs[output.rid].extend(output.prompt_logprobs or [])
            self.logprobs[output.rid].extend(output.logprobs or [])
            self.cached[output.rid] = output.cached_tokens
            self.dp_rank[output.rid] = output.dp_rank
            if output.hidden is not None:
                assert output.rid not in self.hidden, f"{output.rid} got a second hidden state"
                self.hidden[output.rid] = output.hidden
            for name, values in output.token_values.items():
                self.values[output.rid, name] += values
            if output.prompt_tokens is not None:
                assert output.rid not in self.prompt_tokens, f"{output.rid} told its prompt twice"
                self.prompt_tokens[output.rid] = output.prompt_tokens
            if output.finish is not None:
                self.finish[output.rid] = output.finish

    def check_finite(self) -> None:
        """No prefix that a request may find holds values that are not finite."""
        for dp_rank, rank in enumerate(self.scheduler.ranks):
            tree = rank.memory.cache.tree
            for node in tree.nodes():
                if not node.is_withdrawn:
                    tokens = np.concatenate([step.key for step in tree.path_to(node)])
                    pages = rank.memory.cache.tree.pages_to(node)
                    assert not self.oracle.held_non_finite(dp_rank, tokens, pages), node

    def check_idle(self) -> None:
        self.scheduler.audit()
        self.check_finite()
        for view in self.scheduler.memory_views():
            assert view.leased_pages == 0
            assert view.free_rows + view.session_rows == view.total_rows
            if view.session_rows == 0:
                assert view.protected_pages == view.session_held_pages == 0

    def check_tokens(self, rid: str) -> None:
        """Every token of a request must be what its prefix alone determines."""
        got = self.tokens[rid]
        assert got == self.oracle.expected_output(self.prompts[rid], len(got)), rid

    def check_cached(self, rid: str) -> None:
        """A request found no more than others of its namespace have had of its prompt."""
        own = self.namespaces.get(rid)
        others = (
            self.prompts[other] + self.tokens[other]
            for other, namespace in self.namespaces.items()
            if namespace == own and other != rid
        )
        prompt = self.prompts[rid]
        longest = max((common_len(prompt, tokens) for tokens in others), default=0)
        assert self.cached[rid] <= longest, rid

    def check_namespaces(self) -> None:
        """Each request has memory of its own namespace."""
        for rid, request in self.scheduler._requests.items():
            assert request.namespace == self.namespaces[rid], rid
            assert request.lease is None or request.lease.namespace == self.namespaces[rid], rid

    def check_logprobs(self, rid: str) -> None:
        """Each token was reported with its own log-probability, and as many others as asked."""
        prompt, got = self.prompts[rid], self.logprobs[rid]
        if rid not in self.wanted_top:
            assert not got, rid
            return
        num_top = self.wanted_top[rid]
        expected = self.oracle.expected_logprobs(prompt + self.tokens[rid])[len(prompt) :]
        assert [entry.token_id for entry in got] == self.tokens[rid], rid
        assert [entry.logprob for entry in got] == expected, rid
        for entry, value in zip(got, expected, strict=True):
            assert entry.top_ids == [entry.token_id + i for i in range(num_top)], rid
            assert entry.top_logprobs == [value - i for i in range(num_top)], rid
            assert entry.id_logprobs == self.expected_of_ids(rid, value), rid

    def expected_of_ids(self, rid: str, value: float | None) -> list[float]:
        """Log-probabilities of the tokens that it names, where its own has `value`."""
        return [] if value is None else [value - i / 1024 for i in self.wanted_ids[rid]]

    def check_prompt_logprobs(self, rid: str, prompt: list[int]) -> None:
        """Each prompt position asked for was reported once, in order, with its own value."""
        got = self.prompt_logprobs[rid]
        start = self.logprob_start[rid]
        if start < 0:
            assert got == []
            return
        expected: list[float | None] = [*self.oracle.expected_logprobs(prompt)]
        expected[0] = None
        assert [entry.logprob for entry in got] == expected[start:], rid
        assert [entry.token_id for entry in got] == prompt[start:], rid
        for entry in got:
            assert entry.id_logprobs == self.expected_of_ids(rid, entry.logprob), rid


def common_len(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    same = [x == y for x, y in zip(a, b, strict=False)]
    return same.index(False) if False in same else len(same)


def _decoding_rows(rank: RankScheduler) -> dict[int, int]:
    """Epochs of the rows that have one token to compute and nothing to score, by row."""
    running, rows = rank.running, rank.memory.rows
    runnable = running.runnable()
    wanted = running.columns.planned_len[runnable] - rows.kv_committed_len[runnable]
    decoding = runnable[(wanted == 1) & (running.columns.score_start[runnable] == NOT_SCORED)]
    return {row: int(rows.epoch[row]) for row in decoding.tolist()}


def check_step(
    rank: RankScheduler, plan: RankPlan, decoding: dict[int, int], sizes: EngineSizes
) -> None:
    """What was left out of a step to fill a shape, if anything, may be left out.

    `decoding` are the rank's rows that could decode before the step was planned, with epochs.
    """
    running, rows = rank.running, rank.memory.rows
    planned = plan.rows.tolist()
    # Rows that decode are all there, unless their memory was taken or is waited for by all.
    kept = [
        row
        for row, epoch in decoding.items()
        if running.requests[row] is not None and rows.epoch[row] == epoch
    ]
    assert planned[: plan.num_decode] in (kept, [])
    # What is launched is committed, has its memory, and nothing that is left out is.
    ends = plan.kv_starts + plan.q_lens - plan.num_drafts
    assert (rows.kv_committed_len[plan.rows] == ends).all()
    if plan.num_steps is not None:
        ends_of_all = plan.kv_starts + plan.num_steps
        assert (ends_of_all < running.columns.max_len[plan.rows]).all()
    most = rows.kv_allocated_len[plan.rows]
    assert (ends + running.columns.unread_drafts[plan.rows] <= most).all()
    # A request whose first chunk was left out is told to the device, and goes on with the next.
    for admission in plan.admissions:
        assert running.requests[admission.row] is not None
        if admission.row not in planned:
            committed = int(rows.kv_committed_len[admission.row])
            assert committed < running.columns.planned_len[admission.row]
            assert admission.start <= committed
    chunk = int(plan.q_lens[plan.num_decode :].sum())
    assert chunk <= sizes.max_chunk_tokens

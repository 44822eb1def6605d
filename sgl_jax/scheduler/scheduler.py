"""Plans the rows that every rank computes in each step, and applies the results.

The scheduler is a function of its event stream (`handle`; `events.py` lists the events): requests,
calls, programs of the device, the time, planned steps and results. It reads no clock and draws
nothing at random, so several hosts can run it in lockstep and a run can be replayed.

The caller launches the steps that `plan` returns, and may plan and launch the next step before it
applies the result of the last: input tokens come from the device, so nothing waits for the host.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any, assert_never

from sgl_jax.core.compiled import compile_loops
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import (
    AbortRequest,
    FinishReason,
    GenerateRequest,
    OutputBatch,
    PauseMode,
    Question,
    Reply,
    RequestOutput,
    SessionMessage,
    StopRequest,
)
from sgl_jax.core.server_args import SchedulerArgs
from sgl_jax.core.step_plan import Int32Array, RankResult, StepPlan
from sgl_jax.mem_cache.ledger import audit, check_balance
from sgl_jax.mem_cache.memory_view import MemoryView
from sgl_jax.scheduler.admission.admission import Admission
from sgl_jax.scheduler.apply_result import apply_result
from sgl_jax.scheduler.deadlines import Deadlines
from sgl_jax.scheduler.forced_retract import ForcedRetract
from sgl_jax.scheduler.gained_outputs import GainedOutputs
from sgl_jax.scheduler.program_gate import ProgramGate
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.record.events import (
    AwaitPrograms,
    Configure,
    Event,
    Expect,
    FailAll,
    Flush,
    Pause,
    PlanStep,
    ProgramsReady,
    Rebuild,
    ResultRead,
    Resume,
    RetractAll,
    TakeOutputs,
    Tick,
)
from sgl_jax.scheduler.request import Request, RequestState, max_request_len
from sgl_jax.scheduler.runnable import choose_runnable
from sgl_jax.scheduler.step_arrays import LaunchedRows, build_plan
from sgl_jax.scheduler.step_builder import StepBuilder
from sgl_jax.scheduler.waiting.tenants import TenantCounts
from sgl_jax.scheduler.waiting.wait_reason import WaitKind, WaitReason
from sgl_jax.scheduler.waiting.waiting_queue import MAX_PASSED_OVER, WaitingQueue
from sgl_jax.sessions.service import SessionService
from sgl_jax.sessions.store import SessionsFullError

# Steps between two looks at the lengths of outputs.
OUTPUT_LENGTHS_INTERVAL = 8


class Scheduler:
    """All requests of an engine of the given sizes, over all its data-parallel ranks."""

    def __init__(
        self, sizes: EngineSizes, args: SchedulerArgs, max_passed_over: int = MAX_PASSED_OVER
    ) -> None:
        if sizes.max_chunk_tokens < 1:
            raise ValueError(
                f"a step holds {sizes.max_step_tokens} tokens and has none for prompts beside the "
                f"{sizes.num_rows - 1} requests that may run on a rank, with "
                f"{1 + sizes.max_draft_tokens} tokens each"
            )
        if sizes.max_prompt_logprob_tokens < 1:
            raise ValueError(
                f"max_prompt_logprob_tokens is {sizes.max_prompt_logprob_tokens}, must be 1 or more"
            )
        compile_loops()
        self.sizes = sizes
        self.args = args
        self.max_passed_over = max_passed_over
        self._all_ranks = Ranks(sizes, args)
        self.ranks = self._all_ranks.ranks
        # Running requests wait, too: before their first step, and after a retract.
        self._max_requests = args.max_queued_requests + sizes.dp_size * (sizes.num_rows - 1)
        memories = [rank.memory for rank in self.ranks]
        self._waiting = WaitingQueue(
            args.schedule_policy,
            memories,
            self._all_ranks.tables,
            self._max_requests,
            self._all_ranks.tenants,
            max_passed_over,
        )
        self._gate = ProgramGate()
        self._deadlines = Deadlines(args.waiting_timeout, args.request_timeout)
        self._forced_retract = ForcedRetract(args)
        self._requests: dict[str, Request] = {}  # waiting or running, by rid
        self._sessions: SessionService[Request] = SessionService(
            memories,
            self._requests,
            self._known_tokens,
            args.max_sessions,
            args.max_session_tokens,
        )
        self._admission = Admission(
            self._waiting, args, self._sessions.home_of, self._all_ranks.tenants
        )
        self.is_paused = False
        self._chunk_tokens = sizes.max_chunk_tokens
        self._arrivals = 0
        self._steps = 0
        self._finished = 0
        self._timed_out = 0
        self._outputs = GainedOutputs(sizes.dp_size)
        # By step id, until the result is read.
        self._launched: dict[int, tuple[StepPlan, LaunchedRows]] = {}

    # -- events -----------------------------------------------------------------------------

    def handle(self, event: Event) -> Any:
        """Handle one event; returns the value of the method below that does it."""
        match event:
            case PlanStep():
                return self.plan()
            case ResultRead():
                plan, _ = self._launched[event.step_id]
                self.apply_result(plan, event.results)
            case TakeOutputs():
                return self.take_outputs()
            case Tick():
                self.tick(event.now_s)
            case GenerateRequest():
                self.submit(event)
            case AbortRequest():
                self.abort(event)
            case StopRequest():
                self.stop(event)
            case Question():
                return self.session(event)
            case Expect():
                self.expect(event.rid, event.first, event.tokens)
            case AwaitPrograms():
                self.await_programs()
            case ProgramsReady():
                self.programs_ready(event.error)
            case Configure():
                self.configure(event.args, event.chunk_tokens)
            case Flush():
                return self.flush()
            case Pause():
                self.pause(event.mode)
            case Resume():
                self.resume()
            case RetractAll():
                self.retract_all()
            case FailAll():
                self.fail_all(event.reason)
            case Rebuild():
                self.rebuild(event.reason)
            case _:
                assert_never(event)
        return None

    def submit(self, message: GenerateRequest) -> None:
        """A request arrives. One that cannot be served ends at once with a clear reason."""
        if message.rid in self._requests:
            self._refuse(message, f"request id {message.rid!r} is already in use", 400)
            return
        if len(self._requests) >= self._max_requests:
            text = (
                f"the queue is full: --max-queued-requests ({self.args.max_queued_requests}) wait "
                "beside those that run or can start"
            )
            self._refuse(message, text, 503)
            return
        if not self._all_ranks.tenants.may_queue(message.tenant):
            self._refuse(message, _too_many_queued(message), 429, "tenant_queue_full")
            return
        if self._gate.error and message.sampling.grammar is not None:
            self._refuse(message, self._gate.error, 500)
            return
        try:
            request = self._make_request(message)
        except InvalidRequestError as error:
            self._refuse(message, str(error), 400, error.code, error.param)
            return
        except SessionsFullError as error:
            self._refuse(message, str(error), 503, code="too_many_sessions")
            return
        self._arrivals += 1
        request.priority = self.args.importance(message.priority) - self._age()
        request.tenant = self._all_ranks.tenants.enter(message.tenant)
        self._requests[request.rid] = request
        self._deadlines.add(request.rid)
        if self._gate.holds(request):
            self._all_ranks.tenants.queue(request.tenant, 1)
        else:
            self._waiting.add(request)

    def _refuse(
        self,
        message: GenerateRequest,
        text: str,
        status_code: int,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        """Answer a request that never entered the queue."""
        finish = FinishReason(
            "abort", message=text, status_code=status_code, code=code, param=param
        )
        self._outputs.outputs.append(RequestOutput(message.rid, [], 0, 0, finish))

    def abort(self, message: AbortRequest) -> None:
        """End one request, or all, wherever they are. Unknown ids have ended already."""
        self._amend(message)
        rids = list(self._requests) if message.abort_all else [message.rid]
        for rid in rids:
            request = self._requests.get(rid)
            if request is not None:
                self._end(request, FinishReason("abort", message=message.message))

    def expect(self, rid: str, first: int, tokens: Int32Array) -> None:
        """A grammar leaves a request no other way than `tokens` int32[n], from position `first` on:
        they are worth drafting."""
        request = self._requests.get(rid)
        if request is not None:
            request.expected = (first, tokens)

    def await_programs(self) -> None:
        """The programs of steps with a grammar are being compiled: such requests wait."""
        self._gate.close()

    def programs_ready(self, error: str) -> None:
        """The programs are compiled; with an `error`, requests that need them end with it."""
        for request in self._gate.open(error):
            if error:
                self._end(request, FinishReason("abort", message=error, status_code=500))
            else:
                self._leave_gate(request)
                self._waiting.add(request)

    def stop(self, message: StopRequest) -> None:
        """The front found a stop string: keep that many output tokens, forget the rest."""
        self._amend(message)
        request = self._requests.get(message.rid)
        if request is None:
            return
        num_tokens = request.prompt_len + message.num_output_tokens
        if request.state is RequestState.RUNNING:
            self._rank_of(request).finish(_row(request), num_tokens=num_tokens)
        else:
            request.tokens = request.tokens[:num_tokens]
        self._forget(request, succeeded=True)

    def session(self, message: SessionMessage) -> Reply:
        """Execute a client's call about sessions; a reply that is not ok changed nothing."""
        return self._sessions.answer(message)

    def configure(self, args: SchedulerArgs, chunk_tokens: int) -> None:
        """Other settings from the next step on: order, balance, deadlines, the threshold of
        preemption, and the prompt tokens of a step on a rank, no more than the sizes allow."""
        self.args = self._admission.args = args
        self._waiting.set_policy(args.schedule_policy)
        self._deadlines.set_limits(args.waiting_timeout, args.request_timeout)
        self._chunk_tokens = min(chunk_tokens, self.sizes.max_chunk_tokens)

    def tick(self, now_s: float) -> None:
        """The time, in seconds from any origin: end requests and sessions past their limits.

        Needed only now and then (`needs_tick`), and before all events that depend on the time: a
        request arrives at the time of the last tick, a session is used at the time of the next.
        """
        expired = self._deadlines.tick(now_s)
        for rid in expired.to_finish:
            text = f"the request did not finish within {self.args.request_timeout:g} s"
            self._time_out(rid, text, 504)
        for rid in expired.to_start:
            request = self._requests.get(rid)
            if request is not None and not request.has_started:
                text = f"the request waited longer than {self.args.waiting_timeout:g} s to start"
                self._time_out(rid, text, 503)
        self._sessions.tick(now_s)

    def needs_tick(self, now_s: float) -> bool:
        """Return whether a tick would change anything but the time. Until then, or until another
        event, no tick is needed."""
        return self._deadlines.needs_tick(now_s) or self._sessions.store.needs_tick(now_s)

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._sessions.store)

    def flush(self) -> bool:
        """Empty all prefix caches; False, changing nothing, while requests run."""
        if self.num_running:
            return False
        self._reset_caches()
        return True

    def pause(self, mode: PauseMode) -> None:
        """Plan no step until `resume`. Running requests stay, are retracted, or end together with
        all waiting ones."""
        self.is_paused = True
        if mode == "retract":
            self.retract_all()
        elif mode == "abort":
            self.abort(AbortRequest(abort_all=True, message="generation was paused"))

    def resume(self) -> None:
        """Plan steps again."""
        self.is_paused = False

    def retract_all(self) -> None:
        """Take the memory of every running request; with its tokens, it waits to run again."""
        for rank in self.ranks:
            for row in rank.running.active.tolist():
                self._waiting.add(rank.retract(row, "asked"))

    def fail_all(self, reason: str) -> None:
        """The device lost its state: end every request, and keep no cached page."""
        self._launched.clear()
        for request in list(self._requests.values()):
            finish = FinishReason("abort", message=reason, status_code=500)
            self._end(request, finish, insert=False)
        self._reset_caches()

    def rebuild(self, reason: str) -> None:
        """The memory's records are wrong: end every request, reset all memory, check it is empty.

        Nothing is released one by one, since a release would read these records. Tokens of the
        step that found them wrong are dropped; ends that were already stated stand. No launched
        step may still run on the device.
        """
        ends = [output for output in self._outputs.outputs if output.finish is not None]
        ended = {output.rid for output in ends}
        succeeded = {o.rid for o in ends if o.finish is not None and o.finish.type != "abort"}
        finish = FinishReason("abort", message=reason, status_code=500)
        for request in list(self._requests.values()):
            if request.rid not in ended:
                ends.append(_last_output(request, finish))
            request.state, request.lease = RequestState.FINISHED, None
            self._forget(request, succeeded=request.rid in succeeded)
        self._outputs.clear_to(ends)
        self._waiting.clear()
        self._launched.clear()
        for rank in self.ranks:
            rank.rebuild()
        self.audit()

    # -- steps ------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests without memory."""
        return len(self._waiting) + len(self._gate)

    def num_waiting_for(self, dp_rank: int) -> int:
        """Waiting requests that can run on no other rank than this."""
        if self.sizes.dp_size == 1:
            return self.num_waiting
        waiting = chain(self._waiting, self._gate)
        return sum(request.message.dp_rank == dp_rank for request in waiting)

    def count_waiting(self) -> dict[WaitKind, int]:
        """Number of waiting requests by reason (`WaitReason`), as of the last planned step."""
        if self.is_paused:
            return {"paused": self.num_waiting}
        counts = self._admission.count_waiting(self.ranks, self._steps)
        return counts | {"program": len(self._gate)}

    def why_waiting(self, rid: str) -> WaitReason:
        """The reason why a request waits. Raises KeyError if it does not wait."""
        request = self._requests[rid]
        if request.state is not RequestState.WAITING:
            raise KeyError(f"{rid} does not wait")
        if self.is_paused:
            return WaitReason("paused")
        if request in self._gate:
            return WaitReason("program")
        reason = self._admission.why_waiting(request, self.ranks, self._steps)
        if reason.kind == "step" and not self._forced_retract.may_start(self.ranks):
            return WaitReason("paused")
        return reason

    @property
    def num_running(self) -> int:
        """Requests with memory, over all ranks."""
        return sum(len(rank.running) for rank in self.ranks)

    @property
    def is_idle(self) -> bool:
        """True if no request waits or runs."""
        return not self._requests

    @property
    def is_resting(self) -> bool:
        """True if no step can be planned before another event."""
        return self.is_paused or len(self._requests) == len(self._gate)

    def plan(self) -> StepPlan | None:
        """The next step, its memory taken and its lengths committed; None if nothing can run.

        The caller must launch the step, or call `fail_all`.
        """
        if self.is_resting:
            return None
        for rank in self.ranks:
            rank.publish_awaited()
        taken = self._forced_retract.take(self.ranks, self._steps)
        builders = [
            StepBuilder(rank, self.sizes, runnable, self._chunk_tokens)
            for rank, runnable in zip(self.ranks, choose_runnable(self._all_ranks), strict=True)
        ]
        for builder in builders:
            builder.grow_decoding()
            if builder.unservable:
                self._end_unservable(builder)
        if not taken and self._forced_retract.may_start(self.ranks):
            if self._steps % OUTPUT_LENGTHS_INTERVAL == 0:
                self._all_ranks.update_output_lengths()
            self._admission.admit_into(self._all_ranks, builders, self._steps)
        for builder in builders:
            builder.choose_rows()
            if builder.unservable:
                self._end_unservable(builder)
            taken += builder.retracted + builder.preempted
        for request in taken:
            self._waiting.add(request)
        if all(builder.is_empty for builder in builders):
            return None
        plan, launched = build_plan(self._all_ranks, builders, self._steps)
        self._launched[plan.step_id] = plan, launched
        self._steps += 1
        return plan

    def rows_with_grammar(self, plan: StepPlan) -> Iterator[tuple[int, int, Request, Int32Array]]:
        """The rows of a step in flight that draw a token by a grammar.

        Yields for each its rank, its index in that rank's plan, its request, and the output that
        the host has read, int32[n]: all of it, if the results of earlier steps were applied.
        """
        _, launched = self._launched[plan.step_id]
        running = self._all_ranks.running
        is_masked = launched.samples & running.has_grammar[launched.rows]
        is_masked &= self._all_ranks.tables.epoch[launched.rows] == launched.epochs
        for i in is_masked.nonzero()[0].tolist():
            rank, row = self._all_ranks.locate(int(launched.rows[i]))
            request = rank.running.request(row)
            index = i - int(launched.bounds[rank.dp_rank])
            yield rank.dp_rank, index, request, rank.running.known_tokens(row)[request.prompt_len :]

    def apply_result(self, plan: StepPlan, results: tuple[RankResult, ...]) -> None:
        """The result of a launched step was read. Results are read in launch order.

        Results of a step from before `fail_all` or `rebuild` are dropped.
        """
        if plan.step_id not in self._launched:
            return
        _, launched = self._launched.pop(plan.step_id)
        for request in apply_result(self._all_ranks, plan, launched, results, self._outputs):
            self._forget(request, succeeded=True)
        if self.args.check_memory == "busy":
            self.check_balance()

    @property
    def has_outputs(self) -> bool:
        """True if `take_outputs` would return any."""
        return bool(self._outputs)

    def take_outputs(self) -> OutputBatch | None:
        """The output that requests gained since the last call; None if there is none."""
        return self._outputs.take()

    # -- views ------------------------------------------------------------------------------

    def check_balance(self) -> None:
        """Prove every rank's counts. Raises `LedgerError`."""
        for rank in self.ranks:
            check_balance(rank.memory, len(rank.running))

    def audit(self) -> None:
        """Prove by a full walk that every page of every rank has one owner."""
        for rank in self.ranks:
            audit(rank.memory, len(rank.running))

    def memory_views(self) -> list[MemoryView]:
        """The place of every page, per rank."""
        return [rank.memory.view() for rank in self.ranks]

    def tenants(self) -> dict[str, TenantCounts]:
        """Requests and tokens of each tenant, by name: the empty one for requests without any."""
        return self._all_ranks.tenants.counts()

    def counters(self) -> dict[str, int]:
        """Counts since the start."""
        return {
            "requests_received": self._arrivals,
            "requests_finished": self._finished,
            "requests_timed_out": self._timed_out,
            "requests_retracted": sum(rank.num_retracted for rank in self.ranks),
            "requests_preempted": sum(rank.num_preempted for rank in self.ranks),
            "requests_force_retracted": sum(rank.num_force_retracted for rank in self.ranks),
            "sessions_evicted": sum(rank.num_evicted_sessions for rank in self.ranks),
            "evicted_pages": sum(rank.memory.cache.num_evicted for rank in self.ranks),
            "prompt_tokens": sum(rank.num_prompt_tokens for rank in self.ranks),
            "cached_tokens": sum(rank.num_cached_tokens for rank in self.ranks),
            "generated_tokens": self._all_ranks.num_generated_tokens,
            "drafted_tokens": self._all_ranks.num_drafted,
            "accepted_draft_tokens": self._all_ranks.num_accepted,
            "steps_planned": self._steps,
        }

    # -- inside -----------------------------------------------------------------------------

    def _known_tokens(self, request: Request) -> Int32Array:
        """Prompt and output of a request in flight, as far as results were read."""
        if request.lease is None or request.dp_rank is None:
            return request.tokens
        return self.ranks[request.dp_rank].running.known_tokens(request.lease.row)

    def _make_request(self, message: GenerateRequest) -> Request:
        """A request from its message. Raises `InvalidRequestError`, `SessionsFullError`."""
        if message.session is None:
            max_len = max_request_len(message, len(message.input_ids), self.sizes)
            return Request(message, self._arrivals, max_len)
        session, prompt, replaced = self._sessions.compose_turn(message)
        max_len = max_request_len(message, len(prompt), self.sizes, session.capacity)
        for request in replaced:
            self._replace(request)
        self._sessions.begin_turn(session, message, prompt)
        return Request(message, self._arrivals, max_len, prompt=prompt, session=session)

    def _leave_gate(self, request: Request) -> None:
        self._gate.remove(request)
        self._all_ranks.tenants.queue(request.tenant, -1)

    def _age(self) -> int:
        """The intervals of ageing that have passed. A request that arrived so much earlier than
        another counts as so much more important, while it waits as well as while it runs."""
        interval_s = self.args.priority_aging_s
        return int(self._deadlines.now_s // interval_s) if interval_s else 0

    def _reset_caches(self) -> None:
        """Empty the caches, and release the leases of idle sessions, which hold parts of them."""
        self._sessions.release_all()
        for rank in self.ranks:
            rank.memory.cache.reset()

    def _rank_of(self, request: Request) -> RankScheduler:
        assert request.dp_rank is not None, "a running request is on a rank"
        return self.ranks[request.dp_rank]

    def _end(self, request: Request, finish: FinishReason, *, insert: bool = True) -> None:
        """End a request before its time, in any state, with its reason."""
        self._forget(request)
        # Stated before the release, which may raise: the request then has its answer.
        self._outputs.outputs.append(_last_output(request, finish))
        if request.state is RequestState.RUNNING:
            self._rank_of(request).end(_row(request), insert=insert)

    def _replace(self, request: Request) -> None:
        """End a turn that another replaces: it keeps its tokens, as after a stop."""
        finish = FinishReason("abort", message="replaced by another turn of its session")
        self._outputs.outputs.append(_last_output(request, finish))
        if request.state is RequestState.RUNNING:
            self._rank_of(request).finish(_row(request))
        self._forget(request, succeeded=True)

    def _amend(self, message: StopRequest | AbortRequest) -> None:
        """If the request was a turn and has ended well, its session has more than its client saw.

        Turns that were sent before that was known, to continue it, would have been refused had it
        still been in flight; so they are now.
        """
        text = "it continues a turn whose end its client had not seen; send it again"
        for request in self._sessions.built_on(message):
            self._end(request, FinishReason("abort", message=text, status_code=400))
        self._sessions.amend_turn(message)

    def _time_out(self, rid: str, text: str, status_code: int) -> None:
        self._timed_out += 1
        self._end(self._requests[rid], FinishReason("abort", message=text, status_code=status_code))

    def _end_unservable(self, builder: StepBuilder) -> None:
        """End the requests that do not fit their rank even alone."""
        rank = builder.rank
        for row in builder.take_unservable():
            view = rank.memory.view()
            text = (
                f"the request needs more KV memory than rank {rank.dp_rank} can free: "
                f"{view.leased_pages} of {view.total_pages} pages are its own"
            )
            reason = FinishReason("abort", message=text, status_code=500)
            self._end(rank.running.request(row), reason)

    def _forget(self, request: Request, *, succeeded: bool = False) -> None:
        del self._requests[request.rid]
        self._finished += 1
        self._all_ranks.tenants.leave(request.tenant)
        self._deadlines.forget(request.rid)
        if request in self._gate:
            self._leave_gate(request)
        elif request.state is RequestState.WAITING:
            self._waiting.remove(request)
        self._sessions.end_turn(request, succeeded=succeeded)


def _last_output(request: Request, finish: FinishReason) -> RequestOutput:
    """The last output of a request that ends before its time."""
    return RequestOutput(
        rid=request.rid,
        token_ids=[],
        cached_tokens=request.cached_tokens,
        dp_rank=request.dp_rank or 0,
        finish=finish,
        prompt_tokens=request.tell_prompt_len(),
    )


def _too_many_queued(message: GenerateRequest) -> str:
    tenant = message.tenant
    assert tenant is not None, "requests of no tenant have no limit"
    return f"{tenant.max_queued} requests of tenant {tenant.name!r} wait already, as many as may"


def _row(request: Request) -> int:
    assert request.lease is not None, "a running request holds a lease"
    return request.lease.row

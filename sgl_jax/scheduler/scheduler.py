"""Plans the rows that every rank computes in each step, and applies the results.

The scheduler is a function of its event stream (`handle`; `events.py` lists the events): requests,
calls, programs of the device, the time, planned steps and results. It reads no clock and draws
nothing at random, so several hosts can run it in lockstep and a run can be replayed.

The caller launches the steps that `PlanStep` returns. It may plan and launch the next step before
it reads the result of the last: input tokens come from the device, so nothing waits for the host.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from math import inf
from typing import Any, assert_never

from sgl_jax.core.calls import WithReply
from sgl_jax.core.compiled import compile_loops
from sgl_jax.core.engine_messages import FinishReason
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import AbortRequest, GenerateRequest, PauseMode, StopRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import shared_chunk_tokens
from sgl_jax.core.step_plan import Int32Array, StepPlan
from sgl_jax.mem_cache.memory_view import MemoryView
from sgl_jax.scheduler import events
from sgl_jax.scheduler.admission.admission import Admission
from sgl_jax.scheduler.apply_result import apply_result
from sgl_jax.scheduler.forced_retract import ForcedRetract
from sgl_jax.scheduler.in_flight_rows import InFlightRows
from sgl_jax.scheduler.live_requests import LiveRequests
from sgl_jax.scheduler.non_finite import NonFiniteRows
from sgl_jax.scheduler.offload import Offload
from sgl_jax.scheduler.output_buffer import OutputBuffer
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request, RequestState
from sgl_jax.scheduler.runnable import choose_runnable
from sgl_jax.scheduler.step_arrays import build_plan
from sgl_jax.scheduler.step_builders import StepBuilders
from sgl_jax.scheduler.tenants import TenantCounts
from sgl_jax.scheduler.wait_reasons import WaitReasons
from sgl_jax.scheduler.waiting.wait_reason import WaitKind, WaitReason
from sgl_jax.scheduler.waiting.waiting_queue import MAX_SKIP_COUNT
from sgl_jax.scheduler.working_set import TICK_S
from sgl_jax.sessions.images import KnownImage
from sgl_jax.sessions.saving import SavedSession
from sgl_jax.sessions.store import SessionStore

# Steps between two updates of the output lengths.
OUTPUT_LENGTHS_INTERVAL = 8


class Scheduler:
    """All requests of an engine of the given sizes, over all its data-parallel ranks."""

    def __init__(
        self, sizes: EngineSizes, args: SchedulerArgs, max_skip_count: int = MAX_SKIP_COUNT
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
        self.max_skip_count = max_skip_count
        self._all_ranks = Ranks(sizes, args)
        self.ranks = self._all_ranks.ranks
        self._outputs = OutputBuffer()
        self._live = LiveRequests(self._all_ranks, sizes, args, max_skip_count, self._outputs)
        self._requests = self._live.by_rid
        self._waiting, self._gate = self._live.waiting, self._live.gate
        self._deadlines, self._sessions = self._live.deadlines, self._live.sessions
        self.non_finite = NonFiniteRows(self._all_ranks, self._live)
        self._forced_retract = ForcedRetract(args) if args.retract_interval else None
        self._admission = Admission(
            self._waiting, args, self._sessions.home_of, self._all_ranks.tenants
        )
        self._reasons = WaitReasons(
            self._all_ranks, self._live, self._admission, self._forced_retract
        )
        self._ticked_s = -inf
        self.offload = Offload(self._all_ranks, self._waiting)
        self.is_paused = False
        self._chunk_tokens = sizes.max_chunk_tokens
        self._num_decode_steps = 1
        self._steps = 0
        # Launched steps by id, until the result is read.
        self._launched: dict[int, tuple[StepPlan, InFlightRows]] = {}

    # -- events -----------------------------------------------------------------------------

    def handle(self, event: events.Event) -> Any:
        """Handle one event; return its decision, if any (`events.py`)."""
        match event:
            case events.PlanStep():
                return self._plan()
            case events.ResultRead():
                self._apply_result(event)
            case events.TakeOutputs():
                return self._outputs.take()
            case events.TakeTransfers():
                return self.offload.take_transfers()
            case events.RestoreCache():
                self.offload.restore(event.prefixes)
                return self._sessions.restore(event.sessions, event.images)
            case events.TransferEnded() | events.StoreOverdue() | events.StoreSuspended():
                self.offload.handle(event)
            case events.PrefillRate() | events.FetchRate() | events.StoreRate():
                self.offload.handle(event)
            case events.DecodeSteps():
                assert 1 <= event.num_steps <= self.sizes.max_decode_steps
                self._num_decode_steps = event.num_steps
            case events.Tick():
                self._ticked_s = event.now_s
                for rank in self.ranks:
                    rank.memory.tick(event.now_s)
                    rank.working_set.tick(event.now_s)
                if all(rank.working_set.is_thrashing for rank in self.ranks):
                    self._waiting.make_due(event.now_s - self.args.working_set_max_wait_s)
                self._live.expire(event.now_s)
                self._sessions.tick(event.now_s)
            case GenerateRequest():
                self._live.submit(event)
                if self.offload.has_store:
                    self.offload.search_store(self._requests.get(event.rid))
            case AbortRequest():
                self._live.abort(event)
            case StopRequest():
                self._live.stop(event)
            case WithReply():
                return self._sessions.answer(event)
            case events.Expect():
                self._live.expect(event)
            case events.AwaitPrograms():
                self._gate.close()
            case events.ProgramsReady():
                self._live.open_gate(event.error)
            case events.GrammarReady():
                self._live.note_grammar(event)
            case events.Configure():
                self._configure(event)
            case events.Flush():
                return self._flush()
            case events.Pause():
                self._pause(event.mode)
            case events.Resume():
                self.is_paused = False
            case events.RetractAll():
                self._retract_all()
            case events.NewWeights():
                return self._forget_weights(event.keeps_running)
            case events.FailAll():
                self._fail_all(event.reason)
            case events.Rebuild():
                self._rebuild(event.reason)
            case _:
                assert_never(event)
        return None

    def _configure(self, event: events.Configure) -> None:
        self.args = self._live.args = self._admission.args = event.args
        self._waiting.set_policy(event.args.schedule_policy)
        self._deadlines.set_limits(event.args.waiting_timeout, event.args.request_timeout)
        self._chunk_tokens = min(event.chunk_tokens, self.sizes.max_chunk_tokens)
        self._all_ranks.set_chunk_size(self._chunk_tokens)

    def needs_tick(self, now_s: float) -> bool:
        """Return whether a tick would change anything but the time; until it would, none is
        needed."""
        return (
            bool(self._live.aborted)
            or self._deadlines.needs_tick(now_s)
            or self._sessions.store.needs_tick(now_s)
            # Ranks that serve requests need the time: for the pauses of conversations, and for
            # working sets once pages were evicted.
            or (
                now_s >= self._ticked_s + TICK_S
                and any(r.has_agents or r.memory.cache.num_evicted for r in self.ranks)
                and not self.is_idle
            )
        )

    @property
    def is_aborting(self) -> bool:
        """Return whether ticks must still end requests of an `abort_all`."""
        return bool(self._live.aborted)

    @property
    def num_sessions(self) -> int:
        return len(self.session_store)

    @property
    def session_store(self) -> SessionStore:
        """Return the open sessions, for reading only."""
        return self._sessions.store

    def _flush(self) -> bool:
        if self.num_running or self.offload.is_storing:
            return False
        self._reset_caches()
        return True

    def saved_sessions(self) -> list[SavedSession]:
        """Return the open sessions, for `RestoreCache` of another scheduler."""
        return self._sessions.save()

    def saved_images(self) -> list[KnownImage]:
        """Return images of the open sessions' histories, for `RestoreCache`."""
        return self._sessions.store.saved_images()

    def _pause(self, mode: PauseMode) -> None:
        self.is_paused = True
        if mode == "retract":
            self._retract_all()
        elif mode == "abort":
            self._live.abort(AbortRequest(abort_all=True, message="generation was paused"))

    def _retract_all(self) -> None:
        for rank in self.ranks:
            for row in rank.running.active.tolist():
                self._waiting.add(rank.retract(row, "asked"))

    def _forget_weights(self, keeps_running: bool) -> list[str]:
        kept, retracted = list[str](), list[Request]()
        for rank in self.ranks:
            for row in rank.running.active.tolist():
                scores = bool(rank.running.request(row).pending_prompt_logprobs)
                if keeps_running and not scores and rank.make_stale(row):
                    kept.append(rank.running.request(row).rid)
                else:
                    retracted.append(rank.retract(row, "asked"))
        for request in list(self._waiting):
            if request.pending_prompt_logprobs or request.pending_values:
                self._waiting.remove(request)
                retracted.append(request)
        for request in retracted:
            if not request.num_output_tokens:  # the reports so far are of the weights before
                request.begin_reports()
            self._waiting.add(request)
        self._sessions.release_all()
        for rank in self.ranks:
            rank.withdraw_all()
        return kept

    def _fail_all(self, reason: str) -> None:
        self._launched.clear()
        for request in list(self._requests.values()):
            finish = FinishReason("abort", message=reason, status_code=500)
            self._live.end(request, finish, insert=False)
        self._reset_caches()
        for rank in self.ranks:
            rank.host.forget()

    def _rebuild(self, reason: str) -> None:
        self._live.drop_all(reason)
        self._launched.clear()
        for rank in self.ranks:
            rank.rebuild()
        self.audit()

    def _reset_caches(self) -> None:
        """Empty the caches, and release the leases of idle sessions, which hold parts of them."""
        self._sessions.release_all()
        for rank in self.ranks:
            rank.reset_caches()

    # -- steps ------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Return the number of requests without memory."""
        return len(self._waiting) + len(self._gate.held)

    def waiting(self) -> Iterator[Request]:
        """Return the requests without memory, oldest first; requests at the gate come last."""
        return chain(self._waiting, self._gate)

    @property
    def num_waiting_retracted(self) -> int:
        """Return the number of waiting requests that ran before."""
        at_gate = sum(request.num_retractions > 0 for request in self._gate)
        return self._waiting.num_retracted + at_gate

    def num_waiting_for(self, dp_rank: int) -> int:
        """Return the number of waiting requests that can run only on this rank."""
        if self.sizes.dp_size == 1:
            return self.num_waiting
        at_gate = sum(request.message.dp_rank == dp_rank for request in self._gate)
        return self._waiting.num_pinned[dp_rank] + at_gate

    def count_waiting(self) -> dict[WaitKind, int]:
        """Return the number of waiting requests by kind of `WaitReason`, as of the last step."""
        if self.is_paused:
            return {"paused": self.num_waiting}
        return self._reasons.count(self._steps)

    def why_waiting(self, rid: str) -> WaitReason:
        """Return the reason why a request waits. Raises KeyError if it does not wait."""
        request = self._requests[rid]
        if request.state is not RequestState.WAITING:
            raise KeyError(f"{rid} does not wait")
        return self._why_waiting([request])[0][1]

    def waiting_for(self, most: int) -> list[tuple[Request, WaitReason]]:
        """Return up to `most` of the first waiting requests, each with its reason."""
        return self._why_waiting(islice(self.waiting(), most))

    def _why_waiting(self, requests: Iterable[Request]) -> list[tuple[Request, WaitReason]]:
        if self.is_paused:
            return [(request, WaitReason("paused")) for request in requests]
        return self._reasons.find(requests, self._steps)

    @property
    def num_running(self) -> int:
        """Return the number of running requests of all ranks: those with KV memory."""
        return sum(len(rank.running) for rank in self.ranks)

    @property
    def is_idle(self) -> bool:
        return not self._requests

    @property
    def is_resting(self) -> bool:
        """Return whether no step can be planned before another event."""
        return self.is_paused or len(self._requests) == len(self._gate.held)

    def _plan(self) -> StepPlan | None:
        if self.is_resting:
            return None
        ranks, forced = self._all_ranks, self._forced_retract
        for rank in self.ranks:
            if rank.prompts.unpublished:
                rank.prompts.publish_awaited()
        taken = forced.take(self.ranks, self._steps) if forced else []
        runnable, most = choose_runnable(ranks), self._chunk_tokens
        # Prompts of one tenant delay the tokens of others, on any rank, by an eighth as long.
        if ranks.tenants.is_shared and len(runnable.decoding):
            most = shared_chunk_tokens(most)
        builders = StepBuilders(ranks, self.sizes, runnable, most)
        for builder in builders.made():
            if not builder.has_slots:
                builder.grow_decoding()
            if builder.unservable:
                self._live.end_unservable(builder)
        is_held = self._live.aborted or not (forced is None or forced.may_start(self.ranks))
        if not taken and not is_held:
            if self._steps % OUTPUT_LENGTHS_INTERVAL == 0:
                ranks.output_lengths.update(ranks.running, ranks.active()[0])
            if self._waiting.priorities.highest is not None:
                self._admission.admit_into(ranks, builders, self._steps)
        for builder in builders.made():
            builder.choose_rows()
            if builder.unservable:
                self._live.end_unservable(builder)
            taken += builder.retracted + builder.preempted
        for request in taken:
            self._waiting.add(request)
        most_steps = self._num_decode_steps if self._waiting.priorities.highest is None else 1
        built = build_plan(ranks, builders, self._steps, most_steps)
        if built is None:
            return None
        plan, launched = built
        self._launched[plan.step_id] = plan, launched
        self._steps += 1
        return plan

    def awaits_grammar(self, rid: str) -> Request | None:
        """Return the request `rid` if it waits for a `GrammarReady`. Thread-safe."""
        return self._gate.awaits_grammar(rid)

    def rows_with_grammar(self, plan: StepPlan) -> Iterator[tuple[int, int, Request, Int32Array]]:
        """Yield the rows of a step in flight that draw a token by a grammar: rank, index in the
        rank's plan, request, and the output read by the host, int32[n]: all of it, if earlier
        results were applied."""
        _, (rows, bounds) = self._launched[plan.step_id]
        is_masked = rows["samples"] & self._all_ranks.running.has_grammar[rows["row"]]
        is_masked &= self._all_ranks.tables.epoch[rows["row"]] == rows["epoch"]
        for i in is_masked.nonzero()[0].tolist():
            rank, row = self._all_ranks.locate(int(rows["row"][i]))
            request = rank.running.request(row)
            index = i - bounds[rank.dp_rank]
            yield rank.dp_rank, index, request, rank.running.known_tokens(row)[request.prompt_len :]

    def _apply_result(self, event: events.ResultRead) -> None:
        if event.step_id not in self._launched:
            return
        plan, launched = self._launched.pop(event.step_id)
        ranks, outputs = self._all_ranks, self._outputs
        done, num_failed = apply_result(ranks, plan, launched, event.results, outputs)
        for request in done:
            self._live.forget(request, succeeded=True)
        failed = self.non_finite
        has_records = failed.departed or failed.failed_on
        if num_failed or has_records or any(rank.departed for rank in self.ranks):
            failed.after_step(event.step_id, launched.rows, num_failed, self._steps)
        if self.args.check_memory == "busy":
            self.check_balance()

    @property
    def has_outputs(self) -> bool:
        """Return whether `TakeOutputs` would return any."""
        return bool(self._outputs.outputs or self._outputs.rid_lists)

    # -- views ------------------------------------------------------------------------------

    def check_balance(self) -> None:
        """Check every rank's counts. Raises `LedgerError`."""
        for rank in self.ranks:
            rank.check_balance()

    def audit(self) -> None:
        """Check by a full walk that every page and block has one owner. Raises `LedgerError`."""
        for rank in self.ranks:
            rank.audit()

    def audit_slices(self) -> Iterator[None]:
        """Run the audit in slices of a few milliseconds at most; events may be handled between
        them. A slice raises `LedgerError`."""
        return chain.from_iterable(rank.audit_slices() for rank in self.ranks)

    def memory_views(self) -> list[MemoryView]:
        """Return each rank's `MemoryView`: the place of every page."""
        return [rank.memory.view() for rank in self.ranks]

    def rank_states(self) -> list[dict[str, Any]]:
        """Return the memory, load and counts of each rank, as JSON values: `Ranks.states`, and
        num_waiting, the requests that can run only on this rank."""
        states = self._all_ranks.states()
        for dp_rank, state in enumerate(states):
            state["num_waiting"] = self.num_waiting_for(dp_rank)
        return states

    def tenants(self) -> dict[str, TenantCounts]:
        """Return counts of each tenant by its name; "" counts requests without a tenant."""
        return self._all_ranks.tenants.counts()

    def counters(self) -> dict[str, int]:
        """Return counts since the start, of all ranks together."""
        of_ranks: Counter[str] = Counter()
        for rank in self.ranks:
            of_ranks.update(rank.counters())
        return {
            **of_ranks,
            "requests_received": self._live.num_arrived,
            "requests_finished": self._live.num_finished,
            "requests_timed_out": self._live.num_timed_out,
            "sessions_displaced": self._sessions.num_displaced,
            "generated_tokens": self._all_ranks.num_generated_tokens,
            "drafted_tokens": self._all_ranks.num_drafted,
            "accepted_draft_tokens": self._all_ranks.num_accepted,
            "verified_rows": self._all_ranks.num_verified,
            "steps_planned": self._steps,
            "nonfinite_rows": self.non_finite.num_rows,
            "store_failures": self.offload.num_store_failures,
        }

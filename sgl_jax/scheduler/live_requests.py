"""Adds and ends the requests that wait or run.

A request that cannot be served gets its last output at once and is never added. An added request
waits in the queue, or at the gate for grammars and programs. Every end removes it by `forget`.
"""

from collections import deque
from collections.abc import Sequence

from sgl_jax.core.engine_messages import FinishReason, RequestOutput
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.image_input import ImageInput
from sgl_jax.core.messages import AbortRequest, GenerateRequest, StopRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import Shares, holder_of, tenant_text
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.scheduler.deadlines import Deadlines
from sgl_jax.scheduler.events import Expect, GrammarReady
from sgl_jax.scheduler.image_cache import check_images
from sgl_jax.scheduler.output_buffer import OutputBuffer
from sgl_jax.scheduler.program_gate import ProgramGate
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request, RequestState, max_request_len
from sgl_jax.scheduler.step_builder import StepBuilder
from sgl_jax.scheduler.waiting.waiting_queue import WaitingQueue
from sgl_jax.sessions.service import ComposedTurn, SessionService
from sgl_jax.sessions.store import SessionsFullError

# Limit of aborted or expired requests that end in one call, which takes some milliseconds.
MAX_ENDS = 256


class LiveRequests:
    """The requests of an engine still waiting or running, over all its data-parallel ranks.

    Attributes:
        by_rid: the requests, by the engine's id.
        waiting: the requests without memory, except those at the gate.
        gate: the requests that wait for their grammar or for programs.
        sessions: the open sessions; a request may be a turn of one.
        aborted: requests of an `abort_all` that the next ticks end, unless they have ended
            meanwhile. No request starts before.
    """

    def __init__(
        self,
        ranks: Ranks,
        sizes: EngineSizes,
        args: SchedulerArgs,
        max_skip_count: int,
        outputs: OutputBuffer,
    ) -> None:
        """Start without requests; `outputs` gets the last outputs of requests that end early."""
        self.args = args
        self.sizes = sizes
        self.by_rid: dict[str, Request] = {}
        self.ranks = ranks.ranks
        self._tenants = ranks.tenants
        # Running requests wait in the queue before their first step, and after a retract.
        self._max_requests = args.max_queued_requests + sizes.dp_size * (sizes.num_rows - 1)
        self._shares = Shares(self._max_requests, args.share_part, args.max_queued_requests)
        hosts = [rank.host for rank in ranks.ranks if rank.host.tier is not None]
        self.waiting = WaitingQueue(
            args.schedule_policy,
            ranks.memories,
            ranks.tables,
            self._max_requests + 1,  # a probe
            ranks.tenants,
            ranks.output_lengths,
            lambda request: any(host.awaits_store(request) for host in hosts),
            max_skip_count,
        )
        self.gate = ProgramGate()
        self.deadlines = Deadlines(args.waiting_timeout, args.request_timeout)
        self.sessions: SessionService[Request] = SessionService(
            ranks.memories, self.by_rid, self._known_tokens, args
        )
        self._outputs = outputs
        self._probe: str | None = None  # its rid
        self.aborted: deque[Request] = deque()
        self._abort_message: str | None = None
        self.num_arrived = 0
        self.num_finished = 0
        self.num_timed_out = 0

    def submit(self, message: GenerateRequest) -> None:
        """Add a request. If it cannot be served, end it at once with a clear reason."""
        if message.rid in self.by_rid:
            self._refuse(message, _refusal(f"request id {message.rid!r} is already in use", 400))
            return
        if message.is_probe and self._probe is not None:
            self._refuse(message, _refusal("another probe has not ended yet", 503))
            return
        num_counted = len(self.by_rid) - (self._probe is not None)
        if not message.is_probe and num_counted >= self._max_requests:
            text = (
                f"the queue is full: --max-queued-requests ({self.args.max_queued_requests}) wait "
                "beside those that run or can start"
            )
            self._refuse(message, _refusal(text, 503))
            return
        if not message.is_probe and not self._may_queue(message):
            text = self._too_many_queued(message)
            self._refuse(message, _refusal(text, 429, "tenant_queue_full"))
            return
        if self.gate.refuses(message):
            self._refuse(message, _refusal(self.gate.error, 500))
            return
        try:
            request, turn = self._make_request(message)
        except (InvalidRequestError, SessionsFullError) as error:
            self._refuse(message, _refusal(str(error), error.status_code, error.code, error.param))
            return
        self.num_arrived += 1
        request.priority = self.args.importance(message.priority) - self._age()
        request.tenant = self._tenants.enter(message.tenant)
        request.arrived_s = self.deadlines.now_s
        self.by_rid[request.rid] = request
        if message.is_probe:
            self._probe = request.rid
        else:
            self._shares.add(holder_of(message.tenant), 1)
        self.deadlines.add(request.rid)
        # A held request may be refused, so a turn enters its session when it passes the gate.
        if self.gate.holds(request):
            self._tenants.queue(request.tenant, 1)
        else:
            if turn is not None:
                self._enter_turn(turn, request.rid)
            self.waiting.add(request)

    def _may_queue(self, message: GenerateRequest) -> bool:
        """Return whether the tenant's limit, or else its share, has room for a request."""
        tenant = message.tenant
        if tenant is not None and tenant.max_queued:
            return self._tenants.may_queue(tenant)
        return self._shares.may_add(holder_of(tenant), 1)

    def _too_many_queued(self, message: GenerateRequest) -> str:
        tenant, holder = message.tenant, holder_of(message.tenant)
        if tenant is not None and tenant.max_queued:
            text = f"{tenant.max_queued} requests of {tenant_text(holder)} wait already"
            return f"{text}, as many as may"
        num_held = self._shares.held_by(holder)
        return (
            f"{num_held} requests of {tenant_text(holder)} wait or run already, as many as may now "
            "(--tenant-share)"
        )

    def _refuse(self, message: GenerateRequest, finish: FinishReason) -> None:
        """Send the last output of a request that never entered the queue."""
        self._outputs.outputs.append(RequestOutput(message.rid, [], 0, 0, finish))

    def abort(self, message: AbortRequest) -> None:
        """End one request, or all, in any state. Unknown ids have ended already.

        With `abort_all`, running requests end at once, then waiting requests, `MAX_ENDS` now and
        with each tick; both in order of arrival.
        """
        self._amend(message)
        if message.abort_all:
            running = [
                rank.running.request(row)
                for rank in self.ranks
                for row in rank.running.active.tolist()
            ]
            for request in sorted(running, key=lambda request: request.arrival):
                self.end(request, FinishReason("abort", message=message.message), is_own=False)
            self.aborted, self._abort_message = deque(self.by_rid.values()), message.message
            self._end_aborted()
        elif message.rid in self.by_rid:
            finish = FinishReason("abort", message=message.message, status_code=message.status_code)
            self.end(self.by_rid[message.rid], finish)

    def _end_aborted(self) -> int:
        """End the next requests of an `abort_all`; return the number that were left before."""
        num_left = len(self.aborted)
        for _ in range(min(num_left, MAX_ENDS)):
            request = self.aborted.popleft()
            if self.by_rid.get(request.rid) is request:
                self.end(request, FinishReason("abort", message=self._abort_message))
        return num_left

    def expect(self, event: Expect) -> None:
        request = self.by_rid.get(event.rid)
        if request is not None:
            request.expected = (event.first, event.tokens)

    def open_gate(self, error: str) -> None:
        """Queue the requests with a compiled grammar, now that their programs are compiled. With an
        `error`, end all held requests instead."""
        for request in self.gate.open(error):
            if error:
                self.end(request, FinishReason("abort", message=error, status_code=500))
            else:
                self._pass_gate(request)

    def note_grammar(self, event: GrammarReady) -> None:
        """Queue the request once its programs are compiled, or refuse it."""
        request = self.gate.awaits_grammar(event.rid)
        if request is None:
            return
        if event.refusal is not None:
            self.end(request, event.refusal)
        elif self.gate.note_compiled(request):
            self._pass_gate(request)

    def stop(self, message: StopRequest) -> None:
        """End a request at a stop string: keep the given number of output tokens."""
        self._amend(message)
        request = self.by_rid.get(message.rid)
        if request is None:
            return
        num_tokens = request.prompt_len + message.num_output_tokens
        if request.state is RequestState.RUNNING:
            self._rank_of(request).finish(_row(request), num_tokens=num_tokens)
        else:
            request.tokens = request.tokens[:num_tokens]
        self.forget(request, succeeded=True)

    def expire(self, now_s: float) -> None:
        """End requests past their limits at `now_s`, in seconds from any origin, and aborted
        requests. At most `MAX_ENDS` end in one call, so that no other request waits long for it."""
        expired = self.deadlines.tick(now_s, max(MAX_ENDS - self._end_aborted(), 0))
        for rid in expired.to_finish:
            text = f"the request did not finish within {self.args.request_timeout:g} s"
            self._time_out(rid, text, 504)
        for rid in expired.to_start:
            request = self.by_rid.get(rid)
            if request is not None and not request.has_started:
                text = f"the request waited longer than {self.args.waiting_timeout:g} s to start"
                self._time_out(rid, text, 503)

    def drop_all(self, reason: str) -> None:
        """End all requests without releasing memory, since its records are wrong. Tokens of the
        step that found this are dropped; outputs with a finish reason are kept."""
        ends = [output for output in self._outputs.outputs if output.finish is not None]
        ended = {output.rid for output in ends}
        succeeded = {o.rid for o in ends if o.finish is not None and o.finish.type != "abort"}
        finish = FinishReason("abort", message=reason, status_code=500)
        for request in list(self.by_rid.values()):
            if request.rid not in ended:
                ends.append(_last_output(request, finish))
            request.state, request.lease = RequestState.FINISHED, None
            self.forget(request, succeeded=request.rid in succeeded)
        self._outputs.clear_to(ends)
        self.waiting.clear()

    # -- inside -----------------------------------------------------------------------------

    def end(
        self,
        request: Request,
        finish: FinishReason,
        *,
        insert: bool = True,
        is_own: bool = True,
    ) -> None:
        """End a request early, in any state. `insert` is False if the device failed: its KV is not
        kept. `is_own` is False if the engine, not the client or a limit, ends it."""
        self.forget(request)
        # Output before the release, which may raise: the client still gets its last output.
        self._outputs.outputs.append(_last_output(request, finish))
        if request.state is RequestState.RUNNING:
            self._rank_of(request).end(_row(request), insert=insert, is_own=is_own)

    def end_unservable(self, builder: StepBuilder) -> None:
        """End the requests that do not fit even an empty rank."""
        rank = builder.rank
        for row in builder.take_unservable():
            view = rank.memory.view()
            text = (
                f"the request needs more KV memory than rank {rank.dp_rank} can free: "
                f"{view.leased_pages} of {view.total_pages} pages are its own"
            )
            reason = FinishReason("abort", message=text, status_code=500)
            self.end(rank.running.request(row), reason, is_own=False)

    def forget(self, request: Request, *, succeeded: bool = False) -> None:
        del self.by_rid[request.rid]
        if request.rid == self._probe:
            self._probe = None
        else:
            self._shares.add(holder_of(request.message.tenant), -1)
        self.num_finished += 1
        self._tenants.leave(request.tenant)
        self.deadlines.forget(request.rid)
        if request in self.gate:
            self._leave_gate(request)
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)
        self.sessions.end_turn(request, succeeded=succeeded)

    def _known_tokens(self, request: Request) -> Int32Array:
        """Return the prompt and output of a request in flight, as far as results were read."""
        if request.lease is None or request.dp_rank is None:
            return request.tokens
        return self.ranks[request.dp_rank].running.known_tokens(request.lease.row)

    def _make_request(
        self, message: GenerateRequest
    ) -> tuple[Request, ComposedTurn[Request] | None]:
        """Make a request from its message; hold it if it is a turn. Raises `InvalidRequestError` or
        `SessionsFullError` if it cannot be served."""
        if message.session is None:
            max_len = max_request_len(message, len(message.input_ids), self.sizes)
            self._check_images(message, message.images)
            return Request(message, self.num_arrived, max_len), None
        turn = self.sessions.compose_turn(message)
        session, prompt = turn.session, turn.prompt
        max_len = max_request_len(message, len(prompt), self.sizes, session.capacity)
        images = self.sessions.images_of(turn, message, self.sizes.vocab_size)
        self._check_images(message, images)
        self.sessions.hold_turn(turn, message)
        request = Request(
            *(message, self.num_arrived, max_len), prompt=prompt, session=session, images=images
        )
        return request, turn

    def _check_images(self, message: GenerateRequest, images: Sequence[ImageInput]) -> None:
        sizes = self.sizes
        check_images(images, message.logprob_start_len, sizes.image_slots, sizes.max_images)

    def _enter_turn(self, turn: ComposedTurn[Request], rid: str) -> None:
        """End the turns that a held turn replaces, and put it into its session."""
        for request in turn.replaced:
            self._replace(request)
        self.sessions.enter_turn(turn, rid)

    def _pass_gate(self, request: Request) -> None:
        """Queue a held request; refuse a turn if its session can no longer take it."""
        if request not in self.gate:  # a turn that passed just now has replaced it
            return
        try:
            if request.session is not None:
                self._enter_turn(self.sessions.compose_held(request), request.rid)
        except (InvalidRequestError, SessionsFullError) as error:
            self.end(request, _refusal(str(error), error.status_code, error.code, error.param))
            return
        self._leave_gate(request)
        self.waiting.add(request)

    def _leave_gate(self, request: Request) -> None:
        self.gate.remove(request)
        self._tenants.queue(request.tenant, -1)

    def _age(self) -> int:
        """Return the number of ageing intervals that have passed. A request older than another by
        one interval counts as one priority more important, waiting or running."""
        interval_s = self.args.priority_aging_s
        return int(self.deadlines.now_s // interval_s) if interval_s else 0

    def _rank_of(self, request: Request) -> RankScheduler:
        assert request.dp_rank is not None, "a running request is on a rank"
        return self.ranks[request.dp_rank]

    def _replace(self, request: Request) -> None:
        """End a turn that another turn replaces; it keeps its tokens, as after a stop."""
        finish = FinishReason("abort", message="replaced by another turn of its session")
        self._outputs.outputs.append(_last_output(request, finish))
        if request.state is RequestState.RUNNING:
            self._rank_of(request).finish(_row(request))
        self.forget(request, succeeded=True)

    def _amend(self, message: StopRequest | AbortRequest) -> None:
        """Correct the session of a turn that succeeded: the session has more than its client saw.
        Refuse turns sent before that was known, to continue it, as if it were still in flight."""
        text = "it continues a turn whose end its client had not seen; send it again"
        for request in self.sessions.built_on(message):
            self.end(request, FinishReason("abort", message=text, status_code=400))
        self.sessions.amend_turn(message)

    def _time_out(self, rid: str, text: str, status_code: int) -> None:
        self.num_timed_out += 1
        self.end(self.by_rid[rid], FinishReason("abort", message=text, status_code=status_code))


def _refusal(
    text: str, status_code: int, code: str | None = None, param: str | None = None
) -> FinishReason:
    return FinishReason("abort", message=text, status_code=status_code, code=code, param=param)


def _last_output(request: Request, finish: FinishReason) -> RequestOutput:
    """Return the last output of a request that ends early."""
    return RequestOutput(
        rid=request.rid,
        token_ids=[],
        cached_tokens=request.cached_tokens,
        dp_rank=request.dp_rank or 0,
        finish=finish,
        prompt_tokens=request.pop_prompt_len(),
    )


def _row(request: Request) -> int:
    assert request.lease is not None, "a running request holds a lease"
    return request.lease.row

"""The frontend between clients and the engine: requests in flight and their output streams.

The HTTP server and the offline `Engine` share it. It is synchronous and uses callbacks, so that it
works with both asyncio and threads. It must never import jax or block.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any

import msgspec

from sgl_jax.core.engine_messages import (
    EngineMessage,
    OutputBatch,
    Reply,
    RequestOutput,
    WeightsChanged,
)
from sgl_jax.core.errors import EngineDeadError, QueueFullError, ShuttingDownError
from sgl_jax.core.messages import (
    AbortRequest,
    CallMessage,
    CancelCall,
    FrontMessage,
    GenerateRequest,
    StopRequest,
)
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.front.pending_requests import PendingRequests
from sgl_jax.engine.front.request_checks import EngineFacts, RequestChecks
from sgl_jax.engine.front.request_stream import RequestStream
from sgl_jax.metrics.request_metrics import RequestMetrics
from sgl_jax.text.tokenizer import Tokenizer
from sgl_jax.text.tokenizer_check import check_vocabulary

if TYPE_CHECKING:
    from sgl_jax.engine.front.request_spans import RequestTracer  # its libraries may be missing

logger = logging.getLogger(__name__)

# Maximum number of calls without a reply: the engine may not respond.
_MAX_CALLS = 1024


class Frontend:
    """Sends checked requests to the engine and distributes their outputs to streams.

    Thread-safe: one lock guards the streams, and callbacks run outside it.
    """

    def __init__(
        self,
        args: ServerArgs,
        tokenizer: Tokenizer,
        info: Mapping[str, Any],
        send: Callable[[FrontMessage], None],
        tracer: "RequestTracer | None" = None,
    ) -> None:
        """Create the frontend of a started engine.

        Args:
            info: `EngineInfo.info` of the engine.
            send: queues a message for the engine, in order, without blocking.

        Raises:
            ValueError: the tokenizer does not match the engine's model.
        """
        self.facts = EngineFacts.from_info(info)
        check_vocabulary(tokenizer, args.tokenizer_folder, self.facts.vocab_size)
        self.tokenizer = tokenizer
        self.checks = RequestChecks(tokenizer, self.facts, args)
        self.metrics = RequestMetrics(args.model_name)
        self.tracer = tracer
        self._send = send
        self._log_requests = args.log_requests
        self._lock = threading.Lock()
        self._streams: dict[str, RequestStream] = {}
        self._on_reply: dict[str, Callable[[Reply], None]] = {}
        self.pending = PendingRequests(
            args.max_queued_requests, self.facts.max_running_requests, args.share_part
        )
        self.weight_version = str(info.get("weight_version", args.weight_version))
        self.num_weight_changes = 0
        self.num_tokens = 0  # of all outputs so far, including requests with disconnected clients
        self._sequence = itertools.count()
        self._end_error: type[EngineDeadError | ShuttingDownError] = EngineDeadError
        self._death: str | None = None

    @property
    def num_open(self) -> int:
        return len(self._streams)

    @property
    def has_ended(self) -> bool:
        return self._death is not None

    def check_alive(self) -> None:
        """Raise the error passed to `fail` if the engine has ended."""
        if self._death is not None:
            raise self._end_error(self._death)

    # Requests

    def submit(
        self,
        request: GenerateRequest,
        on_ready: Callable[[], None],
        *,
        streaming: bool = True,
        sender: str = "",
        kept_tokens: Set[int] = frozenset(),
        num_together: int = 1,
    ) -> RequestStream:
        """Send a prepared request.

        The engine sees a unique rid, so that late outputs of an ended request cannot reach a later
        request with the same client rid. Probes are exempt from queue limits.

        Args:
            on_ready: called on the engine's side when `take` has something to return.
            streaming: if False, `on_ready` is called only at the end.
            sender: the caller that may `abort` the request by its client rid.
            kept_tokens: special tokens that stay in the text even if special tokens are skipped.
            num_together: this request and the following requests of the tenant that are useless
                without it: the queue must have room for all.

        Raises:
            EngineDeadError, ShuttingDownError: the engine has ended, with the error passed to
                `fail`.
            QueueFullError, TenantQueueFullError: the queue or the tenant's share of it is full.
        """
        unique = msgspec.structs.replace(request, rid=f"{request.rid}#{next(self._sequence)}")
        stream = RequestStream(
            unique.without_pixels(),
            self.tokenizer,
            self._lock,
            on_ready,
            client_rid=request.rid,
            sender=sender,
            streaming=streaming,
            kept_tokens=kept_tokens,
            value_shapes=self.facts.value_shapes,
        )
        if self.tracer is not None:
            stream.on_end = self.tracer.begin()
        with self._lock:
            self.check_alive()
            if not unique.is_probe:
                self.pending.check_room(num_together, unique.tenant, unique.pixel_bytes)
                self.pending.add(unique.rid, unique.tenant, unique.pixel_bytes)
            stream.note_weights(self.weight_version)
            self._streams[unique.rid] = stream
        try:
            self._send(unique)
        except BaseException:
            with self._lock:
                self._streams.pop(unique.rid, None)
                self.pending.remove(unique.rid)
            raise
        self.metrics.arrived.inc()
        if self._log_requests:
            logger.info("request %r: %d prompt tokens", unique.rid, stream.num_prompt_tokens)
        return stream

    def abandon(self, stream: RequestStream) -> None:
        """End the request of `stream` after its consumer has left. Call it at most once.

        If the consumer did not take the end of a session's turn, the turn is rolled back, even if
        the request has finished in the engine.
        """
        rid, session = stream.request.rid, stream.request.session
        with self._lock:
            is_open = self._streams.pop(rid, None) is not None
            is_unseen = stream.drop_unseen_end()
        if is_open:
            self._log_end(stream, "the client went away")
            self.metrics.aborted.inc()
        if is_open or (is_unseen and session is not None):
            with contextlib.suppress(EngineDeadError):  # then the request has ended as well
                self._send(AbortRequest(rid=rid, message="the client went away", session=session))
        stream.end_trace()

    def abort(self, client_rid: str, sender: str | None = None) -> int:
        """Abort the requests with this client rid ("" for all), and return their number.

        Their streams end with an abort. If `sender` is given, only its requests are aborted.
        """
        with self._lock:
            rids = [
                rid
                for rid, stream in self._streams.items()
                if client_rid in ("", stream.client_rid) and sender in (None, stream.sender)
            ]
        if client_rid == "" and sender is None:
            self._send(AbortRequest(abort_all=True))
        else:
            for rid in rids:
                self._send(AbortRequest(rid=rid))
        return len(rids)

    def call(self, message: CallMessage, on_reply: Callable[[Reply], None]) -> str:
        """Send a message to the engine and return the call's id. `on_reply` gets the reply.

        Raises:
            EngineDeadError, ShuttingDownError: the engine has ended, with the error passed to
                `fail`.
            QueueFullError: too many calls have no reply yet.
        """
        rid = f"call#{next(self._sequence)}"
        with self._lock:
            self.check_alive()
            if len(self._on_reply) >= _MAX_CALLS:
                raise QueueFullError(f"{_MAX_CALLS} calls wait for the engine's reply")
            self._on_reply[rid] = on_reply
        try:
            self._send(msgspec.structs.replace(message, rid=rid))
        except BaseException:
            with self._lock:
                self._on_reply.pop(rid, None)
            raise
        return rid

    def cancel_call(self, rid: str) -> None:
        """Cancel a call without a reply. The reply is still delivered."""
        with contextlib.suppress(EngineDeadError, ShuttingDownError):
            if rid in self._on_reply:
                self._send(CancelCall(call=rid))

    # The engine's side

    def handle(self, message: EngineMessage) -> None:
        """Handle an output or a reply of the engine, and ignore other messages.

        Runs once per step, so the work per token is kept to a minimum.
        """
        if not isinstance(message, OutputBatch):
            if isinstance(message, WeightsChanged):
                self._note_weights(message)
            elif isinstance(message, Reply):
                with self._lock:
                    on_reply = self._on_reply.pop(message.rid, None)
                if on_reply is not None:
                    on_reply(message)
            return
        now = time.perf_counter()
        token_ids = message.token_ids()
        self.num_tokens += len(token_ids) + sum(len(each.token_ids) for each in message.outputs)
        ready: list[RequestStream] = []
        num_tokens = 0
        # Number of streams by the time of their last token; most streams share one time.
        num_since: Counter[float] = Counter()
        with self._lock:
            streams = self._streams
            if message.starts or message.marks:
                self._note_stamps(message)
            rids = itertools.chain.from_iterable(message.rid_lists)
            for rid, token in zip(rids, token_ids, strict=True):
                stream = streams.get(rid)
                if stream is None:  # the stream has ended here: overshoot
                    continue
                try:
                    stream.accept_token(token)
                    num_tokens += 1
                    if stream.last_token_at is None:
                        self._note_tokens(stream, 1, now)
                    else:
                        num_since[stream.last_token_at] += 1
                        stream.last_token_at = now
                    if stream.finish is not None:
                        self._end(stream, now, stopped_here=True)
                except Exception as error:  # of any type: other streams continue
                    self._fail_stream(stream, error, now)
                if stream.streaming or stream.has_ended:
                    ready.append(stream)
            for output in message.outputs:
                self.pending.remove(output.rid)
                stream = streams.get(output.rid)
                if stream is not None:
                    num_tokens += self._accept(stream, output, now)
                    if stream.streaming or stream.has_ended:
                        ready.append(stream)
        for last_token_at, num_streams in num_since.items():
            self.metrics.time_per_next_token.observe(now - last_token_at, num_streams)
        self.metrics.num_generated += num_tokens
        self.metrics.generated_tokens.inc(num_tokens)
        for stream in ready:
            try:
                stream.on_ready()
            except Exception as error:
                with self._lock:
                    self._fail_stream(stream, error, now)

    def fail(
        self, reason: str, kind: type[EngineDeadError | ShuttingDownError] = EngineDeadError
    ) -> None:
        """End all requests and calls with an error. Only the first call has an effect.

        Args:
            reason: text for clients.
            kind: the engine has ended, or the server shuts down without waiting any longer.
        """
        with self._lock:
            if self._death is not None:
                return
            self._death, self._end_error = reason, kind
            streams, self._streams = list(self._streams.values()), {}
            waiting, self._on_reply = self._on_reply, {}
            for stream in streams:
                stream.error = kind(reason)
        for stream in streams:
            stream.on_ready()
        for rid, on_reply in waiting.items():
            on_reply(Reply(rid=rid, ok=False, message=reason))

    def _note_weights(self, message: WeightsChanged) -> None:
        with self._lock:
            self.weight_version = message.version
            self.num_weight_changes += not message.is_label
            for stream in self._streams.values():
                stream.note_weights(message.version)
            for rid in message.kept_rids:
                if rid in self._streams:
                    self._streams[rid].has_old_kv = True

    def _note_stamps(self, batch: OutputBatch) -> None:
        for rid, started_at in batch.starts.items():
            if rid in self._streams:
                self._streams[rid].started_at = started_at
                self.metrics.queue_time.observe(started_at - self._streams[rid].created_at)
        for rid, marks in batch.marks.items():
            if rid in self._streams:
                self._streams[rid].marks += marks

    def _accept(self, stream: RequestStream, output: RequestOutput, now: float) -> int:
        """Pass a full output to its stream, and return the number of tokens gained."""
        before = stream.num_output_tokens
        try:
            stream.accept(output)
            gained = stream.num_output_tokens - before
            if gained:
                self._note_tokens(stream, gained, now)
            if stream.finish is not None:
                # The request may also have ended in the engine, past the stop string.
                self._end(stream, now, stopped_here=stream.finish is not output.finish)
        except Exception as error:
            self._fail_stream(stream, error, now)
        return stream.num_output_tokens - before

    def _fail_stream(self, stream: RequestStream, error: Exception, now: float) -> None:
        """End a request if this process cannot handle its output. The consumer gets `error`."""
        request = stream.request
        logger.error("request %r: its output could not be handled", request.rid, exc_info=error)
        stream.error = error
        if self._streams.pop(request.rid, None) is None:
            return
        stream.finished_at = now
        self.metrics.aborted.inc()
        with contextlib.suppress(EngineDeadError):
            text = "the server failed on its output"
            self._send(AbortRequest(rid=request.rid, message=text, session=request.session))

    def _note_tokens(self, stream: RequestStream, count: int, now: float) -> None:
        if stream.last_token_at is None:
            stream.first_token_at = now
            self.metrics.time_to_first_token.observe(now - stream.created_at)
        else:
            seconds = now - stream.last_token_at
            self.metrics.time_per_next_token.observe(seconds / count, count)
        stream.last_token_at = now

    def _end(self, stream: RequestStream, now: float, *, stopped_here: bool) -> None:
        """End a stream; notify the engine if a stop string was found here (`stopped_here`)."""
        rid, session = stream.request.rid, stream.request.session
        del self._streams[rid]
        stream.finished_at = now
        assert stream.finish is not None
        if stopped_here:
            count = stream.num_output_tokens
            with contextlib.suppress(EngineDeadError):
                self._send(StopRequest(rid=rid, num_output_tokens=count, session=session))
        if stream.finish.type == "abort":
            self.metrics.aborted.inc()
        else:
            self.metrics.e2e.observe(now - stream.created_at)
        self._log_end(stream, stream.finish.type)

    def _log_end(self, stream: RequestStream, how: str) -> None:
        if self._log_requests:
            facts = stream.request.rid, how, stream.num_output_tokens, stream.e2e_latency_s
            logger.info("request %r: %s after %d tokens and %.3f s", *facts)

"""What stands between clients and the engine: limits, tokenising, and the streams of answers.

Owns every request in flight as the clients see it. Shared by the HTTP server and the offline
`Engine`; synchronous and callback-based, so both asyncio and threads can sit on top. Must never
import jax or wait for anything.
"""

import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from sgl_jax.core.errors import EngineDeadError, InvalidRequestError
from sgl_jax.core.messages import (
    AbortRequest,
    EngineFailed,
    EngineMessage,
    FrontMessage,
    GenerateRequest,
    OutputBatch,
    Reply,
    SessionTurn,
    StopRequest,
)
from sgl_jax.core.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from sgl_jax.engine.channel import EngineClient
from sgl_jax.engine.request_limits import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    check_between,
    check_namespace,
    check_prompt_chars,
    check_prompt_tokens,
    check_rid,
    check_session_id,
    most_prompt_chars,
)
from sgl_jax.engine.request_stream import RequestStream
from sgl_jax.metrics.request_metrics import RequestMetrics
from sgl_jax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class EngineFacts(NamedTuple):
    """What the front must know of the engine to refuse what can never be served."""

    vocab_size: int
    max_context_len: int  # tokens of one request, prompt and output together
    max_request_tokens: int  # the same, and it fits a rank's KV memory
    dp_size: int

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> "EngineFacts":
        """Read the `info` of `EngineReady`."""
        return cls(*(int(info[name]) for name in cls._fields))


class Frontend:
    """Checks requests, sends them to the engine, and hands out their streams.

    Thread-safe: one lock guards the streams, and callbacks run outside it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        facts: EngineFacts,
        client: EngineClient,
        *,
        metrics: RequestMetrics | None = None,
        log_requests: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.facts = facts
        self.metrics = metrics or RequestMetrics()
        self._client = client
        self._log_requests = log_requests
        self._lock = threading.Lock()
        self._streams: dict[str, RequestStream] = {}
        self._on_reply: dict[str, Callable[[Reply], None]] = {}
        self._sequence = itertools.count()
        self._death: str | None = None

    @property
    def num_open(self) -> int:
        """Requests in flight."""
        return len(self._streams)

    @property
    def death(self) -> str | None:
        """Why the engine ended, or None while it lives."""
        return self._death

    # Requests

    @property
    def max_prompt_chars(self) -> int:
        """Characters beyond which a prompt is too long, whatever its tokens are."""
        return most_prompt_chars(self.facts.max_request_tokens, self.tokenizer.longest_token_chars)

    def check_text(self, text: str) -> None:
        """Raise `InvalidRequestError` for a prompt that is empty or surely too long."""
        if not text:
            raise InvalidRequestError("the prompt is empty", "text")
        self.check_length(len(text))

    def check_length(self, num_chars: int) -> None:
        """Raise `InvalidRequestError` for a prompt that is surely too long."""
        check_prompt_chars(num_chars, self.max_prompt_chars, self.facts.max_request_tokens)

    def check_num_tokens(self, num_tokens: int) -> None:
        """Raise `InvalidRequestError` for a prompt that leaves no room for an output."""
        check_prompt_tokens(num_tokens, self.facts.max_request_tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; refuses at once what is too long whatever its tokens are."""
        self.check_text(text)
        return self.tokenizer.encode(text)

    def prepare(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        rid: str | None = None,
        default_max_new_tokens: int | None = None,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        logprob_start_len: int = -1,
        dp_rank: int | None = None,
        session: SessionTurn | None = None,
        namespace: str = "",
        priority: int | None = None,
    ) -> GenerateRequest:
        """Check everything that can be checked before the engine sees it.

        Args:
            default_max_new_tokens: if `sampling` sets no limit; None means what the context
                leaves. A default never makes a request too long: for a session's turn the
                engine, which knows the history that is put before it, sees to that.
            session: of which the request is a turn, `prompt_ids` what it adds.
            namespace: of the cached prefixes that it may find and leave behind.
            priority: None is 0.

        Raises:
            InvalidRequestError: names the field and what is allowed.
        """
        self._check_prompt(prompt_ids)
        room = self.facts.max_request_tokens - len(prompt_ids)
        is_length_default = sampling.max_new_tokens is None
        if sampling.max_new_tokens is None:
            wanted = room if default_max_new_tokens is None else min(default_max_new_tokens, room)
            wanted = max(wanted, min(sampling.min_new_tokens, room))
            sampling = msgspec.structs.replace(sampling, max_new_tokens=wanted)
        sampling.validate(self.facts.vocab_size)
        assert sampling.max_new_tokens is not None
        if sampling.max_new_tokens > room:
            raise InvalidRequestError(
                f"the prompt ({len(prompt_ids)} tokens) and max_new_tokens "
                f"({sampling.max_new_tokens}) exceed the {self.facts.max_request_tokens} tokens "
                "that this server holds per request",
                "max_new_tokens",
            )
        check_between("top_logprobs_num", top_logprobs_num, 0, MAX_TOP_LOGPROBS)
        longest = len(prompt_ids) if session is None else self.facts.max_request_tokens
        check_between("logprob_start_len", logprob_start_len, -1, longest)
        if dp_rank is not None:
            check_between("dp_rank", dp_rank, 0, self.facts.dp_size - 1)
        check_namespace(namespace)
        priority = 0 if priority is None else priority
        check_between("priority", priority, MIN_PRIORITY, MAX_PRIORITY)
        rid = uuid.uuid4().hex if rid is None else rid
        check_rid(rid)
        if session is not None:
            session = self._check_session(session, rid)
        return GenerateRequest(
            rid=rid,
            input_ids=prompt_ids,
            sampling=sampling,
            return_logprob=return_logprob,
            top_logprobs_num=top_logprobs_num,
            logprob_start_len=logprob_start_len,
            dp_rank=dp_rank,
            session=session,
            is_length_default=is_length_default,
            namespace=namespace,
            priority=priority,
        )

    def start(
        self,
        request: GenerateRequest,
        on_ready: Callable[[], None],
        *,
        streaming: bool = True,
    ) -> RequestStream:
        """Send a prepared request.

        The engine knows it by a name of its own, never used twice: outputs that were under way
        when a request ended cannot reach a later one of the same name.

        Args:
            on_ready: called (on the engine's side) when `take` has something to give.
            streaming: False calls it only at the end.

        Raises:
            EngineDeadError: the engine has ended.
        """
        unique = msgspec.structs.replace(request, rid=f"{request.rid}#{next(self._sequence)}")
        stream = RequestStream(
            unique,
            self.tokenizer,
            self._lock,
            on_ready,
            client_rid=request.rid,
            streaming=streaming,
        )
        with self._lock:
            if self._death is not None:
                raise EngineDeadError(self._death)
            self._streams[unique.rid] = stream
        try:
            self._client.send(unique)
        except BaseException:
            with self._lock:
                self._streams.pop(unique.rid, None)
            raise
        self.metrics.count_arrival(stream.num_prompt_tokens)
        if self._log_requests:
            logger.info("request %s: %d prompt tokens", unique.rid, stream.num_prompt_tokens)
        return stream

    def abandon(self, stream: RequestStream, message: str = "the client went away") -> None:
        """Nobody reads `stream` any more: end it in the engine, if it has not ended. Once only.

        A turn of a session whose end nobody took never was: the engine, which may have ended it
        well, hears of it all the same.
        """
        rid, session = stream.request.rid, stream.request.session
        with self._lock:
            is_open = self._streams.pop(rid, None) is not None
            is_unseen = stream.drop_unseen_end()
        if is_open:
            self._log_end(stream, message)
            self.metrics.count_abort()
        if is_open or (is_unseen and session is not None):
            with contextlib.suppress(EngineDeadError):  # then it has ended there, too
                self._client.send(AbortRequest(rid=rid, message=message, session=session))

    def abort(self, client_rid: str) -> int:
        """Abort the requests a client named so; their streams end with an abort. Returns how many.

        "" aborts every request.
        """
        with self._lock:
            rids = [r for r, s in self._streams.items() if client_rid in ("", s.client_rid)]
        if client_rid == "":
            self._client.send(AbortRequest(abort_all=True))
        else:
            for rid in rids:
                self._client.send(AbortRequest(rid=rid))
        return len(rids)

    def ask(
        self, make_message: Callable[[str], FrontMessage], on_reply: Callable[[Reply], None]
    ) -> None:
        """Send a message that the engine answers; `make_message` gets the rid to put in it."""
        rid = f"ask#{next(self._sequence)}"
        with self._lock:
            if self._death is not None:
                raise EngineDeadError(self._death)
            self._on_reply[rid] = on_reply
        try:
            self._client.send(make_message(rid))
        except BaseException:
            with self._lock:
                self._on_reply.pop(rid, None)
            raise

    # The engine's side

    def handle(self, message: EngineMessage) -> None:
        """Take in one message of the engine."""
        if isinstance(message, OutputBatch):
            self._deliver(message)
        elif isinstance(message, Reply):
            with self._lock:
                on_reply = self._on_reply.pop(message.rid, None)
            if on_reply is not None:
                on_reply(message)
        elif isinstance(message, EngineFailed):
            self.fail(message.message)

    def fail(self, reason: str) -> None:
        """The engine has ended: so does everything that waits for it. The first reason stands."""
        with self._lock:
            if self._death is not None:
                return
            self._death = reason
            streams, self._streams = list(self._streams.values()), {}
            waiting, self._on_reply = self._on_reply, {}
            for stream in streams:
                stream.fail(EngineDeadError(reason))
        for stream in streams:
            stream.on_ready()
        for rid, on_reply in waiting.items():
            on_reply(Reply(rid=rid, ok=False, message=reason))

    def _deliver(self, batch: OutputBatch) -> None:
        """Feed the streams. Runs once per step, so what it does per token is kept to a minimum."""
        now = time.perf_counter()
        ready: list[RequestStream] = []
        num_tokens = 0
        with self._lock:
            streams = self._streams
            for rid, token in zip(batch.rids, batch.tokens, strict=True):
                stream = streams.get(rid)
                if stream is None:  # ended here already: overshoot
                    continue
                stream.accept_token(token)
                num_tokens += 1
                self._note_tokens(stream, 1, now)
                if stream.finish is not None:
                    self._end(stream, now, stopped_here=True)
                    ready.append(stream)
                elif stream.streaming:
                    ready.append(stream)
            for output in batch.outputs:
                stream = streams.get(output.rid)
                if stream is None:
                    continue
                before = stream.num_output_tokens
                stream.accept(output)
                gained = stream.num_output_tokens - before
                num_tokens += gained
                if gained:
                    self._note_tokens(stream, gained, now)
                if stream.finish is not None:
                    # It may have ended by itself beyond the stop string.
                    self._end(stream, now, stopped_here=stream.finish is not output.finish)
                if stream.streaming or stream.finish is not None:
                    ready.append(stream)
        self.metrics.count_generated(num_tokens)
        for stream in ready:
            stream.on_ready()

    def _note_tokens(self, stream: RequestStream, count: int, now: float) -> None:
        if stream.last_token_at is None:
            self.metrics.observe_first_token(now - stream.created_at)
        else:
            self.metrics.observe_next_tokens(now - stream.last_token_at, count)
        stream.last_token_at = now

    def _end(self, stream: RequestStream, now: float, *, stopped_here: bool) -> None:
        """`stopped_here`: a stop string ended it, which the engine has to be told."""
        del self._streams[stream.request.rid]
        stream.finished_at = now
        assert stream.finish is not None
        if stopped_here:
            with contextlib.suppress(EngineDeadError):
                self._client.send(
                    StopRequest(
                        rid=stream.request.rid,
                        num_output_tokens=stream.num_output_tokens,
                        session=stream.request.session,
                    )
                )
        if stream.finish.type == "abort":
            self.metrics.count_abort()
        else:
            self.metrics.count_finish(
                stream.num_prompt_tokens, stream.cached_tokens, now - stream.created_at
            )
        self._log_end(stream, stream.finish.type)

    def _log_end(self, stream: RequestStream, how: str) -> None:
        if self._log_requests:
            logger.info(
                "request %s: %s after %d tokens and %.3f s",
                stream.request.rid,
                how,
                stream.num_output_tokens,
                stream.e2e_latency_s,
            )

    def _check_session(self, turn: SessionTurn, rid: str) -> SessionTurn:
        """The turn under the name that its client gave it, and without a second BOS."""
        check_session_id(turn.id, "session_params.id")
        if turn.rid is not None:
            check_rid(turn.rid, "session_params.rid")
        most = self.facts.max_request_tokens
        check_between("session_params.offset", turn.offset, -most, most)
        return msgspec.structs.replace(turn, name=rid, bos_token_id=self.tokenizer.bos_token_id)

    def _check_prompt(self, prompt_ids: list[int]) -> None:
        if not prompt_ids:
            raise InvalidRequestError("the prompt is empty", "input_ids")
        self.check_num_tokens(len(prompt_ids))
        for token in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token < self.facts.vocab_size:
                raise InvalidRequestError(
                    f"the prompt holds token id {token}, outside the vocabulary "
                    f"[0, {self.facts.vocab_size})",
                    "input_ids",
                )

"""From prepared requests to an HTTP answer, streamed or whole.

One HTTP request may need several engine requests (`n`, lists of prompts). When the
client goes away or one of them fails, the others are aborted.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from sgl_jax.core.messages import FinishReason, GenerateRequest, TokenLogprobs
from sgl_jax.engine.frontend import Frontend
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.api_keys import caller_of
from sgl_jax.server.connection import CLIENT_GONE, LoopShare, while_connected
from sgl_jax.server.context import ServerContext
from sgl_jax.server.errors import abort_error, envelope, to_api_error
from sgl_jax.server.session_owner import owner_of

logger = logging.getLogger(__name__)

NO_NAMES: Mapping[str, str] = MappingProxyType({})
_PIECE_BYTES = 64 * 1024  # what is sent at a time
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass
class Answer:
    """All that one engine request gave."""

    stream: RequestStream
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.prompt_logprobs += chunk.prompt_logprobs
        self.finish = chunk.finish


class AnswerFormat(Protocol):
    """How one API family writes its answers."""

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        """The event lines (`data: ...`) for one chunk of choice `index`."""
        ...

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        """Event lines after the last chunk, before `[DONE]`."""
        ...

    def whole(self, answers: Sequence[Answer]) -> Any:
        """The answer that is not streamed, to be written as JSON."""
        ...


class StreamGroup:
    """The engine requests behind one HTTP request. Leaving the block aborts what still runs."""

    def __init__(
        self,
        frontend: Frontend,
        requests: Sequence[GenerateRequest],
        *,
        streaming: bool,
        names: Mapping[str, str] = NO_NAMES,
        sender: str = "",
        as_told: Callable[[str], str] = str,
    ) -> None:
        """Hold the requests; they start on entering the block.

        Args:
            names: the client's name of each field that the client calls otherwise than we do.
            sender: name of the API key.
            as_told: rewrites a message of the engine to the session ids that the caller knows.
        """
        self._frontend = frontend
        self._requests = requests
        self._streaming = streaming
        self._names = names
        self._sender = sender
        self._as_told = as_told
        self._ready: dict[int, None] = {}  # ordered set of indices into `streams`
        self._wake = asyncio.Event()
        self.streams: list[RequestStream] = []
        self.num_open = len(requests)

    async def __aenter__(self) -> Self:
        self._frontend.check_room(len(self._requests))  # all or none
        share = LoopShare()
        try:
            for index, request in enumerate(self._requests):
                self.streams.append(self._start(index, request))
                await share.pause()
        except BaseException:
            self._abandon()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._abandon()

    async def batches(self) -> AsyncIterator[list[tuple[int, Chunk]]]:
        """Chunks with the index of their request, several at a time when they wait.

        Raises:
            ApiError: a request was aborted with an HTTP status, such as 503 for a full queue.
            EngineDeadError, ShuttingDownError: the engine has ended, or the server ends now.
        """
        while self.num_open:
            await self._wake.wait()
            self._wake.clear()
            ready, self._ready = self._ready, {}
            batch = []
            for index in ready:
                chunk = self.streams[index].take()
                if chunk is None:
                    continue
                if chunk.finish is not None:
                    failure = abort_error(chunk.finish, self._names, self._as_told)
                    if failure is not None:
                        raise failure
                    self.num_open -= 1
                elif self.streams[index].error is not None:
                    self._signal(index)  # the error comes with the next `take`
                batch.append((index, chunk))
            if batch:
                yield batch

    def _start(self, index: int, request: GenerateRequest) -> RequestStream:
        return self._frontend.start(
            request, lambda: self._signal(index), streaming=self._streaming, sender=self._sender
        )

    def _signal(self, index: int) -> None:
        self._ready[index] = None
        self._wake.set()

    def _abandon(self) -> None:
        for stream in self.streams:
            self._frontend.abandon(stream)
            # It held this group, which holds it: a circle around all prompts.
            stream.on_ready = _nothing


def _nothing() -> None:
    """In place of `on_ready` once no consumer waits."""


async def respond(
    request: Request,
    context: ServerContext,
    requests: Sequence[GenerateRequest],
    answer_format: AnswerFormat,
    *,
    streaming: bool,
    names: Mapping[str, str],
) -> Response:
    """Run `requests` and answer in `answer_format`; stops as soon as the client goes away.

    Errors of the engine name fields by `names`, as for `client_names`.
    """
    group = StreamGroup(
        context.frontend,
        requests,
        streaming=streaming,
        names=names,
        sender=caller_of(request).name,
        as_told=owner_of(request).as_told,
    )
    if streaming:
        return EventStream(group, answer_format, context.reader_timeout_s)
    answers = await while_connected(request.receive, _gather(group))
    if answers is None:
        return Response(status_code=CLIENT_GONE)
    return json_response(answer_format.whole(answers))


def json_response(value: Any) -> Response:
    """`value` (structs, dictionaries) as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def event(value: Any) -> bytes:
    """One server-sent event with `value` as JSON."""
    return b"data: %b\n\n" % msgspec.json.encode(value)


class ReaderStalledError(Exception):
    """A client takes nothing more of its stream."""


class EventStream(Response):
    """A streamed answer. Headers wait for the first chunk, so that a refusal is a plain error.

    Talks ASGI itself: chunks are bytes already, and a layer less per event is most of its cost.
    What a client that does not read makes the server hold is bounded: it gets the stream in pieces
    of `_PIECE_BYTES`, what comes meanwhile waits unwritten in the `RequestStream`, and after
    `reader_timeout_s` without room for the next piece its requests are aborted.
    """

    def __init__(
        self, group: StreamGroup, answer_format: AnswerFormat, reader_timeout_s: float
    ) -> None:
        super().__init__()
        self._reader_timeout_s = reader_timeout_s
        self._group = group
        self._format = answer_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._pump(send))

    async def _pump(self, send: Send) -> None:
        started = False
        async with self._group as group:
            try:
                async for batch in group.batches():
                    if not started:
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                        )
                        started = True
                    await self._send_events(send, batch)
            except ReaderStalledError as error:
                logger.info("a stream ends: %s", error)
            except Exception as error:
                if not started:
                    raise
                failure = to_api_error(error)
                with contextlib.suppress(ReaderStalledError):
                    await self._send(send, b"data: %b\n\n" % envelope(failure), more=False)
                if failure.status_code == 500:
                    raise

    async def _send_events(self, send: Send, batch: Sequence[tuple[int, Chunk]]) -> None:
        """The events of a batch, and the end of the stream if it is the last."""
        group, events = self._group, bytearray()
        for index, chunk in batch:
            events += self._format.event(index, chunk, group.streams[index])
            if len(events) >= _PIECE_BYTES:
                await self._send(send, events, more=True)
                events = bytearray()
        if not group.num_open:
            events += self._format.closing(group.streams) + b"data: [DONE]\n\n"
        if events:
            await self._send(send, events, more=bool(group.num_open))

    async def _send(self, send: Send, data: bytes | bytearray, *, more: bool) -> None:
        """Raises `ReaderStalledError` if there is no room for a piece of `data` in time."""
        for start in range(0, len(data), _PIECE_BYTES):
            end = start + _PIECE_BYTES
            try:
                async with asyncio.timeout(self._reader_timeout_s):
                    await send(_body(bytes(data[start:end]), more=more or end < len(data)))
            except TimeoutError as error:
                text = f"its client read less than {_PIECE_BYTES} bytes in "
                raise ReaderStalledError(f"{text}{self._reader_timeout_s:g} s") from error


async def _gather(group: StreamGroup) -> list[Answer]:
    async with group:
        answers = [Answer(stream) for stream in group.streams]
        async for batch in group.batches():
            for index, chunk in batch:
                answers[index].add(chunk)
        return answers


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}

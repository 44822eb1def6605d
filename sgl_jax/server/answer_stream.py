"""Turns engine requests into an HTTP response, streamed or whole.

One HTTP request may need several engine requests (`n`, lists of prompts). If the client goes away
or one of them fails, the rest are aborted.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any, Self

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.engine.front.request_stream import Chunk, RequestStream
from sgl_jax.server.errors import ApiError, abort_error, envelope, refuse_abort, to_api_error
from sgl_jax.server.guards.connection import (
    BackpressuredSend,
    LoopShare,
    unless_gone,
    while_connected,
)
from sgl_jax.server.guards.keys import caller_of, owner_of
from sgl_jax.server.references import references_of

# Reduced token limit of an answer, sent if the requested limit exceeded the context.
CLAMPED_HEADER = "x-max-tokens-clamped"
EVENT = b"data: %b\n\n"  # a server-sent event with this JSON
DONE = EVENT % b"[DONE]"
_PIECE_BYTES = 64 * 1024  # per send
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
START = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
BODY = {"type": "http.response.body"}  # without a body: the end


class AnswerFormat(ABC):
    """Writes the answers of one API."""

    @abstractmethod
    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        """Return the event lines (`data: ...`) for one chunk of choice `index`."""

    @abstractmethod
    def whole(self, chunks: Sequence[Chunk], streams: Sequence[RequestStream]) -> Any:
        """Return the non-streamed answer, to be encoded as JSON. Each chunk is a whole choice."""

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        """Return event lines after the last chunk."""
        return DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the event lines that end a stream in which an error occurred."""
        return EVENT % envelope(error)


class StreamGroup:
    """The engine requests of one HTTP request. Leaving the block aborts unfinished requests."""

    def __init__(
        self,
        request: Request,
        requests: list[GenerateRequest],
        *,
        streaming: bool | None,
        names: Mapping[str, str],
        kept_tokens: Set[int] = frozenset(),
    ) -> None:
        """Hold the requests, which start when the block is entered; then `requests` is cleared.

        Args:
            names: engine field -> the client's name of it, where they differ.
            kept_tokens: special tokens that stay in the text even if special tokens are skipped.
        """
        self.request = request
        self._frontend = references_of(request).frontend
        self._requests = requests
        self.is_streaming = bool(streaming)
        self._names = names
        self._kept_tokens = kept_tokens
        self._sender = caller_of(request).name
        self._for_client = owner_of(request, requests[0].tenant).for_client
        self._ready: dict[int, None] = {}  # ordered set of indices in `streams`
        self._waiting: asyncio.Future[None] | None = None  # until a stream is ready
        self.streams: list[RequestStream] = []
        self.num_open = len(requests)

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the answer in addition to `content-type` and `cache-control`."""
        clamped = getattr(self.request.state, "clamped_max_tokens", None)
        return {} if clamped is None else {CLAMPED_HEADER: str(clamped)}

    async def __aenter__(self) -> Self:
        share = LoopShare()
        try:
            for index, request in enumerate(self._requests):
                on_ready = partial(self._signal, index)
                stream = self._frontend.submit(
                    request,
                    on_ready,
                    streaming=self.is_streaming,
                    sender=self._sender,
                    kept_tokens=self._kept_tokens,
                    num_together=len(self._requests) - index,
                )
                self.streams.append(stream)
                await share.pause()
            self._requests.clear()  # their images are long
        except BaseException:
            self._abandon()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._abandon()

    async def next_batch(self) -> list[tuple[int, Chunk]]:
        """Return all ready chunks, at least one, each with the index of its request.

        Raises:
            ApiError: a request was aborted with an HTTP status, such as 503 for a full queue.
            EngineDeadError, ShuttingDownError: the engine has ended, or the server ends now.
        """
        batch: list[tuple[int, Chunk]] = []
        while not batch:
            if not self._ready:
                self._waiting = asyncio.get_running_loop().create_future()
                await self._waiting
            ready, self._ready = self._ready, {}
            for index in ready:
                chunk = self.streams[index].take()
                if chunk is None:
                    continue
                if chunk.finish is not None:
                    failure = abort_error(chunk.finish, self._names, self._for_client)
                    if failure is not None:
                        raise failure
                    self.num_open -= 1
                elif self.streams[index].error is not None:
                    self._signal(index)  # the next `take` raises the error
                batch.append((index, chunk))
        return batch

    async def collect(self) -> list[Chunk]:
        """Return one chunk per request, with its whole output. The group must not be streaming."""
        chunks: dict[int, Chunk] = {}
        async with self:
            while self.num_open:
                chunks.update(await self.next_batch())
        return [chunks[index] for index in range(len(chunks))]

    def _signal(self, index: int) -> None:
        self._ready[index] = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _abandon(self) -> None:
        for stream in self.streams:
            self._frontend.abandon(stream)
            # Break the reference cycle with this group, which would keep all prompts alive.
            stream.on_ready = lambda: None


async def whole_chunks(group: StreamGroup) -> list[Chunk]:
    """Return one whole chunk per request. Raises `ApiError` 503 if a request was aborted."""
    chunks = await unless_gone(group.request.receive, group.collect())
    for chunk in chunks:
        refuse_abort(chunk.finish)
    return chunks


async def respond(group: StreamGroup, answer_format: AnswerFormat) -> Response:
    """Run the requests of `group` and write their answers, until the client goes away."""
    if group.is_streaming:
        return EventStream(group, answer_format)
    chunks = await unless_gone(group.request.receive, group.collect())

    def write() -> Response:
        response = json_response(answer_format.whole(chunks, group.streams))
        response.headers.update(group.headers)
        return response

    # Encode the thousands of log-probabilities of a prompt in a thread, so that streams continue.
    has_many = any(chunk.prompt_logprobs for chunk in chunks)
    return await asyncio.to_thread(write) if has_many else write()


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def named_event(name: str, value: Any) -> bytes:
    return b"event: %b\n" % name.encode() + EVENT % msgspec.json.encode(value)


class EventStream(Response):
    """A streamed answer. Headers are sent with the first chunk, so that a refusal is a plain error.

    It speaks ASGI directly, because chunks are already bytes and the framework layer would dominate
    the cost of an event. A client that does not read uses bounded memory: it gets the stream in
    pieces of `_PIECE_BYTES`, and later output waits unwritten in the `RequestStream`. If the next
    piece has no room for `reader_timeout_s`, the client's requests are aborted.
    """

    def __init__(self, group: StreamGroup, answer_format: AnswerFormat) -> None:
        super().__init__()
        self._reader_timeout_s = references_of(group.request).reader_timeout_s
        self._group = group
        self._format = answer_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._pump(send))

    async def _pump(self, send: Send) -> None:
        started = False
        async with (
            BackpressuredSend(send, self._reader_timeout_s) as backpressured_send,
            self._group as group,
        ):
            try:
                while group.num_open:
                    batch = await group.next_batch()
                    if not started:
                        own = [
                            (name.encode(), value.encode()) for name, value in group.headers.items()
                        ]
                        await backpressured_send({**START, "headers": [*_HEADERS, *own]})
                        started = True
                    events = b""
                    for number, (index, chunk) in enumerate(batch, 1):
                        events += self._format.event(index, chunk, group.streams[index])
                        if number == len(batch) and not group.num_open:
                            events += self._format.closing(group.streams)
                        if number == len(batch) or len(events) >= _PIECE_BYTES:
                            for at in range(0, len(events), _PIECE_BYTES):
                                piece = events[at : at + _PIECE_BYTES]
                                await backpressured_send({**BODY, "body": piece, "more_body": True})
                            events = b""
            except Exception as error:
                if not started:
                    raise
                failure = to_api_error(error)
                await backpressured_send({**BODY, "body": self._format.failure(failure)})
                if failure.status_code == 500:
                    raise
            else:
                await backpressured_send(BODY)

"""Bounds the memory and time that one connection can take.

uvicorn's parser accepts heads of any size, queues every pipelined request, and waits without limit
for the rest of a request. This subclass of its protocol enforces limits by closing connections.
With too many connections, it closes the one that has waited longest for a complete request head, so
that connections that never send a whole head cannot keep clients out.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable
from typing import Any, ClassVar, Self, TypeVar

from starlette.types import Message, Receive, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from sgl_jax.server.errors import ApiError, envelope
from sgl_jax.server.guards.limits import Limits

# Minimum ratio of body to framing bytes in a chunked body, beyond the limit of heads: chunks of 40
# bytes. Each chunk is a call of this class, so small chunks cost more than their bytes.
_LEAST_BYTES_PER_FRAMING = 8


class _RefusedError(Exception):
    """Ends the parser's work; the connection is closing."""


class GuardedHttpProtocol(HttpToolsProtocol):
    limits: ClassVar[Limits]
    # Connections of one server without a request, oldest first.
    waiting: ClassVar[dict["GuardedHttpProtocol", None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A request sent while the server closes is lost, so clients should close first.
        self.timeout_keep_alive = self.limits.keep_alive_timeout_s  # type: ignore[assignment]
        self._in_body = False
        # Bytes of the arriving request: of its body, and the rest.
        self._body_bytes = 0
        self._framing_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        # The request with the next answer, and later requests. uvicorn keeps only the last.
        self._unanswered: deque[RequestResponseCycle] = deque()

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()
        if len(self.connections) > self.limits.max_connections:
            if not self.waiting:
                self._refuse(503, "the server has too many connections")
                return
            next(iter(self.waiting))._close()
        self.waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._unset_keepalive_if_required()  # uvicorn keeps the timer after a reset
        self.waiting.pop(self, None)
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None:
            self._arm()
        self._framing_bytes += len(data)
        super().data_received(data)
        most = self.limits.max_head_bytes + self._body_bytes // _LEAST_BYTES_PER_FRAMING
        if self._framing_bytes > most and not self.transport.is_closing():
            self._refuse(431, f"the headers exceed {self.limits.max_head_bytes} bytes")

    # Parser

    def on_headers_complete(self) -> None:
        limits = self.limits
        self._in_body = True
        if len(self.url) > limits.max_url_bytes:
            self._refuse(414, f"the URL exceeds {limits.max_url_bytes} bytes")
            raise _RefusedError
        head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if head_bytes > limits.max_head_bytes:
            self._refuse(431, f"the headers exceed {limits.max_head_bytes} bytes")
            raise _RefusedError
        if len(self.pipeline) >= limits.max_pipelined_requests:
            self._refuse(429, "too many requests were sent before their answers were read")
            raise _RefusedError
        self.waiting.pop(self, None)
        cycle_before = self.cycle
        super().on_headers_complete()
        if self.cycle is not cycle_before:
            self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._framing_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._body_bytes = self._framing_bytes = 0
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if not self.transport.is_closing() and not self.pipeline:
            self.waiting[self] = None

    def send_400_response(self, msg: str) -> None:
        """Handle the end of parsing after invalid input or a refusal."""
        if not self.transport.is_closing():
            self._refuse(400, "this is not HTTP/1.1")

    # Ends

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self.limits.receive_timeout_s, self._on_late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_late(self) -> None:
        is_waiting_for_us = self.flow.read_paused or self._is_answering
        if is_waiting_for_us:
            self._arm()
        else:
            seconds = self.limits.receive_timeout_s
            self._refuse(408, f"the request did not arrive within {seconds:g} s")

    @property
    def _is_answering(self) -> bool:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return not self._in_body or cycle.response_started or bool(self.pipeline)

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection, with an answer unless another answer is due on it first."""
        is_answered = self._in_body and self.cycle is not None and self.cycle.response_complete
        if not self._is_answering and not is_answered:
            body = envelope(ApiError(status, message))
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d"
            retry = b"\r\nretry-after: 1" if status == 503 else b""
            is_head = self._in_body and self.parser.get_method() == b"HEAD"
            content = b"" if is_head else body  # an answer to HEAD has none
            parts = (STATUS_LINE[status], head % len(body), retry, b"\r\n\r\n", content)
            self.transport.write(b"".join(parts))
        self._close()

    def _close(self) -> None:
        self._disarm()
        self.waiting.pop(self, None)
        self.transport.close()


def guarded_protocol(limits: Limits) -> type[GuardedHttpProtocol]:
    """Return the protocol of a server with these limits, for uvicorn's `http` setting."""
    return type("ServerProtocol", (GuardedHttpProtocol,), {"limits": limits, "waiting": {}})


logger = logging.getLogger(__name__)
T = TypeVar("T")
CLIENT_GONE = 499  # nginx's status for a client that closed the connection; only logged


async def while_connected(receive: Receive, work: Awaitable[T]) -> T | None:
    """Await `work`. Return None if it was cancelled, for example because the client went away."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() and not working.cancelled() else None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, which never returns None. Raises `ApiError` 499 if the client goes away."""
    done = await while_connected(receive, work)
    if done is None:
        raise ApiError(CLIENT_GONE, "the client went away")
    return done


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class BackpressuredSend:
    """ASGI's `send` for a client that may stop reading.

    The task that enters is cancelled when a message has waited `patience_s` for room. One timer
    serves all messages: a timer for each would cost as much as a streamed token.
    """

    def __init__(self, send: Send, patience_s: float) -> None:
        self._send = send
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._deadline: float | None = None  # for the message being sent

    async def __call__(self, message: Message) -> None:
        self._deadline = self._loop.time() + self._patience_s
        await self._send(message)
        self._deadline = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(self._patience_s, self._look)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        """Check the deadline; runs at or after the deadline of each message that waits."""
        now = self._loop.time()
        if self._deadline is None or self._deadline > now:
            next_look = self._deadline or now + self._patience_s
            self._timer = self._loop.call_at(next_look, self._look)
            return
        logger.info("a stream ends: its client took nothing in %g s", self._patience_s)
        assert self._task is not None
        self._task.cancel()


_MOST_AT_ONCE_S = 0.005


class LoopShare:
    """Yields the event loop periodically during long work, which calls `pause` between parts."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def pause(self) -> None:
        """Yield the event loop if this work has held it for some milliseconds."""
        if time.perf_counter() - self._since > _MOST_AT_ONCE_S:
            await asyncio.sleep(0)
            self._since = time.perf_counter()

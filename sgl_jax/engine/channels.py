"""Channels that carry messages between the engine loop and the frontend. Must not import jax.

Within one process a channel is a pair of queues. Between processes it is a pair of connected Unix
sockets; the engine process inherits one end:

    front  EngineClient  <----- messages both ways, in order ----->  SocketChannel  engine

A message is a 4-byte little-endian length followed by msgpack. The sending thread passes it to the
kernel at once. If the other end does not keep up, a thread of the channel writes the rest, so a
send never blocks. The backlog is unbounded, because both ends limit the requests in flight. A
channel must never unpickle anything.
"""

import asyncio
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from sgl_jax.core.engine_messages import EngineMessage
from sgl_jax.core.errors import EngineDeadError
from sgl_jax.core.messages import FrontMessage

MAX_MESSAGE_BYTES = 2**31 - 1  # such as the experts of a prompt of a million tokens
_LENGTH_BYTES = 4
_READ_BYTES = 1 << 20
_SOCKET_BYTES = 4 << 20  # the kernel may allow less
_REST_TIMEOUT_S = 0.005  # for the rest of a partly received message
_CLOSE_TIMEOUT_S = 1.0


class ChannelError(RuntimeError):
    """A message is too large to send or cannot be decoded."""


class Channel(Protocol):
    """The engine's end of a channel."""

    def poll(self, timeout_s: float) -> list[FrontMessage]:
        """Return arrived messages in order, after waiting up to `timeout_s` for the first."""
        ...

    def send(self, message: EngineMessage) -> None:
        """Queue a message for the frontend without blocking. Thread-safe."""
        ...


class InProcessChannel:
    """A `Channel` within one process; the frontend puts messages into its `inbox`.

    Args:
        deliver: called with each message for the frontend, in the sending thread.
    """

    def __init__(self, deliver: Callable[[EngineMessage], None]) -> None:
        self.inbox: queue.SimpleQueue[FrontMessage] = queue.SimpleQueue()
        self._deliver = deliver

    def poll(self, timeout_s: float) -> list[FrontMessage]:
        messages: list[FrontMessage] = []
        try:
            if timeout_s > 0:
                messages.append(self.inbox.get(timeout=timeout_s))
            while True:
                messages.append(self.inbox.get_nowait())
        except queue.Empty:
            return messages

    def send(self, message: EngineMessage) -> None:
        self._deliver(message)


class _Messages:
    """One of two connected sockets, with the codecs of the messages. Any thread may send."""

    def __init__(self, end: socket.socket, received: Any) -> None:
        """Set up the socket `end`; `received` is the type of the messages that arrive."""
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._socket = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(received)
        self._arrived = bytearray()  # the start of an incomplete message
        self._has_peer = True
        self._backlog: deque[memoryview] = deque()
        # Guards the encoder and the backlog, and keeps messages in order.
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        self._is_closed = False

    def send(self, message: Any) -> None:
        """Queue a message. If the other end is closed, the message is dropped.

        Raises:
            ChannelError: the message is too large.
            EngineDeadError: this end is closed.
        """
        with self._changed:
            if self._is_closed:
                raise EngineDeadError("the connection to the engine is closed")
            data = bytearray(_LENGTH_BYTES)
            self._encoder.encode_into(message, data, _LENGTH_BYTES)
            length = len(data) - _LENGTH_BYTES
            if length > MAX_MESSAGE_BYTES:
                raise ChannelError(
                    f"a {type(message).__name__} of {length} bytes exceeds the "
                    f"{MAX_MESSAGE_BYTES} that one message may have"
                )
            data[:_LENGTH_BYTES] = length.to_bytes(_LENGTH_BYTES, "little")
            if not self._backlog:
                try:
                    written = self._socket.send(data)
                except BlockingIOError:
                    written = 0
                except OSError:  # closed there: `EngineProcess` reports the end of the engine
                    return
                if written == len(data):
                    return
                data = data[written:]
            self._backlog.append(memoryview(data))
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_on, name="channel", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Close the socket after waiting up to one second for sent messages to leave."""
        with self._changed:
            if self._is_closed:
                return
            self._changed.wait_for(lambda: not self._backlog, _CLOSE_TIMEOUT_S)
            self._is_closed = True
            self._backlog.clear()
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join()
        self._socket.close()

    def _write_on(self) -> None:
        may_write = select.poll()
        may_write.register(self._socket, select.POLLOUT)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog or self._is_closed)
                if self._is_closed:
                    return
            may_write.poll(int(_CLOSE_TIMEOUT_S * 1000))
            with self._changed:
                self._write_backlog()
                self._changed.notify_all()

    def _write_backlog(self) -> None:
        try:
            while self._backlog:
                first = self._backlog[0]
                written = self._socket.send(first)
                if written < len(first):
                    self._backlog[0] = first[written:]
                else:
                    self._backlog.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._backlog.clear()

    def _receive(self) -> list[Any]:
        """Return the complete messages received so far, in order. Raises `ChannelError`."""
        while self._has_peer:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._has_peer = bool(data)
            self._arrived += data
            if len(data) < _READ_BYTES:
                break
        payloads: list[bytes] = []
        start = 0
        with memoryview(self._arrived) as view:
            while len(view) - start >= _LENGTH_BYTES:
                begin = start + _LENGTH_BYTES
                length = int.from_bytes(view[start:begin], "little")
                if length > MAX_MESSAGE_BYTES:
                    raise ChannelError(f"undecodable message: it would have {length} bytes")
                if begin + length > len(view):
                    break
                start = begin + length
                payloads.append(bytes(view[begin:start]))
        del self._arrived[:start]
        try:
            return [self._decoder.decode(payload) for payload in payloads]
        except msgspec.MsgspecError as error:
            sizes = [len(payload) for payload in payloads]
            raise ChannelError(
                f"undecodable message, one of {sizes} bytes ({payloads[0][:40]!r}): {error}"
            ) from error


class SocketChannel(_Messages):
    """A `Channel` over a socket. Only the engine loop's thread may use it, except for `send`."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end, FrontMessage)
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)

    def poll(self, timeout_s: float) -> list[FrontMessage]:
        if timeout_s > 0:
            if not self._has_peer:  # the frontend's process has ended; this one will end too
                time.sleep(timeout_s)
            elif not self._readable.poll(int(timeout_s * 1000) + 1):
                return []
        messages = self._receive()
        # A long message arrives in several parts; without this loop each step would read only one.
        deadline = time.monotonic() + _REST_TIMEOUT_S if self._arrived else 0.0
        while self._arrived and self._has_peer and (left_s := deadline - time.monotonic()) > 0:
            self._readable.poll(left_s * 1000)
            messages += self._receive()
        return messages


class EngineClient(_Messages):
    """The frontend's end, on an asyncio loop. Only the loop's thread may create and use it.

    `engine_end`, the engine's end, is passed to the engine process and then closed here.
    """

    def __init__(self) -> None:
        end, self.engine_end = socket.socketpair()
        super().__init__(end, EngineMessage)
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(
        self,
        on_message: Callable[[EngineMessage], None],
        on_error: Callable[[ChannelError], None],
    ) -> None:
        """Call `on_message` on the running loop for each message of the engine, in order."""
        self._loop = asyncio.get_running_loop()

        def on_readable() -> None:
            try:
                messages = self._receive()
            except ChannelError as error:
                self._stop_listening()
                on_error(error)
                return
            if not self._has_peer:
                self._stop_listening()
            for message in messages:
                on_message(message)

        self._loop.add_reader(self._socket.fileno(), on_readable)

    def close(self) -> None:
        """Stop listening, and drop messages that cannot be sent within a second."""
        self._stop_listening()
        self.engine_end.close()
        super().close()

    def _stop_listening(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._loop = None

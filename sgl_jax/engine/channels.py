"""Channels that carry messages between the engine loop and the front. Must not import jax.

Within one process they are queues. Between processes they are two local ZeroMQ sockets, and
messages are msgpack:

    front  PUSH --- to_engine.sock ---> PULL  engine
    front  PULL <-- to_front.sock ----- PUSH  engine

The sockets are in a folder that only this user can enter. A channel must never unpickle anything,
and never block on a send. Its queues are unbounded, because both ends limit the requests in flight.

The engine binds both sockets and the front connects. ZeroMQ aborts a process that has bound a
socket and has no file descriptor left when a peer connects; the front must survive that, and a
connecting socket only tries again. A connecting PUSH socket also queues messages before the other
end is there. A bound one cannot, so the engine waits for the front once.
"""

import asyncio
import contextlib
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from sgl_jax.core.errors import EngineDeadError
from sgl_jax.core.messages import EngineMessage, FrontMessage

MAX_MESSAGE_BYTES = 256 * 2**20
_MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit is 107, terminator included
_FRONT_TIMEOUT_S = 20.0
_TO_ENGINE = "to_engine.sock"
_TO_FRONT = "to_front.sock"
_READABLE = int(zmq.POLLIN)


class ChannelError(RuntimeError):
    """A message is too large to send or cannot be decoded, or the front did not connect."""


class Channel(Protocol):
    """The engine's end of a channel."""

    def poll(self, timeout_s: float) -> list[FrontMessage]:
        """Messages that have arrived, in order; waits up to `timeout_s` (0: not at all)."""
        ...

    def send(self, message: EngineMessage) -> None:
        """Queue a message for the front; never blocks. Any thread may send."""
        ...


class InProcessChannel:
    """A `Channel` within one process; the front puts messages into its `inbox`.

    Args:
        deliver: called with each message for the front, in the thread that sends it.
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


class _Sockets:
    """A PUSH and a PULL socket, with the codecs of their messages. Any thread may send."""

    def __init__(self, pulled: Any) -> None:
        """`pulled`: the type of the messages that arrive."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        for socket in (self._push, self._pull):
            socket.set_hwm(0)
        self._sending = threading.Lock()  # held while `_push` and the encoder are used
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(pulled)

    def send(self, message: Any) -> None:
        # A peer that has ended reads nothing: `EngineProcess` reports the engine's end, and the
        # engine's process ends with the front.
        with self._sending, contextlib.suppress(zmq.Again):
            data = self._encoder.encode(message)
            if len(data) > MAX_MESSAGE_BYTES:
                raise ChannelError(
                    f"a {type(message).__name__} of {len(data)} bytes exceeds the "
                    f"{MAX_MESSAGE_BYTES} that one message may have"
                )
            self._push.send(data, zmq.NOBLOCK)

    def _receive(self) -> list[Any]:
        """Messages that have arrived, in order."""
        messages: list[Any] = []
        # Cheaper than the exception of a `recv` that finds nothing, which would end every drain.
        while int(self._pull.get(zmq.EVENTS)) & _READABLE:
            data = self._pull.recv(zmq.NOBLOCK)
            try:
                messages.append(self._decoder.decode(data))
            except msgspec.MsgspecError as error:
                raise ChannelError(
                    f"undecodable message of {len(data)} bytes ({data[:40]!r}): {error}"
                ) from error
        return messages


class ZmqChannel(_Sockets):
    """A `Channel` over ZeroMQ. Only the engine loop's thread may use it, except for `send`."""

    def __init__(self, folder: str) -> None:
        """Bind the sockets in `folder`, which the front made (`ZmqEngineClient.folder`).

        Raises `ChannelError` if the front does not connect within `_FRONT_TIMEOUT_S`.
        """
        super().__init__(FrontMessage)
        self._pull.bind(f"ipc://{folder}/{_TO_ENGINE}")
        self._push.bind(f"ipc://{folder}/{_TO_FRONT}")
        if not self._push.poll(int(_FRONT_TIMEOUT_S * 1000), zmq.POLLOUT):
            self._context.destroy(linger=0)
            raise ChannelError(f"the front has not connected within {_FRONT_TIMEOUT_S:g} s")

    def poll(self, timeout_s: float) -> list[FrontMessage]:
        if timeout_s > 0 and not self._pull.poll(int(timeout_s * 1000) + 1):
            return []
        return self._receive()

    def close(self) -> None:
        """Close, with one second for sent messages to leave."""
        self._context.destroy(linger=1000)


class ZmqEngineClient(_Sockets):
    """The front's end, on an asyncio loop. Only the loop's thread may create and use it."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="sgl_jax-")  # mode 0700
        if len(self.folder.encode()) + 1 + len(_TO_ENGINE) > _MAX_SOCKET_PATH_BYTES:
            Path(self.folder).rmdir()
            raise ChannelError(
                f"the path of the temporary folder is too long for a socket: {self.folder}; "
                "set TMPDIR to a shorter one"
            )
        super().__init__(EngineMessage)
        # Retried until the engine is there.
        self._push.connect(f"ipc://{self.folder}/{_TO_ENGINE}")
        self._pull.connect(f"ipc://{self.folder}/{_TO_FRONT}")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def send(self, message: FrontMessage) -> None:
        """Queue a message for the engine; never blocks. Raises `EngineDeadError` once closed."""
        if self._closed:
            raise EngineDeadError("the connection to the engine is closed")
        super().send(message)

    def listen(
        self,
        on_message: Callable[[EngineMessage], None],
        on_error: Callable[[ChannelError], None],
    ) -> None:
        """Call `on_message` on the running loop for each message of the engine, in order.

        ZeroMQ signals its file descriptor once per change, not as long as there is something to
        read. So every wake-up drains the socket, and the first read does not wait for one.
        """
        self._loop = asyncio.get_running_loop()

        def on_readable() -> None:
            try:
                messages = self._receive()
            except ChannelError as error:
                on_error(error)
                return
            for message in messages:
                on_message(message)

        self._loop.add_reader(self._pull.fileno(), on_readable)
        self._loop.call_soon(on_readable)

    def close(self) -> None:
        """Stop listening, drop messages not sent within a second, and remove the folder."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._pull.fileno())
        self._context.destroy(linger=1000)
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the sockets' folder. If the process is about to exit, this replaces `close`."""
        shutil.rmtree(self.folder, ignore_errors=True)

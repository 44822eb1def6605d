"""The channel's end on every host except host 0 (`multihost.channel`). Must not import jax."""

import queue
import threading
import time
from collections.abc import Callable

import zmq

from sgl_jax.core.array_codec import make_decoder, make_encoder
from sgl_jax.core.engine_messages import HostFigures
from sgl_jax.core.errors import GroupError
from sgl_jax.core.progress import Progress
from sgl_jax.multihost.channel import (
    BEAT_INTERVAL_S,
    BEATS,
    COMMANDS,
    LAST_MESSAGES_S,
    WATCH_INTERVAL_S,
    Keys,
    curve_socket,
    end_process,
    url_of,
)
from sgl_jax.multihost.commands import (
    CallExecutor,
    Command,
    CoordinatorHeartbeat,
    Draw,
    End,
    Ended,
    Failed,
    Hello,
    JoinRefused,
    Launch,
    Lost,
    MovePages,
    StopRequested,
    ToCoordinator,
    ToWorker,
    Welcome,
    WorkerHeartbeat,
)
from sgl_jax.multihost.group import MultihostGroup

_COMMANDS = (Launch, MovePages, Draw, CallExecutor, End)


class WorkerLink:
    """The channel's end on any other host. Only one thread may `receive`; any may call the rest.

    Attributes:
        on_lost: called once, on a thread of the link, if host 0 is lost; ends the process by
            default.
        background_end, figures: sent with each heartbeat (`WorkerHeartbeat`).
    """

    def __init__(
        self, group: MultihostGroup, secret: str, host_timeout_s: float, progress: Progress
    ) -> None:
        self.on_lost: Callable[[str], object] = end_process
        self.background_end: str | None = None
        self.figures = HostFigures()
        self._progress = progress
        self._group = group
        self._host_timeout_s = host_timeout_s
        self._encoder = make_encoder()
        self._decoder = make_decoder(ToWorker)
        self._num_commands = self._num_announced = 0
        self._caught_up_s = time.monotonic()
        self._to_send: queue.SimpleQueue[ToCoordinator] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._beat_thread = threading.Thread(target=self._beat_on, name="hosts", daemon=True)
        self._context = zmq.Context()
        self._commands, self._beats = (
            self._connected(secret, topic) for topic in (COMMANDS, BEATS)
        )

    def _connected(self, secret: str, topic: bytes) -> "zmq.Socket[bytes]":
        own, coordinator = Keys.derived(secret, "worker"), Keys.derived(secret, "coordinator")
        options = {zmq.CURVE_SERVERKEY: coordinator.public}
        connection = curve_socket(self._context, zmq.XSUB, own, options)
        connection.connect(url_of(self._group))
        connection.send(b"\1" + topic)  # subscribes
        return connection

    def meet(self, facts: dict[str, str], timeout_s: float) -> None:
        """Wait until all hosts have joined, then start heartbeats to host 0.

        Raises:
            GroupError: host 0 refused, or did not reply in time (absent, or with another key).
        """
        self._commands.send(self._encoder.encode(Hello(self._group.rank, facts)))
        if not self._commands.poll(int(timeout_s * 1000)):
            raise GroupError(
                f"host 0 at {self._group.address}:{self._group.port} did not reply within "
                f"{timeout_s:g} s: it is not there, waits for other hosts, or has another key"
            )
        message = self._received(self._commands)
        if isinstance(message, JoinRefused):
            raise GroupError(message.reason)
        if not isinstance(message, Welcome):
            raise GroupError("the group serves already, without this process")
        self._beat_thread.start()

    def receive(self, timeout_s: float) -> Command | None:
        """Return the next command, or None if none comes in time. Raises GroupError if commands
        were lost, or for another message."""
        has_command = self._commands.poll(int(timeout_s * 1000))
        now = time.monotonic()
        if has_command or self._num_announced <= self._num_commands:
            self._caught_up_s = now
        elif now - self._caught_up_s > self._host_timeout_s:
            raise GroupError("commands of host 0 were lost on the way")
        if not has_command:
            return None
        message = self._received(self._commands)
        if not isinstance(message, _COMMANDS):
            raise GroupError(f"host 0 sent a {type(message).__name__} in place of a command")
        self._num_commands += 1
        return message

    def leave(self) -> None:
        self._to_send.put(StopRequested(self._group.rank))

    def end(self) -> None:
        """Report that this host has left, after `End`."""
        self._to_send.put(Ended(self._group.rank))

    def fail(self, reason: str) -> None:
        self._to_send.put(Failed(self._group.rank, reason))

    def close(self) -> None:
        """Send the last messages, and close."""
        self._stopped.set()
        if self._beat_thread.is_alive():
            self._beat_thread.join()
        for each in (self._commands, self._beats):
            each.close(linger=int(LAST_MESSAGES_S * 1000))
        self._context.term()

    def _received(self, connection: "zmq.Socket[bytes]") -> ToWorker:
        _topic, payload = connection.recv_multipart()
        message: ToWorker = self._decoder.decode(payload)
        return message

    def _beat(self) -> WorkerHeartbeat:
        report = self._progress.report
        text = (
            ""
            if report is None
            else f"{report.phase}: {report.done} of {report.total} {report.unit}"
        )
        return WorkerHeartbeat(self._group.rank, self.figures, text, self.background_end)

    def _beat_on(self) -> None:
        heard_s, next_beat_s = time.monotonic(), 0.0
        while True:
            is_last = self._stopped.wait(WATCH_INTERVAL_S)
            while not self._to_send.empty():
                self._beats.send(self._encoder.encode(self._to_send.get()), zmq.NOBLOCK)
            if is_last:
                return
            now = time.monotonic()
            if now >= next_beat_s:
                next_beat_s = now + BEAT_INTERVAL_S
                self._beats.send(self._encoder.encode(self._beat()), zmq.NOBLOCK)
            while self._beats.poll(0):
                heard_s, message = now, self._received(self._beats)
                if isinstance(message, Lost):
                    self.on_lost(message.reason)
                    return
                if isinstance(message, CoordinatorHeartbeat):
                    self._num_announced = message.num_commands
            if now - heard_s > self._host_timeout_s:
                self.on_lost(f"host 0 was silent for {self._host_timeout_s:g} s")
                return

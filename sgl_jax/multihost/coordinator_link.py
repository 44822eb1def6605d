"""The channel's end on host 0 (`multihost.channel`). Must not import jax."""

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from sgl_jax.core.array_codec import make_decoder, make_encoder
from sgl_jax.core.engine_messages import HostFigures, HostReport
from sgl_jax.core.errors import GroupError
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
    Command,
    CoordinatorHeartbeat,
    End,
    Ended,
    Failed,
    Hello,
    JoinRefused,
    Lost,
    StopRequested,
    ToCoordinator,
    ToWorker,
    Welcome,
    WorkerHeartbeat,
)
from sgl_jax.multihost.description import differences
from sgl_jax.multihost.group import MultihostGroup

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 10.0  # for the other hosts to leave, after `End`
# XPUB reports the first subscription to a topic, and the end of the last.
_SUBSCRIPTIONS = [change + topic for change in (b"\0", b"\1") for topic in (COMMANDS, BEATS)]
_MAX_MESSAGE_BYTES = 1 << 20  # from a host to host 0


class _OneKey:
    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self._public


class _WorkerState:
    def __init__(self) -> None:
        self.last_beat_s = time.monotonic()
        self.figures = HostFigures()
        self.progress = ""
        self.background_end: str | None = None


class CoordinatorLink:
    """The channel's end on host 0. Any thread may send.

    Attributes:
        on_lost: called once, on a thread of the link, if a host is lost; ends the process by
            default.
        on_leaving: called on that thread when another host has received a signal to end.
    """

    def __init__(self, group: MultihostGroup, secret: str, host_timeout_s: float) -> None:
        """Listen at the group's address. Raises OSError if it cannot be bound."""
        self.on_lost: Callable[[str], object] = end_process
        self.on_leaving: Callable[[int], object] = lambda rank: None
        self._group = group
        self._host_timeout_s = host_timeout_s
        self._encoder = make_encoder()
        self._decoder = make_decoder(ToCoordinator)
        self._workers = {rank: _WorkerState() for rank in range(1, group.num_hosts)}
        self._num_commands = 0
        self._num_ended = 0
        self._is_ending = False
        self._all_ended = threading.Event()
        self._stopped = threading.Event()
        self._watch_thread = threading.Thread(target=self._watch, name="hosts", daemon=True)
        # ZeroMQ's sockets belong to one thread at a time.
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        worker = Keys.derived(secret, "worker")
        self._authenticator.configure_curve_callback("*", _OneKey(worker.public))
        own = Keys.derived(secret, "coordinator")
        options = {
            zmq.CURVE_SERVER: 1,
            zmq.MAXMSGSIZE: _MAX_MESSAGE_BYTES,
        }
        self._socket = curve_socket(self._context, zmq.XPUB, own, options)
        try:
            self._socket.bind(url_of(group))
        except zmq.ZMQError as error:
            self._free()
            raise OSError(
                f"--dist-init-addr {group.address}:{group.port} cannot be bound: {error}"
            ) from error

    def meet(self, facts: dict[str, str], timeout_s: float) -> None:
        """Wait for the hello of every other host, then watch them.

        Args:
            facts: facts of this host, which all other hosts must match.

        Raises:
            GroupError: a host did not come in time, or its facts differ. All others were told, and
                the link is closed.
        """
        deadline = time.monotonic() + timeout_s
        told: dict[int, dict[str, str]] = {}
        refusals: list[str] = []
        while len(told) < len(self._workers) and not refusals:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                absent = [rank for rank in self._workers if rank not in told]
                refusals = [f"after {timeout_s:g} s the hosts {absent} have not come"]
                break
            if self._socket.poll(int(min(left_s, 1.0) * 1000)):
                for message in self._received():
                    if isinstance(message, Hello) and message.rank not in self._workers:
                        refusals.append(f"--node-rank {message.rank} is not below --nnodes")
                    elif isinstance(message, Hello) and message.rank in told:
                        refusals.append(f"two hosts have --node-rank {message.rank}")
                    elif isinstance(message, Hello):
                        logger.info("host %d has come", message.rank)
                        told[message.rank] = message.facts
        for rank, theirs in sorted(told.items()):
            refusals += [f"host {rank}: {text}" for text in differences(facts, theirs)]
        if refusals:
            reason = "the hosts cannot serve as one engine: " + "; ".join(refusals)
            self._send_all(JoinRefused(reason))
            self._free()  # the process ends now, and would drop what is not sent yet
            raise GroupError(reason)
        now = time.monotonic()
        for worker in self._workers.values():
            worker.last_beat_s = now
        self._send_all(Welcome())
        self._watch_thread.start()

    def send(self, command: Command) -> None:
        """Queue a command for every other host without blocking."""
        payload = self._encoder.encode(command)
        with self._lock:
            self._num_commands += 1
            self._send_payload(payload)

    @property
    def background_ends(self) -> list[str | None]:
        return [worker.background_end for worker in self._workers.values()]

    def reports(self) -> list[HostReport]:
        now = time.monotonic()
        return [
            HostReport(rank, own.figures, now - own.last_beat_s)
            for rank, own in self._workers.items()
        ]

    def close(self) -> None:
        """End the other hosts, wait some seconds until they have left, and free the port."""
        if self._watch_thread.is_alive():
            self._is_ending = True
            self.send(End())
            if not self._all_ended.wait(_END_TIMEOUT_S):
                logger.warning("not every host has ended in time")
            self._stopped.set()
            self._watch_thread.join()
        self._free()

    def _free(self) -> None:
        if self._socket.closed:
            return
        self._socket.close(linger=int(LAST_MESSAGES_S * 1000))
        self._authenticator.stop()
        self._context.term()

    def _send_all(self, message: ToWorker) -> None:
        with self._lock:
            self._send_payload(self._encoder.encode(message))

    def _send_payload(self, payload: bytes, topic: bytes = COMMANDS) -> None:
        # A disconnected host gets no message; the watch thread finds it silent.
        self._socket.send(topic, zmq.SNDMORE)
        self._socket.send(payload)

    def _received(self) -> list[ToCoordinator]:
        messages: list[ToCoordinator] = []
        with self._lock:
            while True:
                try:
                    payload = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    return messages
                if payload in _SUBSCRIPTIONS:
                    continue
                try:
                    messages.append(self._decoder.decode(payload))
                except msgspec.MsgspecError as error:
                    logger.error("a host's message cannot be read: %s", error)

    def _watch(self) -> None:
        next_beat_s = 0.0
        while not self._stopped.wait(WATCH_INTERVAL_S):
            for message in self._received():
                self._handle(message)
            now = time.monotonic()
            if now >= next_beat_s:
                next_beat_s = now + BEAT_INTERVAL_S
                with self._lock:
                    self._send_payload(
                        self._encoder.encode(CoordinatorHeartbeat(self._num_commands)), BEATS
                    )
            for rank, worker in self._workers.items():
                if now - worker.last_beat_s > self._host_timeout_s:
                    self._lose(f"host {rank} was silent for {self._host_timeout_s:g} s")
                    return

    def _handle(self, message: ToCoordinator) -> None:
        match message:
            case WorkerHeartbeat(rank=rank):
                own = self._workers[rank]
                own.last_beat_s, own.figures = time.monotonic(), message.figures
                own.background_end = message.background_end
                if message.progress not in ("", own.progress):
                    logger.info("host %d: %s", rank, message.progress)
                own.progress = message.progress
            case StopRequested(rank=rank):
                self.on_leaving(rank)
            case Ended():
                self._num_ended += 1
                if self._num_ended == len(self._workers):
                    self._all_ended.set()
            case Failed(rank=rank, reason=reason):
                self._lose(f"host {rank} failed: {reason}")
            case Hello(rank=rank):
                self._lose(f"host {rank} was started again")

    def _lose(self, reason: str) -> None:
        self._stopped.set()
        if self._is_ending:
            logger.warning("while the hosts end, %s", reason)
            return
        reason = f"the group of hosts ends: {reason}"
        with self._lock:
            self._send_payload(self._encoder.encode(Lost(reason)), BEATS)
        time.sleep(WATCH_INTERVAL_S)  # for that message to leave
        self.on_lost(reason)

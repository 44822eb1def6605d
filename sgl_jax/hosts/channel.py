"""The authenticated channel between host 0 and the other hosts. Must not import jax.

    host 0   LeaderLink   ROUTER  <===== CurveZMQ over TCP =====>  DEALER x 2  FollowerLink   host k

Host k has two connections: `k`, by which commands come, in order, to its loop; and `k beat`, by
which both sides show every second that they live, on a thread beside the loop. A host that is
silent for longer than allowed is lost, and so is a command that did not arrive: both end the group.

Both sides derive their Curve25519 keys from the group's secret, so a peer without it completes no
handshake: it is refused before one of its messages is read, and a recorded handshake cannot be
replayed (http://curvezmq.org). Sending never blocks: ZeroMQ's own thread encrypts and writes.
"""

import hashlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from sgl_jax.core.array_codec import make_decoder, make_encoder
from sgl_jax.core.engine_messages import HostFigures
from sgl_jax.core.errors import GroupError
from sgl_jax.core.exit_codes import HOST_LOST
from sgl_jax.core.progress import Progress
from sgl_jax.hosts.commands import (
    Beat,
    CallExecutor,
    Command,
    Draw,
    End,
    Ended,
    Failed,
    Hello,
    Launch,
    LeaderBeat,
    Leaving,
    Lost,
    NoGroup,
    ToFollower,
    ToLeader,
    Welcome,
)
from sgl_jax.hosts.description import differences
from sgl_jax.hosts.group import HostGroup

logger = logging.getLogger(__name__)

BEAT_INTERVAL_S = 1.0
_WATCH_INTERVAL_S = 0.1
_LAST_MESSAGES_S = 2.0  # for messages that were sent before a link closes
_END_TIMEOUT_S = 10.0  # for the other hosts to leave, after `End`
_MAX_MESSAGE_BYTES = 1 << 20  # of a host to host 0
_COMMANDS = (Launch, Draw, CallExecutor, End)


def end_process(reason: str) -> None:
    """End this process at once, since its group is lost; the reason is the last line it prints."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(HOST_LOST)


class _Keys(NamedTuple):
    """Curve25519 keys as ZeroMQ writes them (Z85)."""

    public: bytes
    secret: bytes

    @classmethod
    def derived(cls, secret: str, role: str) -> "_Keys":
        """The keys of a role, 'leader' or 'follower', in the group of `secret`."""
        salt = f"sgl_jax hosts {role}".encode()
        raw = hashlib.scrypt(secret.encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=32)
        encoded: bytes = z85.encode(raw)
        return cls(zmq.curve_public(encoded), encoded)


class _OneKey:
    """Accepts the followers' key and no other, for ZeroMQ's authenticator."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self._public


class _FollowerState:
    """Host 0's record of another host."""

    def __init__(self) -> None:
        self.last_beat_s = time.monotonic()
        self.figures = HostFigures()
        self.progress = ""
        self.background_end: str | None = None


class HostReport(NamedTuple):
    """A host's figures, as its last beat had them."""

    rank: int
    figures: HostFigures
    silent_s: float  # since that beat


class LeaderLink:
    """Host 0's end. Any thread may send.

    Attributes:
        on_lost: called once, on a thread of the link, if another host is lost; ends the process
            unless it is replaced.
        on_leaving: called on that thread when another host has got a signal to end.
    """

    def __init__(self, group: HostGroup, secret: str, host_timeout_s: float) -> None:
        """Listen at the group's address. Raises OSError if that is impossible."""
        self.on_lost: Callable[[str], object] = end_process
        self.on_leaving: Callable[[int], object] = lambda rank: None
        self._group = group
        self._host_timeout_s = host_timeout_s
        self._encoder = make_encoder()
        self._decoder = make_decoder(ToLeader)
        self._followers = {rank: _FollowerState() for rank in range(1, group.num_hosts)}
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
        follower = _Keys.derived(secret, "follower")
        self._authenticator.configure_curve_callback("*", _OneKey(follower.public))
        own = _Keys.derived(secret, "leader")
        options = {
            zmq.CURVE_SERVER: 1,
            zmq.MAXMSGSIZE: _MAX_MESSAGE_BYTES,
            zmq.ROUTER_MANDATORY: 1,
        }
        self._socket = _socket(self._context, zmq.ROUTER, own, options)
        try:
            self._socket.bind(_url(group))
        except zmq.ZMQError as error:
            self._free()
            raise OSError(
                f"--dist-init-addr {group.address}:{group.port} cannot be bound: {error}"
            ) from error

    def meet(self, facts: dict[str, str], timeout_s: float) -> None:
        """Wait for the hello of every other host; then watch them.

        Args:
            facts: of this host, to which all others must be equal.

        Raises:
            GroupError: a host did not come in time, or its facts differ.
        """
        deadline = time.monotonic() + timeout_s
        told: dict[int, dict[str, str]] = {}
        refusals: list[str] = []
        while len(told) < len(self._followers) and not refusals:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                absent = [rank for rank in self._followers if rank not in told]
                refusals = [f"after {timeout_s:g} s the hosts {absent} have not come"]
                break
            if self._socket.poll(int(min(left_s, 1.0) * 1000)):
                for message in self._received():
                    if isinstance(message, Hello) and message.rank not in self._followers:
                        refusals.append(f"--node-rank {message.rank} is not below --nnodes")
                    elif isinstance(message, Hello):
                        logger.info("host %d has come", message.rank)
                        told[message.rank] = message.facts
        for rank, theirs in sorted(told.items()):
            refusals += [f"host {rank}: {text}" for text in differences(facts, theirs)]
        if refusals:
            reason = "the hosts cannot serve as one engine: " + "; ".join(refusals)
            self._send_all(NoGroup(reason))
            raise GroupError(reason)
        now = time.monotonic()
        for follower in self._followers.values():
            follower.last_beat_s = now
        self._send_all(Welcome())
        self._watch_thread.start()

    def send(self, command: Command) -> None:
        """Queue a command for every other host; never blocks."""
        payload = self._encoder.encode(command)
        with self._lock:
            self._num_commands += 1
            self._send_payload(payload)

    @property
    def background_ends(self) -> list[str | None]:
        """`Beat.background_end` of every other host."""
        return [follower.background_end for follower in self._followers.values()]

    def reports(self) -> list[HostReport]:
        """The last figures of every other host."""
        now = time.monotonic()
        return [
            HostReport(rank, own.figures, now - own.last_beat_s)
            for rank, own in self._followers.items()
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
        self._socket.close(linger=int(_LAST_MESSAGES_S * 1000))
        self._authenticator.stop()
        self._context.term()

    def _send_all(self, message: ToFollower) -> None:
        with self._lock:
            self._send_payload(self._encoder.encode(message))

    def _send_payload(self, payload: bytes, suffix: str = "") -> None:
        frame = zmq.Frame(payload)
        for rank in self._followers:
            try:
                self._socket.send(f"{rank}{suffix}".encode(), zmq.SNDMORE | zmq.NOBLOCK)
                self._socket.send(frame, zmq.NOBLOCK, copy=False)
            except zmq.ZMQError as error:  # not connected: the watch finds it silent
                logger.debug("host %d gets no message: %s", rank, error)

    def _received(self) -> list[ToLeader]:
        messages: list[ToLeader] = []
        with self._lock:
            while True:
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return messages
                try:
                    messages.append(self._decoder.decode(frames[-1]))
                except msgspec.MsgspecError as error:
                    logger.error("a host's message cannot be read: %s", error)

    def _watch(self) -> None:
        next_beat_s = 0.0
        while not self._stopped.wait(_WATCH_INTERVAL_S):
            for message in self._received():
                self._handle(message)
            now = time.monotonic()
            if now >= next_beat_s:
                next_beat_s = now + BEAT_INTERVAL_S
                with self._lock:
                    self._send_payload(
                        self._encoder.encode(LeaderBeat(self._num_commands)), " beat"
                    )
            for rank, follower in self._followers.items():
                if now - follower.last_beat_s > self._host_timeout_s:
                    self._lose(f"host {rank} was silent for {self._host_timeout_s:g} s")
                    return

    def _handle(self, message: ToLeader) -> None:
        match message:
            case Beat(rank=rank):
                own = self._followers[rank]
                own.last_beat_s, own.figures = time.monotonic(), message.figures
                own.background_end = message.background_end
                if message.progress not in ("", own.progress):
                    logger.info("host %d: %s", rank, message.progress)
                own.progress = message.progress
            case Leaving(rank=rank):
                self.on_leaving(rank)
            case Ended():
                self._num_ended += 1
                if self._num_ended == len(self._followers):
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
            self._send_payload(self._encoder.encode(Lost(reason)), " beat")
        time.sleep(_WATCH_INTERVAL_S)  # for that message to leave
        self.on_lost(reason)


class FollowerLink:
    """The end of any other host. `receive` belongs to one thread; any thread may call the others.

    Attributes:
        on_lost: called once, on a thread of the link, if host 0 is lost; ends the process unless
            it is replaced.
        background_end, figures: sent with each beat, see `Beat`.
    """

    def __init__(
        self, group: HostGroup, secret: str, host_timeout_s: float, progress: Progress
    ) -> None:
        """`progress` is sent with each beat, for host 0's log."""
        self.on_lost: Callable[[str], object] = end_process
        self.background_end: str | None = None
        self.figures = HostFigures()
        self._progress = progress
        self._group = group
        self._host_timeout_s = host_timeout_s
        self._encoder = make_encoder()
        self._decoder = make_decoder(ToFollower)
        self._num_commands = self._num_announced = 0
        self._caught_up_s = time.monotonic()
        self._to_send: queue.SimpleQueue[ToLeader] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._beat_thread = threading.Thread(target=self._beat_on, name="hosts", daemon=True)
        self._context = zmq.Context()
        self._commands, self._beats = (
            self._connected(secret, name) for name in (f"{group.rank}", f"{group.rank} beat")
        )

    def _connected(self, secret: str, name: str) -> "zmq.Socket[bytes]":
        own, leader = _Keys.derived(secret, "follower"), _Keys.derived(secret, "leader")
        options = {zmq.CURVE_SERVERKEY: leader.public, zmq.ROUTING_ID: name.encode()}
        connection = _socket(self._context, zmq.DEALER, own, options)
        connection.connect(_url(self._group))
        return connection

    def meet(self, facts: dict[str, str], timeout_s: float) -> None:
        """Wait until all hosts have come; then show host 0 that this one lives.

        Raises:
            GroupError: host 0 did not reply in time (it is not there, or has another key), or
                refused.
        """
        self._commands.send(self._encoder.encode(Hello(self._group.rank, facts)))
        if not self._commands.poll(int(timeout_s * 1000)):
            raise GroupError(
                f"host 0 at {self._group.address}:{self._group.port} did not reply within "
                f"{timeout_s:g} s: it is not there, waits for other hosts, or has another key"
            )
        message = self._decoder.decode(self._commands.recv())
        if isinstance(message, NoGroup):
            raise GroupError(message.reason)
        self._beat_thread.start()

    def receive(self, timeout_s: float) -> Command | None:
        """The next command; None if none comes in time.

        Raises GroupError if commands were lost, or for another message.
        """
        has_command = self._commands.poll(int(timeout_s * 1000))
        now = time.monotonic()
        if has_command or self._num_announced <= self._num_commands:
            self._caught_up_s = now
        elif now - self._caught_up_s > self._host_timeout_s:
            raise GroupError("commands of host 0 were lost on the way")
        if not has_command:
            return None
        message = self._decoder.decode(self._commands.recv())
        if not isinstance(message, _COMMANDS):
            raise GroupError(f"host 0 sent a {type(message).__name__} in place of a command")
        self._num_commands += 1
        return message

    def leave(self) -> None:
        """Request the end of the engine."""
        self._to_send.put(Leaving(self._group.rank))

    def end(self) -> None:
        """Report that this host has left, after `End`."""
        self._to_send.put(Ended(self._group.rank))

    def fail(self, reason: str) -> None:
        """Report that this host cannot go on."""
        self._to_send.put(Failed(self._group.rank, reason))

    def close(self) -> None:
        """Send the last messages, and close."""
        self._stopped.set()
        if self._beat_thread.is_alive():
            self._beat_thread.join()
        for each in (self._commands, self._beats):
            each.close(linger=int(_LAST_MESSAGES_S * 1000))
        self._context.term()

    def _beat(self) -> Beat:
        report = self._progress.report
        text = (
            ""
            if report is None
            else f"{report.phase}: {report.done} of {report.total} {report.unit}"
        )
        return Beat(self._group.rank, self.figures, text, self.background_end)

    def _beat_on(self) -> None:
        heard_s, next_beat_s = time.monotonic(), 0.0
        while True:
            is_last = self._stopped.wait(_WATCH_INTERVAL_S)
            while not self._to_send.empty():
                self._beats.send(self._encoder.encode(self._to_send.get()), zmq.NOBLOCK)
            if is_last:
                return
            now = time.monotonic()
            if now >= next_beat_s:
                next_beat_s = now + BEAT_INTERVAL_S
                self._beats.send(self._encoder.encode(self._beat()), zmq.NOBLOCK)
            while self._beats.poll(0):
                heard_s, message = now, self._decoder.decode(self._beats.recv())
                if isinstance(message, Lost):
                    self.on_lost(message.reason)
                    return
                if isinstance(message, LeaderBeat):
                    self._num_announced = message.num_commands
            if now - heard_s > self._host_timeout_s:
                self.on_lost(f"host 0 was silent for {self._host_timeout_s:g} s")
                return


def _socket(
    context: "zmq.Context[Any]", kind: int, own: _Keys, options: Mapping[Any, int | bytes]
) -> "zmq.Socket[bytes]":
    made: zmq.Socket[bytes] = context.socket(kind)
    # No limit of queued messages: steps in flight are few, so queues stay short.
    shared = {zmq.IPV6: 1, zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.LINGER: 0}
    keys = {zmq.CURVE_PUBLICKEY: own.public, zmq.CURVE_SECRETKEY: own.secret}
    for option, value in {**shared, **keys, **options}.items():
        made.setsockopt(option, value)
    return made


def _url(group: HostGroup) -> str:
    """The address as ZeroMQ takes it, for a bind too: a number in place of a name."""
    found = socket.getaddrinfo(group.address, group.port, type=socket.SOCK_STREAM)
    address = str(found[0][4][0])
    return f"tcp://[{address}]:{group.port}" if ":" in address else f"tcp://{address}:{group.port}"

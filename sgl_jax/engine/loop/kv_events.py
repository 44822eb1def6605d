"""Publishes changes of the prefix caches, for routers that choose an engine by a cached prefix.

The format is vLLM's and SGLang's: msgpack over ZeroMQ. Each data-parallel rank has a PUB socket at
a separate port. A message has three frames: topic, sequence number (8 bytes, big-endian), and batch
(`KVEventBatch`). A subscriber that finds a gap in the numbers sends a first number to the ROUTER
socket. It gets the buffered messages from there on, then a message with the number -1.

The engine loop passes the events of a turn to a thread, which encodes and sends them. A replay is
sent as fast as its subscriber reads: if the subscriber's queue is full, the thread keeps the
remaining batches and tries again later.

Nothing is authenticated or encrypted, and the events hold the token ids of all prompts.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Literal, TypeAlias

import msgspec
import zmq

from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree.block_log import BlockEvent, BlockLog, BlocksCleared, BlocksStored

logger = logging.getLogger(__name__)
_END = -1
_DEVICE = "GPU"  # the medium's name in the format, for device memory of any kind
_WAKE = "inproc://kv-events"
_OF_THIS_MACHINE = ("ipc://", "inproc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:")
_NUMBER_BYTES = 8
# Concurrent replays per rank; each may hold `buffer_steps` batches that left the buffer.
_MAX_REPLAYS = 8
_REPLAY_QUEUE = 100  # messages queued in a socket for a slow subscriber
_REPLAY_POLL_MS = 5
_REPLAY_TIMEOUT_S = 60.0  # without any message read
_END_TIMEOUT_S = 5.0
_Socket: TypeAlias = "zmq.Socket[bytes]"
_Context: TypeAlias = "zmq.Context[_Socket]"


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of `--kv-events-config`, JSON.

    Attributes:
        endpoint: address of rank 0's PUB socket. Rank k adds k to the port, or appends `_dpk`.
        replay_endpoint: address of rank 0's ROUTER socket, with the same rule; None: no replay.
        buffer_steps: number of batches kept for a replay, for each rank.
        hwm: messages queued for a slow subscriber before it loses some.
        max_queue_size: batches queued for the thread; later events join a later batch.
        topic: topic of all messages.
    """

    publisher: Literal["null", "zmq"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def read(cls, text: str | None) -> "KVEventsConfig":
        """Parse the setting; None publishes nothing. Raises ValueError for invalid text."""
        if text is None:
            return cls(publisher="null")
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"--kv-events-config: {error}") from error


class KVCacheEvent(
    msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True, tag=True
):
    """Encoded as an array: the type's name, then its fields."""


class BlockStored(KVCacheEvent, frozen=True):
    """Consecutive blocks of `block_size` tokens each were stored."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class BlockRemoved(KVCacheEvent, frozen=True):
    """Blocks were removed."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent, frozen=True):
    """All blocks of the rank were removed."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """The events of a turn of the engine loop; `ts` in seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class _Replay:
    """The rest of a replay for subscriber `client`, and the time when it last took a message."""

    def __init__(self, client: bytes, messages: list[tuple[bytes, bytes]]) -> None:
        self.client = client
        self.messages = deque(messages)
        self.last_s = time.monotonic()


class _RankSockets:
    """One rank's sockets, next sequence number, batches kept for replay, and active replays."""

    def __init__(self, config: KVEventsConfig, dp_rank: int, context: "_Context") -> None:
        self._topic = config.topic.encode()
        self._next = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._publisher = context.socket(zmq.PUB)
        self._publisher.set_hwm(config.hwm)
        self.router: _Socket | None = None
        self.replays: list[_Replay] = []
        try:
            _open(self._publisher, _of_rank(config.endpoint, dp_rank))
            if config.replay_endpoint is not None:
                self.router = context.socket(zmq.ROUTER)
                # Report a full queue as an error; the default drops the message.
                self.router.set(zmq.ROUTER_MANDATORY, 1)
                self.router.set(zmq.SNDHWM, _REPLAY_QUEUE)
                _open(self.router, _of_rank(config.replay_endpoint, dp_rank))
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"--kv-events-config: rank {dp_rank}: {error}") from error

    def send(self, payload: bytes) -> None:
        number = self._next.to_bytes(_NUMBER_BYTES)
        self._next += 1
        self._kept.append((number, payload))
        self._publisher.send_multipart((self._topic, number, payload))

    def start_replays(self) -> None:
        """Read requests for a replay up to the limit; further requests wait in the socket. A
        request that is not a sequence number gets only the end message."""
        assert self.router is not None
        while len(self.replays) < _MAX_REPLAYS and self.router.poll(0):
            client, *_, first = self.router.recv_multipart()
            is_number = len(first) == _NUMBER_BYTES
            messages = [each for each in self._kept if is_number and each[0] >= first]
            end = (_END.to_bytes(_NUMBER_BYTES, signed=True), b"")
            self.replays.append(_Replay(client, [*messages, end]))

    def continue_replays(self) -> None:
        """Send each subscriber as much as its queue accepts, and give up after a timeout. A
        subscriber with two requests gets one replay after the other."""
        left: dict[bytes, list[_Replay]] = {}
        for replay in self.replays:
            if replay.client in left or not self._has_ended(replay):
                left.setdefault(replay.client, []).append(replay)
        self.replays = [replay for replays in left.values() for replay in replays]

    def _has_ended(self, replay: _Replay) -> bool:
        assert self.router is not None
        try:
            while replay.messages:
                message = (replay.client, b"", *replay.messages[0])
                self.router.send_multipart(message, zmq.NOBLOCK)
                replay.messages.popleft()
                replay.last_s = time.monotonic()
        except zmq.Again:
            if time.monotonic() - replay.last_s < _REPLAY_TIMEOUT_S:
                return False
            logger.warning("a subscriber of KV events reads no replay: it gets no more of it")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the subscriber has disconnected
                raise
        return True

    def close(self) -> None:
        for socket in (self._publisher, self.router):
            if socket is not None:
                socket.close(linger=0)


class KVEventPublisher:
    """Publishes the events of `logs`, one log per rank, with blocks of `block_size` tokens.

    Raises ValueError if an endpoint cannot be opened.
    """

    def __init__(self, config: KVEventsConfig, logs: Sequence[BlockLog], block_size: int) -> None:
        self._logs = logs
        self._block_size = block_size
        self._most_queued = config.max_queue_size
        self._encoder = msgspec.msgpack.Encoder()
        self._context: _Context = zmq.Context()
        self._ranks: list[_RankSockets] = []
        try:
            for dp_rank in range(len(logs)):
                self._ranks.append(_RankSockets(config, dp_rank, self._context))
        except ValueError:
            self._close_sockets()
            raise
        self._batches: SimpleQueue[tuple[int, float, list[BlockEvent]]] = SimpleQueue()
        self._wake = self._context.socket(zmq.PUSH)
        self._woken = self._context.socket(zmq.PULL)
        self._woken.bind(_WAKE)
        self._wake.connect(_WAKE)
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Queue the events since the last call for sending."""
        if self._batches.qsize() >= self._most_queued:
            return
        has_any = False
        for dp_rank, log in enumerate(self._logs):
            if events := log.take():
                self._batches.put((dp_rank, time.time(), events))
                has_any = True
        if has_any:
            self._wake_thread()

    def _wake_thread(self) -> None:
        with contextlib.suppress(zmq.Again):  # an earlier wake-up is still unread
            self._wake.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        self.publish()
        self._is_closing = True
        self._wake_thread()
        self._thread.join()
        self._wake.close(linger=0)
        self._woken.close(linger=0)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for rank in self._ranks:
            rank.close()
        # This has been observed to hang, although all sockets were closed.
        end = threading.Thread(target=self._context.term, name="kv-events-end", daemon=True)
        end.start()
        end.join(_END_TIMEOUT_S)
        if end.is_alive():
            logger.warning("ZeroMQ did not end within %g s: it is left as it is", _END_TIMEOUT_S)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        ranks = [rank for rank in self._ranks if rank.router is not None]
        while True:
            for rank in ranks:
                rank.start_replays()
                rank.continue_replays()
                # A request over the limit must not wake the thread.
                is_full = len(rank.replays) == _MAX_REPLAYS
                poller.register(rank.router, 0 if is_full else zmq.POLLIN)
            has_replays = any(rank.replays for rank in ranks)
            found = dict(poller.poll(_REPLAY_POLL_MS if has_replays else None))
            if self._woken in found:
                self._woken.recv()
                is_closing = self._is_closing  # read before the queue is emptied
                while not self._batches.empty():
                    self._send(*self._batches.get())
                if is_closing:
                    return

    def _send(self, dp_rank: int, ts: float, events: list[BlockEvent]) -> None:
        batch = KVEventBatch(ts, [self._written(event) for event in events], dp_rank)
        self._ranks[dp_rank].send(self._encoder.encode(batch))

    def _written(self, event: BlockEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
        if isinstance(event, BlocksCleared):
            return AllBlocksCleared()
        hashes = event.hashes.tolist()
        if not isinstance(event, BlocksStored):
            return BlockRemoved(hashes, _DEVICE)
        tokens = event.tokens.tolist()
        return BlockStored(hashes, event.parent, tokens, self._block_size, None, _DEVICE)


def open_kv_events(
    config: KVEventsConfig, memories: Sequence[RankMemory]
) -> KVEventPublisher | None:
    """Return the publisher of `config`, or None. Call it before the first lease.

    Raises ValueError if an endpoint cannot be opened.
    """
    if config.publisher == "null":
        return None
    for endpoint in (config.endpoint, config.replay_endpoint):
        if endpoint is not None and not endpoint.startswith(_OF_THIS_MACHINE):
            logger.warning(
                "--kv-events-config: whoever can reach %s gets the token ids of all prompts, "
                "without a key; tcp://127.0.0.1:PORT and ipc://PATH are of this machine only",
                endpoint,
            )
    logs = [memory.log_blocks() for memory in memories]
    return KVEventPublisher(config, logs, memories[0].page_size)


def _of_rank(endpoint: str, dp_rank: int) -> str:
    """Return the endpoint of a rank; rank 0 uses `endpoint` unchanged."""
    if not dp_rank:
        return endpoint
    address, colon, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp:") and port.isdigit():
        return f"{address}{colon}{int(port) + dp_rank}"
    return f"{endpoint}_dp{dp_rank}"


def _open(socket: _Socket, endpoint: str) -> None:
    """Bind to an address of this machine, connect to any other, as vLLM does."""
    is_own = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    if is_own or "127.0.0.1" in endpoint:
        socket.bind(endpoint)
    else:
        socket.connect(endpoint)

"""An independent subscriber rebuilds the caches' blocks from the published events."""

import contextlib
import json
import random
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from sgl_jax.engine.loop import kv_events
from sgl_jax.engine.loop.kv_events import KVEventPublisher, KVEventsConfig, open_kv_events
from sgl_jax.engine.offline import Engine
from sgl_jax.mem_cache.tree.block_log import BlockLog
from sgl_jax.scheduler.events import Flush
from tests.live.live_server import free_port
from tests.mem_cache.tree_model import held_blocks
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.support.waiting import until

TIMEOUT_MS = 10_000
DEMO = Path(__file__).parents[3] / "models" / "demo"


class Subscriber:
    """Written by the format alone: nothing of the publisher's code is used."""

    def __init__(self, folder: Path, dp_rank: int) -> None:
        suffix = f"_dp{dp_rank}" if dp_rank else ""
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(b"blocks")
        self.socket.connect(f"ipc://{folder}/events{suffix}")
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(f"ipc://{folder}/replay{suffix}")
        self.socket.rcvtimeo = self.replay.rcvtimeo = TIMEOUT_MS
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}  # parent and tokens
        self.next_number = 0
        self.num_events = 0
        self.dp_rank = dp_rank

    def read(self, num_batches: int, lost: frozenset[int] = frozenset()) -> None:
        """Read up to batch number `num_batches`, except the `lost` ones; replay what lacks."""
        while self.next_number < num_batches:
            topic, number, payload = self.socket.recv_multipart()
            assert topic == b"blocks"
            if int.from_bytes(number) in lost:
                continue
            if int.from_bytes(number) > self.next_number:
                self.fill_gap()
            if int.from_bytes(number) == self.next_number:
                self.apply(payload)

    def fill_gap(self) -> None:
        self.replay.send_multipart((b"", self.next_number.to_bytes(8)))
        while True:
            _, number, payload = self.replay.recv_multipart()
            if int.from_bytes(number, signed=True) == -1:
                return
            assert int.from_bytes(number) == self.next_number
            self.apply(payload)

    def apply(self, payload: bytes) -> None:
        self.next_number += 1
        _, events, dp_rank = msgspec.msgpack.decode(payload)
        assert dp_rank == self.dp_rank
        for name, *fields in events:
            self.num_events += 1
            match name:
                case "BlockStored":
                    self.store(*fields)
                case "BlockRemoved":
                    for block in fields[0]:
                        del self.blocks[block]
                case "AllBlocksCleared":
                    self.blocks.clear()

    def store(
        self,
        hashes: list[int],
        parent: int | None,
        tokens: list[int],
        block_size: int,
        *others: object,
    ) -> None:
        assert others == (None, "GPU")
        assert len(tokens) == len(hashes) * block_size
        assert parent is None or parent in self.blocks
        for i, block in enumerate(hashes):
            assert block not in self.blocks
            self.blocks[block] = parent, tuple(tokens[i * block_size : (i + 1) * block_size])
            parent = block

    def close(self) -> None:
        self.context.destroy(linger=0)


class Published:
    """A scheduler of two ranks that evicts all the time, its publisher, and its subscribers."""

    def __init__(self, folder: Path, buffer_steps: int) -> None:
        sizes = make_sizes(dp_size=2, page_size=4, num_pages=40, num_rows=6)
        self.driver = Driver(sizes)
        self.ranks = self.driver.scheduler.ranks
        config = KVEventsConfig(
            endpoint=f"ipc://{folder}/events",
            replay_endpoint=f"ipc://{folder}/replay",
            buffer_steps=buffer_steps,
            topic="blocks",
        )
        logs = [rank.memory.log_blocks() for rank in self.ranks]
        self.publisher = KVEventPublisher(config, logs, sizes.page_size)
        self.subscribers = [Subscriber(folder, dp_rank) for dp_rank in range(2)]
        self.num_batches = [0, 0]
        self.rng = random.Random(0)
        self.num_requests = 0

    def step(self) -> None:
        if self.driver.scheduler.num_waiting < 4:
            stem = [self.rng.randrange(3)] * self.rng.randint(1, 24)
            prompt = stem + self.rng.choices(range(9), k=self.rng.randint(1, 30))
            self.num_requests += 1
            self.driver.submit(
                generate(
                    str(self.num_requests),
                    prompt,
                    self.rng.randint(1, 8),
                    namespace=self.rng.choice(["", "other"]),
                )
            )
        self.driver.step()
        self.publish()

    def publish(self) -> None:
        for dp_rank, rank in enumerate(self.ranks):
            log = rank.memory.cache.tree.block_log
            assert log is not None
            self.num_batches[dp_rank] += bool(log._events)
        self.publisher.publish()

    def flush(self) -> None:
        self.driver.run()
        self.driver.scheduler.handle(Flush())
        self.publish()

    def check(self, lost: frozenset[int] = frozenset()) -> None:
        for rank, subscriber, count in zip(
            self.ranks, self.subscribers, self.num_batches, strict=True
        ):
            subscriber.read(count, lost)
            cache = rank.memory.cache
            assert subscriber.blocks.keys() == held_blocks(cache)
            expected = set()
            for node in cache.nodes():
                pages = node.key.reshape(-1, 4).tolist()
                expected |= {*zip(node.page_hashes.tolist(), map(tuple, pages), strict=True)}
            found = {(block, tokens) for block, (_, tokens) in subscriber.blocks.items()}
            assert found == expected

    def close(self) -> None:
        self.publisher.close()
        for subscriber in self.subscribers:
            subscriber.close()


@pytest.fixture
def published(tmp_path: Path):
    ranks = Published(tmp_path, buffer_steps=1000)
    yield ranks
    ranks.close()


def run(published: Published, num_events: int) -> None:
    while sum(each.num_events for each in published.subscribers) < num_events:
        for _ in range(100):
            published.step()
        published.check()
        if published.rng.random() < 0.1:
            published.flush()
            published.check()


def test_events_rebuild_the_blocks_of_each_rank(published: Published) -> None:
    run(published, num_events=2000)


@pytest.mark.long
def test_many_events_rebuild_the_blocks_of_each_rank(published: Published) -> None:
    run(published, num_events=100_000)


def test_a_gap_is_filled_by_a_replay(published: Published) -> None:
    for _ in range(300):
        published.step()
    published.check(lost=frozenset(range(5, 40)) | {0, 60})


def test_a_replay_has_the_kept_batches_alone(tmp_path: Path) -> None:
    published = Published(tmp_path, buffer_steps=10)
    try:
        while min(published.num_batches) < 30:
            published.step()
        subscriber = published.subscribers[0]
        subscriber.socket.recv_multipart()  # the thread has begun
        numbers = []
        while not numbers or numbers[-2] + 1 < published.num_batches[0]:
            subscriber.replay.send_multipart((b"", (0).to_bytes(8)))
            numbers = []
            while not numbers or numbers[-1] >= 0:
                _, number, _ = subscriber.replay.recv_multipart()
                numbers.append(int.from_bytes(number, signed=True))
        assert numbers[:-1] == list(range(published.num_batches[0]))[-10:]
    finally:
        published.close()


def test_a_malformed_replay_request_gets_the_end_alone(published: Published) -> None:
    subscriber = published.subscribers[0]
    subscriber.replay.send_multipart((b"", b"first"))
    assert subscriber.replay.recv_multipart() == [b"", b"\xff" * 8, b""]


NUM_KEPT = 10_000  # as the documentation promises


def fill(publisher: KVEventPublisher, log: BlockLog, num_batches: int) -> None:
    """Publish batches until the thread has sent this many."""
    for _ in range(num_batches):
        log.cleared()
        publisher.publish()
    until(publisher._batches.empty, "the thread has sent all")


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_slow_reader_gets_all_kept_batches_and_the_end(tmp_path: Path, transport: str) -> None:
    log = BlockLog()
    config = endpoints(tmp_path, transport)
    publisher = KVEventPublisher(config, [log], 4)
    context = zmq.Context()
    try:
        fill(publisher, log, NUM_KEPT + 500)
        slow, other = (replay_reader(context, config) for _ in range(2))
        slow.send_multipart((b"", (0).to_bytes(8)))
        assert slow.poll(TIMEOUT_MS)
        # Meanwhile others are served, and batches that the first one will still get are dropped.
        other.send_multipart((b"", (10_400).to_bytes(8)))
        assert numbers_of(other) == [*range(10_400, 10_500), -1]
        fill(publisher, log, 1000)
        assert numbers_of(slow) == [*range(500, 10_500), -1]
        # Two more requests are answered one after the other.
        for first in (2000, 11_490):
            slow.send_multipart((b"", first.to_bytes(8)))
        for first in (2000, 11_490):
            assert numbers_of(slow) == [*range(first, 11_500), -1]
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_readers_that_never_read_hold_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More than are served at once ask; each is given up after a while, and its batches freed."""
    monkeypatch.setattr(kv_events, "_REPLAY_TIMEOUT_S", 0.5)
    log = BlockLog()
    config = endpoints(tmp_path, "ipc")
    publisher = KVEventPublisher(config, [log], 4)
    context = zmq.Context()
    try:
        fill(publisher, log, 5000)
        readers = [replay_reader(context, config) for _ in range(2 * kv_events._MAX_REPLAYS)]
        for reader in readers:
            reader.send_multipart((b"", (0).to_bytes(8)))
        gone = readers.pop()
        gone.close(linger=0)
        last = replay_reader(context, config)
        last.send_multipart((b"", (4990).to_bytes(8)))
        assert numbers_of(last) == [*range(4990, 5000), -1]
        until(lambda: not publisher._ranks[0].replays, "all were given up")
        assert "reads no replay" in caplog.text
        fill(publisher, log, 1)  # the thread goes on
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_a_library_that_does_not_end_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_events, "_END_TIMEOUT_S", 0.05)
    publisher = KVEventPublisher(endpoints(tmp_path, "ipc"), [BlockLog()], 4)
    ended, end = threading.Event(), publisher._context.term

    def hang() -> None:
        ended.wait(TIMEOUT_MS / 1000)
        end()

    monkeypatch.setattr(publisher._context, "term", hang)
    publisher.close()
    assert "did not end" in caplog.text
    ended.set()


def endpoints(folder: Path, transport: str) -> KVEventsConfig:
    if transport == "ipc":
        names = [f"ipc://{folder}/{name}" for name in ("events", "replay")]
    else:
        names = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    return KVEventsConfig(endpoint=names[0], replay_endpoint=names[1])


def replay_reader(context: "zmq.Context[zmq.Socket[bytes]]", config: KVEventsConfig) -> Any:
    reader = context.socket(zmq.DEALER)
    reader.set(zmq.RCVHWM, 100)
    reader.rcvtimeo = TIMEOUT_MS
    reader.connect(config.replay_endpoint or "")
    return reader


def numbers_of(reader: "zmq.Socket[bytes]") -> list[int]:
    """The numbers of a replay's messages, the last of which is -1."""
    numbers: list[int] = []
    while not numbers or numbers[-1] >= 0:
        _, number, _ = reader.recv_multipart()
        numbers.append(int.from_bytes(number, signed=True))
    return numbers


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{", "truncated"),
        ('{"publisher": "kafka"}', "publisher"),
        ('{"endpont": "tcp://*:1"}', "endpont"),
    ],
)
def test_a_wrong_config_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        KVEventsConfig.read(text)


def test_an_endpoint_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = KVEventsConfig(endpoint=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ValueError, match="rank 0: Address already in use"):
            KVEventPublisher(config, [BlockLog()], 4)


@pytest.mark.parametrize(
    ("endpoint", "replay", "is_warned"),
    [
        ("tcp://127.0.0.1:0", None, False),
        ("ipc://{folder}/events", "ipc://{folder}/replay", False),
        ("inproc://events", None, False),
        ("tcp://*:0", None, True),
        ("tcp://127.0.0.1:0", "tcp://*:0", True),
        ("tcp://192.0.2.1:5557", None, True),  # to which it connects
    ],
)
def test_an_endpoint_for_other_machines_is_warned_of(
    endpoint: str,
    replay: str | None,
    is_warned: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = KVEventsConfig(
        endpoint=endpoint.format(folder=tmp_path),
        replay_endpoint=replay and replay.format(folder=tmp_path),
    )
    driver = Driver(make_sizes(num_pages=8))
    publisher = open_kv_events(config, [rank.memory for rank in driver.scheduler.ranks])
    assert publisher is not None
    publisher.close()
    assert ("token ids of all prompts" in caplog.text) == is_warned


def test_by_default_only_this_machine_can_subscribe() -> None:
    assert KVEventsConfig.read("{}").endpoint == "tcp://127.0.0.1:5557"


def two_free_ports() -> int:
    """The first of two neighbors that were free a moment ago."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError):
            port: int = first.getsockname()[1]
            socket.create_server(("127.0.0.1", port + 1)).close()
            return port


def test_each_rank_has_a_port_of_its_own() -> None:
    port = two_free_ports()
    logs = [BlockLog(), BlockLog()]
    publisher = KVEventPublisher(KVEventsConfig(endpoint=f"tcp://127.0.0.1:{port}"), logs, 4)
    try:
        for each in (port, port + 1):
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", each)).close()
    finally:
        publisher.close()


def test_events_wait_while_the_thread_is_behind(tmp_path: Path) -> None:
    log = BlockLog()
    config = KVEventsConfig(endpoint=f"ipc://{tmp_path}/events", max_queue_size=0)
    publisher = KVEventPublisher(config, [log], 4)
    log.cleared()
    publisher.publish()
    assert log.take()
    publisher.close()


def test_the_loop_never_waits_for_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_send = threading.Event()
    num_sent = 0

    def send(self: KVEventPublisher, *batch: object) -> None:
        nonlocal num_sent
        may_send.wait()
        num_sent += 1

    monkeypatch.setattr(KVEventPublisher, "_send", send)
    log = BlockLog()
    publisher = KVEventPublisher(KVEventsConfig(endpoint=f"ipc://{tmp_path}/events"), [log], 4)

    def publish() -> None:
        for _ in range(5000):
            log.cleared()
            publisher.publish()

    loop = threading.Thread(target=publish, daemon=True)
    loop.start()
    loop.join(10)
    was_waiting = loop.is_alive()
    may_send.set()
    loop.join(10)
    publisher.close()
    assert not was_waiting
    assert num_sent == 5000


def test_an_engine_publishes_its_blocks_and_the_time_of_starts(tmp_path: Path) -> None:
    config = {"endpoint": f"ipc://{tmp_path}/events", "topic": "blocks"}
    config["replay_endpoint"] = f"ipc://{tmp_path}/replay"
    settings = {"device": "cpu", "warmup": "none", "max_total_tokens": 1024, "page_size": 16}
    with Engine(str(DEMO), kv_events_config=json.dumps(config), **settings) as engine:
        subscriber = Subscriber(tmp_path, 0)
        prompt = list(range(40, 90))
        engine.generate([prompt], {"max_new_tokens": 4, "temperature": 0.0})
        subscriber.read(1)
        blocks = {tokens: parent for parent, tokens in subscriber.blocks.values()}
        assert blocks[tuple(prompt[:16])] is None
        assert blocks[tuple(prompt[16:32])] in subscriber.blocks
        engine.generate([prompt], {"max_new_tokens": 1})
        engine.flush_cache()
        while subscriber.blocks:
            subscriber.read(subscriber.next_number + 1)
        lines = engine._engine.frontend.metrics.exposition().decode().splitlines()
        (count,) = [each for each in lines if each.startswith("sglang:queue_time_seconds_count")]
        assert count.split()[-1] == "2.0"
        (total,) = [each for each in lines if each.startswith("sglang:queue_time_seconds_sum")]
        assert 0 < float(total.split()[-1]) < 60
        subscriber.close()

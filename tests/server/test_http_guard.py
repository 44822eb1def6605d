"""What a connection may send before any route is asked, on real sockets."""

import asyncio
import dataclasses
import gc
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from sgl_jax.server.guards.connection import GuardedHttpProtocol, guarded_protocol
from sgl_jax.server.guards.limits import Limits
from tests.support.waiting import meanwhile_until

pytestmark = pytest.mark.anyio

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
TIMEOUT_S = 0.3
LIMITS = Limits(
    max_connections=3,
    max_pipelined_requests=4,
    max_url_bytes=100,
    max_head_bytes=1000,
    receive_timeout_s=TIMEOUT_S,
    keep_alive_timeout_s=2 * TIMEOUT_S,
)
# Clients and routers in docs/guide/limits.md keep a connection that is not in use so long.
LONGEST_KEPT_BY_CLIENTS_S = 90.0


@dataclass
class App:
    """Answers when `go` is set; reads the body only if there is one to come.

    With `waits_for_end` it answers nothing, and counts the clients that have gone.
    """

    go: asyncio.Event = field(default_factory=asyncio.Event)
    waits_for_end: bool = False
    num_begun: int = 0
    num_gone: int = 0
    bodies: list[int] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        num_bytes, more = 0, scope["method"] == "POST"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            num_bytes += len(message["body"])
            more = message["more_body"]
        self.bodies.append(num_bytes)
        while self.waits_for_end:
            if (await receive())["type"] == "http.disconnect":
                self.num_gone += 1
                return
        await self.go.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer; 0 if the connection was closed."""
        try:
            async with asyncio.timeout(5):
                head = await self.reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                return int(head.split(b" ")[1]), await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, b""

    async def status(self) -> int:
        return (await self.answer())[0]


class QuietServer(uvicorn.Server):
    """Leaves the signals of the test process alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class Rig:
    app: App
    port: int
    clients: list[Client] = field(default_factory=list)

    async def connect(self) -> Client:
        self.clients.append(Client(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.clients[-1]


@asynccontextmanager
async def guarded(limits: Limits = LIMITS) -> AsyncIterator[Rig]:
    app = App()
    app.go.set()
    config = uvicorn.Config(
        app,
        port=0,
        http=guarded_protocol(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = QuietServer(config)
    serving = asyncio.ensure_future(server.serve())
    await meanwhile_until(lambda: server.started, "the server listens")
    rig = Rig(app, server.servers[0].sockets[0].getsockname()[1])
    try:
        yield rig
    finally:
        for client in rig.clients:
            client.writer.close()
        app.go.set()
        server.should_exit = True
        await serving


def post(length: int, body: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % length + body


async def test_whole_requests_are_answered_one_after_the_other() -> None:
    async with guarded() as rig:
        client = await rig.connect()
        for _ in range(3):
            client.send(GET)
            assert await client.status() == 200
            client.send(post(5, b"12345"))
            assert await client.answer() == (200, b"ok")
        assert rig.app.bodies == [0, 5] * 3


async def test_a_few_pipelined_requests_are_answered_and_more_close() -> None:
    async with guarded() as rig:
        client = await rig.connect()
        client.send(GET * (1 + LIMITS.max_pipelined_requests))
        for _ in range(1 + LIMITS.max_pipelined_requests):
            assert await client.status() == 200
        rig.app.go.clear()
        greedy = await rig.connect()
        greedy.send(GET * (2 + LIMITS.max_pipelined_requests))
        assert await greedy.status() == 0


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"a" * 99 + b" HTTP/1.1\r\n\r\n", 200),
        (b"GET /" + b"a" * 100 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 998 + b"\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 999 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 600 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 2000, 431),
        (b"GET /" + b"a" * 2000, 431),
        (b"not HTTP\r\n\r\n", 400),
    ],
)
async def test_heads_are_measured(sent: bytes, status: int) -> None:
    async with guarded() as rig:
        client = await rig.connect()
        client.send(sent)
        answer, body = await client.answer()
        assert answer == status
        if status != 200:
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
            assert await client.status() == 0
            assert rig.app.num_begun == 0


async def test_framing_of_a_chunked_body_is_bounded() -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"64\r\n" + b"a" * 100 + b"\r\n"
    async with guarded() as rig:
        fair = await rig.connect()
        fair.send(head + chunk * 1000 + b"0\r\n\r\n")
        assert await fair.status() == 200
        assert rig.app.bodies == [100_000]
        for extra in (b"1\r\na\r\n" * 1000, b"1;" + b"a" * 2000, b"0\r\n" + b"a: b\r\n" * 500):
            client = await rig.connect()
            client.send(head + extra)
            assert await client.status() == 431


@pytest.mark.parametrize("sent", [b"", b"GET / HT", post(10, b"123")], ids=["none", "head", "body"])
async def test_a_request_that_does_not_arrive_is_closed(sent: bytes) -> None:
    async with guarded() as rig:
        client = await rig.connect()
        client.send(sent)
        assert await client.status() == 408
        assert await client.status() == 0


async def test_a_request_with_others_behind_it_hears_that_its_client_has_gone() -> None:
    async with guarded() as rig:
        rig.app.waits_for_end = True
        client = await rig.connect()
        client.send(GET * 3)
        await meanwhile_until(lambda: rig.app.num_begun, "the first request begins")
        client.writer.transport.abort()
        await meanwhile_until(lambda: rig.app.num_gone, "it hears that its client has gone")
        assert rig.app.num_begun == 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"HEAD / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n", 408),
        (b"HEAD /" + b"a" * 200 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
    ],
)
async def test_a_refused_head_request_gets_a_head_alone(sent: bytes, status: int) -> None:
    async with guarded() as rig:
        rig.app.go.clear()
        client = await rig.connect()
        client.send(sent)
        async with asyncio.timeout(5):
            data = await client.reader.read()
        assert data.startswith(b"HTTP/1.1 %d " % status)
        assert data.endswith(b"\r\n\r\n")


async def test_an_answer_may_take_longer_than_a_request() -> None:
    async with guarded() as rig:
        rig.app.go.clear()
        clients = [await rig.connect(), await rig.connect()]
        clients[0].send(GET + b"\r\n")
        clients[1].send(GET + b"GET / HT")
        await asyncio.sleep(2 * TIMEOUT_S)
        rig.app.go.set()
        for client in clients:
            assert await client.status() == 200
        assert await clients[1].status() in (0, 408)


async def test_a_connection_out_of_use_is_closed_in_time_and_not_before() -> None:
    async with guarded() as rig:
        client = await rig.connect()
        for _ in range(2):
            client.send(GET)
            assert await client.status() == 200
            answered_s = asyncio.get_running_loop().time()
        assert await client.status() == 0
        idle_s = asyncio.get_running_loop().time() - answered_s
        assert idle_s >= 0.9 * LIMITS.keep_alive_timeout_s


async def test_a_connection_that_was_reset_is_forgotten_at_once() -> None:
    limits = dataclasses.replace(LIMITS, keep_alive_timeout_s=60.0)
    async with guarded(limits) as rig:
        client = await rig.connect()
        client.send(GET)
        assert await client.status() == 200
        assert num_protocols() == 1
        no_lingering = struct.pack("ii", 1, 0)
        client.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, no_lingering
        )
        client.writer.transport.abort()
        async with asyncio.timeout(5):
            while num_protocols():
                await asyncio.sleep(0.01)


def num_protocols() -> int:
    """Connections that the server still holds, after a collection of garbage."""
    gc.collect()
    return sum(isinstance(found, GuardedHttpProtocol) for found in gc.get_objects())


def test_clients_give_up_a_connection_before_the_server_does() -> None:
    assert Limits().keep_alive_timeout_s > LONGEST_KEPT_BY_CLIENTS_S


async def test_connections_without_a_request_make_room() -> None:
    async with guarded() as rig:
        rig.app.go.clear()
        busy = await rig.connect()
        busy.send(GET)
        idle = [await rig.connect() for _ in range(2)]
        idle[0].send(b"GET / HT")
        await meanwhile_until(lambda: rig.app.num_begun, "the request begins")
        later = await rig.connect()
        later.send(GET)
        assert await idle[0].status() == 0
        rig.app.go.set()
        assert await later.status() == 200
        assert await busy.status() == 200


async def test_with_all_connections_in_use_the_newest_is_refused() -> None:
    async with guarded() as rig:
        rig.app.go.clear()
        busy = [await rig.connect() for _ in range(LIMITS.max_connections)]
        for client in busy:
            client.send(GET)
        while rig.app.num_begun < len(busy):
            await asyncio.sleep(0.01)
        assert await (await rig.connect()).status() == 503
        rig.app.go.set()
        for client in busy:
            assert await client.status() == 200

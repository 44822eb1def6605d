"""Random faults that a server must survive, one after the other beside its clients.

Owns what it stopped: every process is running again when `run` returns. Never ends the engine or
the server itself: `tests/fault_kit` does.
"""

import asyncio
import contextlib
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from urllib.parse import urlsplit

import httpx
import psutil

from sgl_jax.text.tokenizer import Tokenizer
from tests.accuracy.near_ties import differences, generate, greedy
from tests.hostile.http_mutations import mutated
from tests.live.live_server import DEMO, LiveServer
from tests.soak.refusals import (
    RefusedError,
    check_refusal,
    described,
    patient_client,
    strict_client,
)

MAX_QUEUED = 32
FLAGS = ("--max-queued-requests", str(MAX_QUEUED))
_FLOOD = 2 * MAX_QUEUED + 32
_NUM_PROMPTS = 12
_NUM_OUTPUT = 24
_MAX_PAUSE_S = 1.0
_MALFORMED_AT_ONCE = 20
_SILENCE_S = 5.0  # after which such a client leaves
_SLOW_STREAM_TOKENS = 120
# As over Ethernet. With the segments of loopback, 64 KiB, the server's kernel takes a whole stream,
# and a small receive buffer has no room for one: then the receiver often announces no room at all,
# and gets 2 KiB each time that the sender asks, 5 times a second.
_SEGMENT_BYTES = 1460
SLOW_RECEIVE_BYTES = 16 * _SEGMENT_BYTES
# A stream may be slow, where the engine gets little of the processor, but not stand still.
LONGEST_STILL_S = 60.0
_LONGEST_S = 600.0
# Longer texts than the event loop encodes itself: their words go to a text worker.
_TEXT = "The code of Anna is 471. What is 11 + 14? " * 52


class Faults:
    """What befalls one running server. A context manager; `learn` before `run`.

    `failures` says which answers were wrong; `refusals` counts those that were errors.
    """

    def __init__(self, server: LiveServer) -> None:
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.failures: list[str] = []
        self._server = server
        self._http = strict_client(server.url)
        self._patient = patient_client(server.url)
        rng = random.Random(17)
        self._prompts = [
            [rng.randrange(300, 700) for _ in range(rng.randrange(4, 60))]
            for _ in range(_NUM_PROMPTS)
        ]
        tokenizer = Tokenizer.load(str(DEMO), None)
        self._texts = {f"{i} {_TEXT}": tokenizer.encode(f"{i} {_TEXT}") for i in range(3)}
        self._right: dict[tuple[int, ...], list[int]] = {}
        self._kinds: dict[Callable[[random.Random], Awaitable[None]], int] = {
            self.paused_engine: 4,
            self.paused_text_worker: 2,
            self.killed_text_worker: 3,
            self.killed_text_process: 1,
            self.flood: 2,
            self.slow_reader: 3,
            self.malformed_http: 4,
        }
        self._due: list[Callable[[random.Random], Awaitable[None]]] = []

    async def __aenter__(self) -> "Faults":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()
        await self._patient.aclose()

    async def learn(self) -> None:
        """Ask the server at rest what is right."""
        for prompt in (*self._prompts, *self._texts.values()):
            body = {"input_ids": prompt, "sampling_params": greedy(_SLOW_STREAM_TOKENS)}
            self._right[tuple(prompt)] = (await generate(self._patient, body))["output_ids"]

    async def run(self, seed: int, until_s: float) -> None:
        """One fault after the other, until `time.monotonic()` is `until_s`."""
        rng = random.Random(seed)
        while time.monotonic() < until_s:
            kind = self._next_kind(rng)
            try:
                async with asyncio.timeout(_LONGEST_S):
                    await kind(rng)
            except (AssertionError, OSError, httpx.HTTPError) as error:
                self.failures.append(f"{kind.__name__}: {described(error)}")
            self.counts[kind.__name__] += 1
            await asyncio.sleep(rng.uniform(0.1, 1.0))

    def _next_kind(self, rng: random.Random) -> Callable[[random.Random], Awaitable[None]]:
        """Each once at first, then as often as its weight says, in random order."""
        if not self._due:
            self._due = [
                kind
                for kind, weight in self._kinds.items()
                for _ in range(weight if self.counts else 1)
            ]
            rng.shuffle(self._due)
        return self._due.pop()

    @property
    def kinds(self) -> list[str]:
        """Names of the faults."""
        return [kind.__name__ for kind in self._kinds]

    # -- processes --------------------------------------------------------------------------

    async def paused_engine(self, rng: random.Random) -> None:
        """The engine stands still for up to a second."""
        await _pause(self._server.engine, rng)

    async def paused_text_worker(self, rng: random.Random) -> None:
        """A text worker does, while a long text waits for it."""
        asking = asyncio.ensure_future(self._ask_text(rng))
        if worker := await self._some_worker(rng):
            await _pause(worker, rng)
        await asking

    async def killed_text_worker(self, rng: random.Random) -> None:
        """A text worker is gone; another one does its work."""
        asking = asyncio.ensure_future(self._ask_text(rng))
        if worker := await self._some_worker(rng):
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        await asking

    async def killed_text_process(self, rng: random.Random) -> None:
        """The process that text workers are forked from is gone, and those are with it."""
        for process in self._server.text_processes:
            for member in (process, *process.children()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        await self._ask_text(rng)

    async def _some_worker(self, rng: random.Random) -> psutil.Process | None:
        """A text worker, as soon as there is one."""
        for _ in range(100):
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in self._server.text_processes:
                    if workers := process.children():
                        return rng.choice(workers)
            await asyncio.sleep(0.01)
        return None

    # -- clients ----------------------------------------------------------------------------

    async def flood(self, rng: random.Random) -> None:
        """More requests at once than may run and wait."""
        await asyncio.gather(*(self._ask_ids(rng.choice(self._prompts)) for _ in range(_FLOOD)))

    async def slow_reader(self, rng: random.Random) -> None:
        """A stream that is not read for seconds, and then slowly; it is whole all the same."""
        prompt = rng.choice(self._prompts)
        body = {
            "input_ids": prompt,
            "sampling_params": greedy(_SLOW_STREAM_TOKENS),
            "stream": True,
            "return_logprob": True,
            "top_logprobs_num": 5,
        }
        events = [json.loads(data) for data in await read_slowly(self._server.url, rng, body)]
        if "error" in events[-1]:
            with self._counted():
                check_refusal(events[-1]["error"])
        else:
            await self._judge(prompt, events[-1]["output_ids"])

    async def malformed_http(self, rng: random.Random) -> None:
        """Connections with malformed requests; `tests/hostile` judges their answers."""
        port = urlsplit(self._server.url).port
        await asyncio.gather(*(_send(port, mutated(rng).pieces) for _ in range(_MALFORMED_AT_ONCE)))

    async def _ask_text(self, rng: random.Random) -> None:
        text, ids = rng.choice(list(self._texts.items()))
        await self._ask({"text": text}, ids)

    async def _ask_ids(self, prompt: list[int]) -> None:
        await self._ask({"input_ids": prompt}, prompt)

    async def _ask(self, prompt: dict[str, object], ids: list[int]) -> None:
        with self._counted():
            body = {**prompt, "sampling_params": greedy(_NUM_OUTPUT)}
            await self._judge(ids, (await generate(self._http, body))["output_ids"])

    async def _judge(self, prompt: list[int], ids: list[int]) -> None:
        """`ids` are the right ones, or differ from them at near ties."""
        wanted = self._right[tuple(prompt)][: len(ids)]
        assert len(ids) in (_NUM_OUTPUT, _SLOW_STREAM_TOKENS), f"{len(ids)} tokens"
        await differences(self._patient, prompt, wanted, ids)
        self.counts["right answers"] += 1

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except RefusedError as error:
            self.refusals[str(error)] += 1


async def _pause(process: psutil.Process, rng: random.Random) -> None:
    """Stop a process for a while."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.suspend()
        try:
            await asyncio.sleep(rng.uniform(0.1, _MAX_PAUSE_S))
        finally:
            process.resume()


async def read_slowly(url: str, rng: random.Random, body: object) -> list[bytes]:
    """The JSON of each event of a streamed `/generate`, or of an answer that is an error."""
    content = json.dumps(body).encode()
    head = (
        "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    slow = socket.socket()
    slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_RECEIVE_BYTES)
    slow.setblocking(False)
    port = urlsplit(url).port
    await asyncio.get_running_loop().sock_connect(slow, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=slow, limit=4096)
    with contextlib.closing(writer):
        writer.write(head.encode() + content)
        await writer.drain()
        await asyncio.sleep(rng.uniform(0.5, 3.0))  # what makes it slow
        received = bytearray()
        try:
            while data := await asyncio.wait_for(reader.read(4096), LONGEST_STILL_S):
                received += data
                await asyncio.sleep(0)
        except TimeoutError:
            came = f"{len(received)} bytes, {received.count(b'data: {')} events"
            raise AssertionError(f"nothing in {LONGEST_STILL_S:g} s after {came}") from None
    # Chunks begin with lines of their own; an event is a line.
    lines = bytes(received).split(b"\n")
    events = [line[6:] for line in lines if line.startswith(b"data: {")]
    return events or [line for line in lines if line.startswith(b"{")]


async def _send(port: int | None, pieces: tuple[bytes, ...]) -> None:
    """Write to a connection of its own, read until it ends or nothing more comes for a while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        with contextlib.suppress(TimeoutError):
            while await asyncio.wait_for(reader.read(65_536), _SILENCE_S):
                pass

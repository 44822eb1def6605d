"""Attacks by one key on a server with a real engine, each by a process of its own.

    python -m tests.hostile.neighbor_attacks --seconds 10 [NAME ...]

The command starts a server of the demonstration model with two keys and prints, for each attack,
the 99th percentile of the time between two tokens of the other key's stream, without the attack
and during it, and the growth of the server's memory. The attacking process has the lowest
priority, as if it ran on another machine.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from tests.hostile.image_files import hostile_files
from tests.support.images import data_uri, image_file

ATTACKER, VICTIM, ADMIN = "attackers-key", "victims-key", "admins-key"
GENERATE, CHAT = "/generate", "/v1/chat/completions"
CONCURRENCY = 64


class Target(NamedTuple):
    """The attacked server, a client with the attacker's key, and the end of the attack."""

    url: str
    client: aiohttp.ClientSession
    end_s: float  # time.monotonic()

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end_s

    async def post(self, path: str, body: Any, **headers: str) -> int:
        """Return the status of the answer, which is read to its end; 0 without one."""
        try:
            async with self.client.post(self.url + path, json=body, headers=headers) as answer:
                await answer.read()
                return answer.status
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return 0

    async def get(self, path: str, **headers: str) -> int:
        try:
            async with self.client.get(self.url + path, headers=headers) as answer:
                await answer.read()
                return answer.status
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return 0

    def connect(self) -> socket.socket:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return socket.create_connection((host, int(port)), 5.0)


Attack = Callable[[Target], Awaitable[None]]


async def many(target: Target, one: Callable[[int], Awaitable[Any]], at_once: int) -> None:
    """Run `one` with the numbers 0, 1, ... in `at_once` tasks until the attack ends."""
    numbers = itertools.count()

    async def repeat() -> None:
        while not target.is_over:
            await one(next(numbers))
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(repeat()) for _ in range(at_once)]
    _, unfinished = await asyncio.wait(tasks, timeout=target.end_s - time.monotonic() + 1)
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def generation(text: str, max_new_tokens: int = 16, **sampling: Any) -> dict[str, Any]:
    params = {"max_new_tokens": max_new_tokens, "temperature": 0, **sampling}
    return {"text": text, "sampling_params": params}


def schema(num_bytes: int, seed: int) -> str:
    """Return a schema of about `num_bytes` whose many optional properties are costly to compile."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = {"".join(rng.choices(letters, k=4)) for _ in range(num_bytes // 12)}
    return json.dumps({"type": "object", "properties": {name: {} for name in sorted(names)}})


def nested(depth: int, seed: int) -> str:
    """Return a schema of alternatives within alternatives."""
    inner: dict[str, Any] = {"enum": [f"{seed}-{i}" for i in range(50)]}
    for level in range(depth):
        inner = {"anyOf": [inner, {"type": "array", "items": inner}, {"const": f"{seed}{level}"}]}
    return json.dumps({"type": "object", "properties": {"a": inner}, "required": ["a"]})


async def grammar_flood(target: Target) -> None:
    async def one(number: int) -> None:
        await target.post(GENERATE, generation("Hi", json_schema=schema(23_000, number)))

    await many(target, one, 320)


async def giant_schemas(target: Target) -> None:
    async def one(number: int) -> None:
        text = schema(58_000, number) if number % 2 else nested(8, number)
        await target.post(GENERATE, generation("Hi", json_schema=text))

    await many(target, one, CONCURRENCY)


async def regex_bombs(target: Target) -> None:
    bombs = ("(a{1,999}){1,999}%d", "((x+x+)+y|%d)+", "(.*a){40}%d", "[a-z]{0,60000}%d")

    async def one(number: int) -> None:
        await target.post(GENERATE, generation("Hi", regex=bombs[number % len(bombs)] % number))

    await many(target, one, CONCURRENCY)


async def session_flood(target: Target) -> None:
    async def one(number: int) -> None:
        name = f"s{number}"
        await target.post("/open_session", {"session_id": name, "capacity_of_str_len": 0})
        await target.post(GENERATE, generation("Hi") | {"session_params": {"id": name}})

    await many(target, one, 16)


async def full_batch(target: Target) -> None:
    """No attack: as many ordinary requests as run at once."""

    async def one(number: int) -> None:
        await target.post(GENERATE, generation(f"{number}: tell me more.", 200, ignore_eos=True))

    await many(target, one, 15)


async def queue_flood(target: Target) -> None:
    async def one(number: int) -> None:
        await target.post(GENERATE, generation(f"{number} " * 100, 500, ignore_eos=True))

    await many(target, one, 500)


async def tenant_flood(target: Target) -> None:
    async def one(number: int) -> None:
        await target.post(GENERATE, generation("Hi", 2) | {"user": f"user-{number}"})

    await many(target, one, CONCURRENCY)


async def choices_flood(target: Target) -> None:
    async def one(number: int) -> None:
        await target.post(GENERATE, generation(f"{number}", 64, n=64, temperature=1.0))

    await many(target, one, 16)


async def prompt_flood(target: Target) -> None:
    async def one(number: int) -> None:
        await target.post(GENERATE, generation(f"{number} word" * 300, 4))

    await many(target, one, 16)


async def logprob_flood(target: Target) -> None:
    fields = {"return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0}

    async def one(number: int) -> None:
        await target.post(GENERATE, generation(f"{number} word" * 300, 4) | fields)

    await many(target, one, 16)


async def stored_responses(target: Target) -> None:
    async def one(number: int) -> None:
        body = {"model": "default", "input": f"{number}", "max_output_tokens": 1, "store": True}
        await target.post("/v1/responses", body | {"metadata": {"a": "b" * 500}})

    await many(target, one, 16)


async def slow_readers(target: Target) -> None:
    """Streams that nobody reads."""
    body = json.dumps(generation("Hi", 4000, ignore_eos=True) | {"stream": True}).encode()
    connections = []
    for _ in range(CONCURRENCY):
        connection = target.connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(_head(GENERATE, len(body)) + body)
        connections.append(connection)
        await asyncio.sleep(0.01)
    await asyncio.sleep(target.end_s - time.monotonic())
    for connection in connections:
        connection.close()


async def aborted_uploads(target: Target) -> None:
    """Bodies that end in the middle, and streams whose client leaves after the first bytes."""
    part = b'{"text": "' + b"a" * 2_000_000
    stream = json.dumps(generation("Hi", 500, ignore_eos=True) | {"stream": True}).encode()
    for number in itertools.count():
        if target.is_over:
            return
        with target.connect() as connection:
            if number % 2:
                connection.sendall(_head(GENERATE, 20_000_000) + part)
            else:
                connection.sendall(_head(GENERATE, len(stream)) + stream)
                connection.recv(100)
        await asyncio.sleep(0)


async def header_floods(target: Target) -> None:
    heads = (
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
        b"GET /" + b"a" * 100_000,
        b"\x00" * 9_000,
    )
    for number in itertools.count():
        if target.is_over:
            return
        with target.connect() as connection:
            try:
                connection.sendall(heads[number % len(heads)])
                connection.recv(100)
            except (ConnectionError, TimeoutError):
                await asyncio.sleep(0)
        await asyncio.sleep(0)


async def state_polling(target: Target) -> None:
    paths = ("/get_load", "/get_server_info", "/v1/models", "/get_model_info", "/health")

    async def one(number: int) -> None:
        await target.get(paths[number % len(paths)])

    await many(target, one, 16)


async def metrics_polling(target: Target) -> None:
    async def one(_: int) -> None:
        await target.get("/metrics")

    await many(target, one, 16)


async def sessions_polling(target: Target) -> None:
    async def one(_: int) -> None:
        await target.get("/list_sessions")

    await many(target, one, 16)


async def cross_site_requests(target: Target) -> None:
    paths = ("/pause_generation", "/flush_cache", "/start_profile", "/abort_request")

    async def one(number: int) -> None:
        path = paths[number % len(paths)]
        await target.post(path, None, Origin="http://evil.example", Host="evil.example")

    await many(target, one, 16)


async def hostile_images(target: Target) -> None:
    """Bombs, truncated and damaged files, wrong types, huge dimensions."""
    await _see(target, [data_uri(file) for file in hostile_files(500)])


async def large_images(target: Target) -> None:
    """Valid images of 16 megapixels, which are scaled to the largest for the model."""
    await _see(target, [data_uri(image_file(f"#{n:02x}8000", 4000, 4000)) for n in range(64)])


async def _see(target: Target, images: list[str]) -> None:
    async def one(number: int) -> None:
        image = {"type": "image_url", "image_url": {"url": images[number % len(images)]}}
        content = [{"type": "text", "text": f"{number}: what is this?"}, image]
        message = {"role": "user", "content": content}
        await target.post(CHAT, {"model": "default", "messages": [message], "max_tokens": 4})

    await many(target, one, 16)


def _head(path: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ATTACKER}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        grammar_flood,
        giant_schemas,
        regex_bombs,
        session_flood,
        queue_flood,
        tenant_flood,
        choices_flood,
        prompt_flood,
        logprob_flood,
        stored_responses,
        slow_readers,
        aborted_uploads,
        header_floods,
        state_polling,
        metrics_polling,
        sessions_polling,
        cross_site_requests,
    )
}
# On a server whose model takes images.
IMAGE_ATTACKS: dict[str, Attack] = {
    attack.__name__: attack for attack in (hostile_images, large_images)
}
# They compute on all rows: what they do is compared with ordinary requests on all rows.
COMPUTING = {
    *("queue_flood", "tenant_flood", "choices_flood"),
    *("prompt_flood", "logprob_flood", "slow_readers"),
}


async def _attack(name: str, url: str, seconds: float) -> None:
    headers = {"authorization": f"Bearer {ATTACKER}"}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=seconds + 30)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as own:
        run = (ATTACKS | IMAGE_ATTACKS | {full_batch.__name__: full_batch})[name]
        await run(Target(url, own, time.monotonic() + seconds))


def main(arguments: list[str]) -> int:
    """Run the attacks on a new server, or with `--url` one attack on a running one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "names",
        nargs="*",
        choices=[*ATTACKS, *IMAGE_ATTACKS, "full_batch", []],
        help="default: all",
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--url", help="attack this server once, and do not measure")
    words = parser.parse_args(arguments)
    names = words.names or [*ATTACKS, *IMAGE_ATTACKS]
    if words.url:
        os.nice(19)
        for name in names:
            asyncio.run(_attack(name, words.url, words.seconds))
        return 0
    from tests.hostile.victim import HEADER, attacked_server, measure

    print(HEADER)
    for takes_images in (False, True):
        chosen = [name for name in names if (name in IMAGE_ATTACKS) == takes_images]
        with tempfile.TemporaryDirectory() as folder:
            if chosen:
                with attacked_server(Path(folder), takes_images=takes_images) as server:
                    for name in chosen:
                        print(measure(server, name, words.seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A flood of structured-output requests, each with a large schema of its own, and what others see.

Run `python -m tests.hostile.grammar_flood --port P` against a real server. The figures are the
longest gap between two tokens of an unrelated stream, before and during the flood, and the times of
a plain request and of one with a tiny schema that was compiled before.
"""

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Headers = Mapping[str, str]
NONE: Headers = MappingProxyType({})
TINY = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
_ANSWER_S = 600.0
_PLAIN = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


def large_schema(num_bytes: int, seed: int) -> str:
    """A schema of about `num_bytes` whose many optional properties are costly to compile."""
    rng = random.Random(seed)
    names = {
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(num_bytes // 12)
    }
    return json.dumps({"type": "object", "properties": {name: {} for name in sorted(names)}})


async def post(port: int, body: Any, headers: Headers = NONE) -> tuple[int, bytes]:
    """The status and the body of `/generate`; (0, b"") if the server closed the connection."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        async with _opened(port, body, headers) as (status, reader):
            return status, await asyncio.wait_for(reader.read(), _ANSWER_S)
    return 0, b""


@contextlib.asynccontextmanager
async def _opened(
    port: int, body: Any, headers: Headers
) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    """The status of the answer to `body`, and a reader of the rest."""
    data = json.dumps(body).encode()
    head = {"host": "127.0.0.1", "content-type": "application/json", **headers}
    head |= {"content-length": str(len(data)), "connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"POST /generate HTTP/1.1\r\n{lines}\r\n".encode() + data)
        await writer.drain()
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _ANSWER_S)
        yield int(answer.split(b" ", 2)[1]), reader
    finally:
        writer.close()


async def token_gaps(
    port: int, gaps: list[float], num_tokens: int = 1500, headers: Headers = NONE
) -> None:
    """Stream a plain output; append the seconds between two events to `gaps` as they come."""
    sampling = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"text": "Tell me", "stream": True, "sampling_params": sampling}
    async with _opened(port, body, headers) as (status, reader):
        assert status == 200, status
        last = None
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now


async def grammar_flood(
    port: int, schemas: Sequence[str], statuses: list[int], headers: Headers = NONE
) -> None:
    """Send a request with each schema, all at once; append the statuses as they come."""

    async def ask(schema: str) -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": 4, "json_schema": schema}
        status, _ = await post(port, {"text": "x", "sampling_params": sampling}, headers)
        statuses.append(status)

    await asyncio.gather(*map(ask, schemas))


async def measure(
    port: int,
    schemas: Sequence[str],
    *,
    attacker: Headers = NONE,
    victim: Headers = NONE,
    seconds: float = 30.0,
) -> dict[str, Any]:
    """Flood the server while a victim streams, until the flood has ended or `seconds` are over. The
    victim streams as long before.

    The headers carry the keys of both. Returns the 99th percentile and the longest of the victim's
    gaps, the times of the slowest plain request and of the slowest with the tiny schema during the
    flood, all in seconds, and the statuses of the flood, as far as it was answered.
    """
    quiet: list[float] = []
    attacked: list[float] = []
    statuses: list[int] = []
    times: dict[str, list[float]] = {"tiny": [], "plain": []}
    tiny = {"text": "x", "sampling_params": {"max_new_tokens": 8, "json_schema": TINY}}
    plain = {"text": "x", "sampling_params": _PLAIN}

    async def ask_others() -> None:
        for name, body in (("tiny", tiny), ("plain", plain)):
            start = time.perf_counter()
            status, text = await post(port, body, victim)
            assert status == 200, text
            times[name].append(time.perf_counter() - start)

    await ask_others()
    for gaps in (quiet, attacked):
        streaming = asyncio.create_task(_streams(port, gaps, victim))
        while not gaps:
            await asyncio.sleep(0.01)
        for each in times.values():
            each.clear()
        begin, jobs = time.perf_counter(), [streaming]
        if gaps is attacked:
            jobs.append(asyncio.create_task(grammar_flood(port, schemas, statuses, attacker)))
        while time.perf_counter() - begin < seconds and not jobs[-1].done():
            await asyncio.sleep(0.2)
            await ask_others()
        for job in jobs:
            job.cancel()
        await asyncio.wait(jobs)
    return {
        "quiet_gaps_s": _p99_and_longest(quiet),
        "attack_gaps_s": _p99_and_longest(attacked),
        "plain_s": max(times["plain"]),
        "tiny_s": max(times["tiny"]),
        "statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
    }


def _p99_and_longest(gaps: list[float]) -> tuple[float, float]:
    return sorted(gaps)[len(gaps) * 99 // 100], max(gaps)


async def _streams(port: int, gaps: list[float], headers: Headers) -> None:
    while True:
        await token_gaps(port, gaps, headers=headers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num", type=int, default=320)
    parser.add_argument("--bytes", type=int, default=23_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    schemas = [large_schema(options.bytes, seed) for seed in range(options.num)]
    figures = asyncio.run(measure(options.port, schemas, seconds=options.seconds))
    print(json.dumps(figures | {"schema_bytes": len(schemas[0])}, indent=1))


if __name__ == "__main__":
    main()

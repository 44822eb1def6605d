"""Hundreds of requests with aborts and vanishing clients: survivors are right, nothing leaks.

What its scheduler was told is recorded; if this test fails, the recording is there to be run again.
"""

import asyncio
import contextlib
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.accuracy.near_ties import differences
from tests.live.live_server import LiveServer, live_server

CONCURRENCY = 64
MAX_PATIENCE_S = 0.2
NUM_PROMPTS = 40
RECORDING = "stress.events"
FLAGS = (
    *("--dp-size", "2", "--max-running-requests", "16", "--context-length", "512"),
    # A pool that holds about a quarter of what wants to run: evictions and retracts all the time,
    # some thirty of them on a quiet machine, so that a slow one has some, too.
    *("--max-total-tokens", "512", "--schedule-conservativeness", "0.05"),
    *("--check-memory", "busy", "--decode-log-interval", "0"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("live")
    with live_server(folder, *FLAGS, "--record-events", str(folder / RECORDING)) as server:
        yield server


def make_bodies(seed: int) -> list[dict[str, Any]]:
    """Distinct greedy requests, many with a common beginning."""
    rng = random.Random(seed)
    stems = [[rng.randrange(300, 700) for _ in range(100)] for _ in range(4)]
    bodies = []
    for i in range(NUM_PROMPTS):
        stem = rng.choice(stems)[: rng.randrange(100)]
        prompt = stem + [rng.randrange(300, 700) for _ in range(rng.randrange(2, 60))]
        sampling = {"temperature": 0, "max_new_tokens": 8 + i, "ignore_eos": True}
        bodies.append({"input_ids": prompt, "sampling_params": sampling})
    return bodies


async def expected_outputs(url: str, bodies: list[dict[str, Any]]) -> list[list[int]]:
    """Each request alone."""
    async with httpx.AsyncClient(timeout=120) as client:
        answers = [(await client.post(url + "/generate", json=body)).json() for body in bodies]
    return [answer["output_ids"] for answer in answers]


async def one(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], fate: str, rid: str
) -> list[int] | None:
    """Send one request and let its fate befall it; its tokens if it survived."""
    if fate == "whole":
        answer = await client.post(url + "/generate", json=body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["output_ids"])
    if fate == "vanish":  # the client goes away while its prompt waits, or is prefilled
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(random.Random(rid).random() * MAX_PATIENCE_S):
                await client.post(url + "/generate", json={**body, "rid": rid})
        return None
    ids: list[int] = []
    lines = random.Random(rid).randrange(1, 12)
    request = {**body, "stream": True, "rid": rid}
    async with client.stream("POST", url + "/generate", json=request) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = httpx.Response(200, content=line[6:]).json()
            ids = event.get("output_ids", ids)
            lines -= 1
            if lines <= 0 and fate == "disconnect":
                return None  # leaving the block closes the connection
            if lines == 0 and fate == "abort":
                await client.post(url + "/abort_request", json={"rid": rid})
    return ids if fate == "stream" else None


async def flood(
    url: str, bodies: list[dict[str, Any]], num_requests: int
) -> list[tuple[int, str, list[int] | None]]:
    """All requests, at most `CONCURRENCY` at once; (prompt index, fate, tokens) of each."""
    slots = asyncio.Semaphore(CONCURRENCY)
    rng = random.Random(3)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:

        async def run(number: int) -> tuple[int, str, list[int] | None]:
            index = rng.randrange(len(bodies))
            fate = rng.choice(["whole", "stream", "stream", "abort", "disconnect", "vanish"])
            async with slots:
                tokens = await one(client, url, bodies[index], fate, f"stress-{number}")
            return index, fate, tokens

        return await asyncio.gather(*(run(i) for i in range(num_requests)))


async def explain_differences(
    url: str,
    bodies: list[dict[str, Any]],
    expected: list[list[int]],
    outcomes: list[tuple[int, str, list[int] | None]],
) -> None:
    """Survivors got what was expected, but for near ties."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for index, _, tokens in outcomes:
            if tokens is not None:
                prompt = bodies[index]["input_ids"]
                await differences(client, prompt, expected[index], tokens)


@pytest.mark.parametrize("num_requests", [120, pytest.param(1000, marks=pytest.mark.long)])
def test_survivors_are_right_and_nothing_leaks(server: LiveServer, num_requests: int) -> None:
    recording = server.log.with_name(RECORDING)
    try:
        check_survivors(server, num_requests)
        # A scheduler that is told the same decides the same again.
        command = [sys.executable, "-m", "sgl_jax.replay", str(recording)]
        replay = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert replay.returncode == 0, replay.stdout + replay.stderr
    except BaseException as error:
        error.add_note(f"its events: python -m sgl_jax.replay --verbose {recording}")
        raise


def check_survivors(server: LiveServer, num_requests: int) -> None:
    bodies = make_bodies(seed=1)
    expected = asyncio.run(expected_outputs(server.url, bodies))
    outcomes = asyncio.run(flood(server.url, bodies, num_requests))
    fates = Counter(fate for _, fate, _ in outcomes)
    assert min(fates.values()) > num_requests // 10, fates
    asyncio.run(explain_differences(server.url, bodies, expected, outcomes))
    server.assert_nothing_leaked()
    counters = server.get("/get_server_info")["counters"]
    assert counters["requests_retracted"] > 0
    assert counters["evicted_pages"] > 0
    assert counters["compiles_after_ready"] == 0

"""Two tenants and priorities under overload: answers as without, shares, limits, priorities."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.accuracy.near_ties import differences, greedy
from tests.live.live_server import LiveServer, bearer, live_server

pytestmark = pytest.mark.long
ROWS, NEW_TOKENS = 4, 24
NUM_BIG, NUM_SMALL = 48, 8
KEYS = "big key-big\nsmall key-small max_queued=2 max_running=2\n"
ADMIN_KEY = "key-admin"
FLAGS = (
    *("--max-running-requests", str(ROWS), "--context-length", "128"),
    # Two requests of the longest fit: the others are retracted, or wait.
    *("--max-total-tokens", "256", "--schedule-conservativeness", "0.2"),
    *("--chunked-prefill-size", "64", "--fair-share", "tokens", "--enable-priority-scheduling"),
    *("--check-memory", "busy", "--decode-log-interval", "0"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("live")
    keys, admin = folder / "keys", folder / "admin-keys"
    keys.write_text(KEYS)
    admin.write_text(f"root {ADMIN_KEY}\n")
    files = ("--api-key-file", str(keys), "--admin-api-key-file", str(admin))
    events = ("--record-events", str(folder / "tenants.events"))
    with live_server(folder, *FLAGS, *files, *events, key=ADMIN_KEY) as server:
        yield server


def make_bodies() -> list[dict[str, Any]]:
    rng = random.Random(5)
    stem = [rng.randrange(300, 700) for _ in range(24)]
    prompts = [
        stem[: rng.randrange(24)] + [rng.randrange(300, 700) for _ in range(rng.randrange(8, 64))]
        for _ in range(12)
    ]
    return [{"input_ids": each, "sampling_params": greedy(NEW_TOKENS)} for each in prompts]


class Load:
    """Requests of both tenants, the order in which they end, and the refusals on the way."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.bodies = make_bodies()
        self.answers: list[tuple[int, list[int]]] = []  # number of the body, tokens
        self.ended: list[str] = []
        self.refusals: list[httpx.Response] = []
        self.ended_at_pause = 0
        self._client = client
        self._end = asyncio.Condition()

    async def ask(self, key: str, number: int, name: str, **fields: Any) -> None:
        """Send one request, and again once another has ended, as long as the tenant's queue is
        full."""
        number %= len(self.bodies)
        body, headers = self.bodies[number] | fields, bearer(key)
        while (
            answer := await self._client.post("/generate", json=body, headers=headers)
        ).status_code == 429:
            self.refusals.append(answer)
            async with self._end:
                await self._end.wait()
        assert answer.status_code == 200, answer.text
        self.answers.append((number, answer.json()["output_ids"]))
        self.ended.append(name)
        async with self._end:
            self._end.notify_all()

    def ended_meanwhile(self, name: str, count: int) -> int:
        """Requests of the big tenant that ended after the pause, before so many called `name`."""
        at = [i for i, each in enumerate(self.ended) if each == name][count - 1]
        return self.ended[:at].count("big") - self.ended_at_pause


async def overload(server: LiveServer) -> Load:
    """While it is paused a request of high priority and the small tenant's come, so that all that
    is there is known whatever the speed of the client."""
    client = httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits())
    async with client, asyncio.TaskGroup() as group:
        load = Load(client)
        for i in range(NUM_BIG):
            group.create_task(load.ask("key-big", i, "big"))
        await until(server, lambda tenants: tenants.get("big", {}).get("num_running", 0) > 0)
        admin, in_place = bearer(ADMIN_KEY), {"mode": "in_place"}
        await client.post("/pause_generation", json=in_place, headers=admin)
        await until(server, lambda tenants: count(tenants, "big") + len(load.ended) == NUM_BIG)
        load.ended_at_pause = len(load.ended)
        group.create_task(load.ask("key-big", 0, "high", priority=100))
        for i in range(NUM_SMALL):
            group.create_task(load.ask("key-small", i, "small"))
        await until(
            server,
            lambda tenants: (
                count(tenants, "small") == 2
                and count(tenants, "big") + load.ended_at_pause == NUM_BIG + 1
            ),
        )
        await client.post("/continue_generation", headers=admin)
    return load


async def until(server: LiveServer, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until that holds for the figures of the tenants."""
    while not holds((await asyncio.to_thread(server.get, "/get_server_info"))["tenants"]):
        await asyncio.sleep(0.01)


def count(tenants: dict[str, Any], name: str) -> int:
    figures = tenants.get(name, {"num_queued": 0, "num_running": 0})
    return int(figures["num_queued"] + figures["num_running"])


def generated(server: LiveServer) -> dict[str, float]:
    exposed = httpx.get(server.url + "/metrics", headers=bearer(ADMIN_KEY), timeout=60).text
    return {
        sample.labels["tenant"]: sample.value
        for family in text_string_to_metric_families(exposed)
        for sample in family.samples
        if sample.name == "sglang:tenant_generation_tokens_total"
    }


async def check_answers(server: LiveServer, load: Load) -> None:
    """All are those of each request alone, but for near ties."""
    async with httpx.AsyncClient(
        base_url=server.url, headers=bearer("key-big"), timeout=120
    ) as client:
        alone = [
            (await client.post("/generate", json=body)).json()["output_ids"] for body in load.bodies
        ]
        for number, tokens in load.answers:
            await differences(client, load.bodies[number]["input_ids"], alone[number], tokens)


def test_overload_by_one_tenant_leaves_the_other_and_high_priorities_their_part(
    server: LiveServer,
) -> None:
    load = asyncio.run(overload(server))
    assert len(load.answers) == NUM_BIG + NUM_SMALL + 1
    assert load.ended_meanwhile("high", 1) <= 2 * ROWS
    assert load.ended_meanwhile("small", 2) <= 4 * ROWS
    assert load.refusals
    for refusal in load.refusals:
        assert refusal.json()["error"]["code"] == "tenant_queue_full"
        assert int(refusal.headers["retry-after"]) >= 1
    assert generated(server) == {
        "": 0,
        "big": (NUM_BIG + 1) * NEW_TOKENS,
        "small": NUM_SMALL * NEW_TOKENS,
    }
    asyncio.run(check_answers(server, load))
    server.assert_nothing_leaked()
    counters = server.get("/get_server_info")["counters"]
    assert counters["requests_retracted"] > 0
    recording = server.log.with_name("tenants.events")
    command = [sys.executable, "-m", "sgl_jax.replay", str(recording)]
    replay = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert replay.returncode == 0, replay.stdout + replay.stderr


def test_the_key_of_another_finds_no_session(server: LiveServer) -> None:
    def post(key: str, path: str, **body: Any) -> httpx.Response:
        return httpx.post(server.url + path, json=body, headers=bearer(key), timeout=60)

    assert post("key-big", "/open_session", session_id="s", streaming=True).json() == "s"
    turn = make_bodies()[0] | {"session_params": {"id": "s"}}
    refused = post("key-small", "/generate", **turn)
    assert (refused.status_code, "'s'" in refused.text) == (400, True)
    assert post("key-big", "/generate", **turn).status_code == 200
    assert post("key-big", "/close_session", session_id="s").status_code == 200
    server.assert_nothing_leaked()

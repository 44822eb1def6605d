"""Conversations go on after a restart: sessions keep their ids, prefixes come from the store."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.accuracy.near_ties import differences
from tests.live.live_server import LiveServer, live_server
from tests.live.test_sessions import GREEDY, Client, prompts
from tests.support.waiting import until

FLAGS = (
    *("--dp-size", "2", "--page-size", "4", "--context-length", "512", "--check-memory", "busy"),
    *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
    *("--hicache-fetch-policy", "always"),
    *("--hicache-storage-prefetch-policy", "wait_complete", "--max-total-tokens", "4096"),
)
NUM_TURNS = 3


class Talk:
    """A conversation: in a session, or with its whole history in each request."""

    def __init__(self, number: int, new: list[list[int]]) -> None:
        self.kind = ("streaming", "regular", "plain")[number % 3]
        self.new = new
        self.history: list[int] = []
        self.session_id = ""
        self.last_turn: str | None = None

    def open(self, client: Client) -> None:
        if self.kind != "plain":
            self.session_id = client.open(streaming=self.kind == "streaming")

    def turn(self, client: Client, number: int) -> Any:
        new = self.new[number]
        if self.kind == "plain":
            answer = client.post("/generate", input_ids=self.history + new, sampling_params=GREEDY)
        else:
            before = {} if self.last_turn is None else {"rid": self.last_turn}
            answer = client.turn(self.session_id, new, **before)
            if self.kind == "regular":
                self.last_turn = answer["meta_info"]["id"]
        assert answer["meta_info"]["prompt_tokens"] == len(self.history) + len(new)
        self.history += new + answer["output_ids"]
        return answer


def flags_with(folder: Path) -> tuple[str, ...]:
    return (*FLAGS, "--restore-cache", str(folder / "cache"), "--save-cache-interval", "0")


def begin(client: Client, num_talks: int) -> list[Talk]:
    """All turns but the last of each conversation."""
    news = prompts(7, num_talks * NUM_TURNS)
    talks = []
    for number in range(num_talks):
        own = [[*range(300, 340), *new] for new in news[number::num_talks]]
        talks.append(Talk(number, own))
    for talk in talks:
        talk.open(client)
        for number in range(NUM_TURNS - 1):
            talk.turn(client, number)
    return talks


def check_last_turns(folder: Path, talks: list[Talk], other: LiveServer) -> float:
    """The last turns, on a restarted server and, whole, on `other`; the share of tokens found."""
    asked: list[tuple[list[int], list[int]]] = []
    num_old = num_found = 0
    with live_server(folder, *flags_with(folder), is_quickly_compiled=True) as server:
        client = Client(server)
        for talk in talks:
            before = list(talk.history)
            answer = talk.turn(client, NUM_TURNS - 1)
            num_old += len(before)
            num_found += min(answer["meta_info"]["cached_tokens"], len(before))
            asked.append((before + talk.new[NUM_TURNS - 1], answer["output_ids"]))
        server.close_sessions()
        server.assert_nothing_leaked()
    asyncio.run(check_answers(other, asked))
    return num_found / num_old


def is_storing(server: LiveServer) -> bool:
    """Whether prefixes are on their way to host memory or the store."""
    ranks = server.get("/get_server_info")["ranks"]
    pools = [pool for rank in ranks for pool in rank["host_pools"]]
    is_waiting = any(rank["host_copies_waiting"] for rank in ranks)
    return is_waiting or any(pool["arriving_blocks"] or pool["leaving_blocks"] for pool in pools)


async def check_answers(server: LiveServer, asked: list[tuple[list[int], list[int]]]) -> None:
    """A server that was never stopped answers the same, but for near ties."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        for prompt, tokens in asked:
            body = {"input_ids": prompt, "sampling_params": GREEDY}
            expected = (await client.post("/generate", json=body)).json()["output_ids"]
            await differences(client, prompt, expected, tokens)


@pytest.mark.long
@pytest.mark.parametrize("num_talks", [3, 50])
def test_conversations_go_on_after_a_restart(
    tmp_path: Path, num_talks: int, demo_server: LiveServer
) -> None:
    with live_server(tmp_path, *flags_with(tmp_path), is_quickly_compiled=True) as server:
        talks = begin(Client(server), num_talks)
    share = check_last_turns(tmp_path, talks, demo_server)
    print(f"{share:.4f} of the tokens of {num_talks} conversations were found")
    assert share >= 0.95


@pytest.mark.long
def test_a_server_that_is_killed_in_a_save_leaves_the_last_whole_one(
    tmp_path: Path, demo_server: LiveServer
) -> None:
    with live_server(tmp_path, *flags_with(tmp_path), exit_code=1) as server:
        client = Client(server)
        talks = begin(client, 6)
        assert client.post("/save_cache")["num_tokens"] > 0
        until(lambda: not is_storing(server), "prefixes are in the store")
        engine = server.engine
        with contextlib.suppress(httpx.TimeoutException):  # the next save has begun by then
            httpx.post(server.url + "/save_cache", timeout=0.02)
        engine.kill()
        server.process.wait(60)
    share = check_last_turns(tmp_path, talks, demo_server)
    assert share >= 0.95


@pytest.mark.long
def test_a_changed_save_is_not_restored(tmp_path: Path) -> None:
    with live_server(tmp_path, *flags_with(tmp_path)) as server:
        begin(Client(server), 3)
    for facts in (tmp_path / "cache").glob("saved_cache_2/*/facts/metadata"):
        facts.write_text(json.dumps(json.loads(facts.read_text()) | {"fingerprint": "ab"}))
    with live_server(tmp_path, *flags_with(tmp_path)) as server:
        assert server.get("/list_sessions") == {"sessions": []}
        log = server.log.read_text()
        assert log.count("not restored") == 1
        assert Client(server).post("/generate", input_ids=[5], sampling_params=GREEDY)

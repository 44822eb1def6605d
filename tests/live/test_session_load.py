"""Many conversations on a server that can hold a quarter of them: all are right, none leaks."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgl_jax.text.tokenizer import Tokenizer
from tests.accuracy import near_ties
from tests.live.live_server import DEMO, LiveServer, live_server

NUM_SESSIONS, NUM_TURNS, NUM_PLAIN = 64, 20, 16
NUM_NEW, NUM_OUTPUT = 8, 6
HISTORY = NUM_TURNS * (NUM_NEW + NUM_OUTPUT)
ASSISTANT = "<|im_start|>assistant\n"


def generate(client: httpx.Client, ids: list[int], **more: Any) -> dict[str, Any]:
    body = {"input_ids": ids, "sampling_params": near_ties.greedy(NUM_OUTPUT), **more}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def converse(
    client: httpx.Client, seed: int, num_turns: int = NUM_TURNS, *, in_place: bool = False
) -> list[tuple[list[int], list[int]]]:
    """A whole conversation in a session; each turn's whole prompt and output.

    `in_place`: each turn must find all of the turns before but the last token, of which no KV was
    computed yet.
    """
    rng = random.Random(seed)
    opened = client.post("/open_session", json={"capacity_of_str_len": 0, "streaming": True})
    session_id, history, turns = opened.json(), [], []
    for _ in range(num_turns):
        new = [rng.randrange(300, 700) for _ in range(NUM_NEW)]
        answer = generate(client, new, session_params={"id": session_id})
        assert answer["meta_info"]["prompt_tokens"] == len(history) + NUM_NEW
        if in_place:
            assert answer["meta_info"]["cached_tokens"] == max(len(history) - 1, 0)
        turns.append((history + new, answer["output_ids"]))
        history = history + new + answer["output_ids"]
    assert client.post("/close_session", json={"session_id": session_id}).status_code == 200
    return turns


def ask_plainly(client: httpx.Client, seed: int) -> list[tuple[list[int], list[int]]]:
    """Requests without a session, one after the other."""
    rng = random.Random(-seed - 1)
    turns = []
    for _ in range(NUM_TURNS):
        ids = [rng.randrange(300, 700) for _ in range(rng.randrange(4, 120))]
        turns.append((ids, generate(client, ids)["output_ids"]))
    return turns


# By default tests/engine and test_sessions.py have shorter conversations.
@pytest.mark.long
def test_a_fact_of_the_first_turn_is_known_in_the_twentieth(tmp_path: Path) -> None:
    """Though no turn sends what was said before it, every turn is retracted on its way, and the
    session is evicted between them: only the server can know it."""
    flags = ("--context-length", "1024", "--max-running-requests", "2", "--check-memory", "busy")
    says = ["The code of Anna is 471.", *(f"What is {i} + {i + 3}?" for i in range(11, 29))]
    encode = Tokenizer.load(str(DEMO)).encode
    total, sent = 0, []
    with (
        live_server(tmp_path, *flags, "--test-retract") as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        session_id = client.post("/open_session", json={"streaming": True}).json()
        for text in (*says, "What is the code of Anna?"):
            end_of_answer = "\n" if sent else ""  # of the template; the model ends before it
            sent.append(f"{end_of_answer}<|im_start|>user\n{text}<|im_end|>\n{ASSISTANT}")
            body = {"text": sent[-1], "sampling_params": {"temperature": 0}}
            answer = client.post("/generate", json={**body, "session_params": {"id": session_id}})
            assert answer.status_code == 200, answer.text
            meta = answer.json()["meta_info"]
            assert meta["prompt_tokens"] == total + len(encode(sent[-1]))
            total = meta["prompt_tokens"] + meta["completion_tokens"]
            # Two requests at once need both rows, the session's among them.
            list(threads.map(lambda i: generate(client, [300 + i] * 20), range(2)))
        counters = server.get("/get_server_info")["counters"]
        client.post("/close_session", json={"session_id": session_id})
        server.assert_nothing_leaked()
    assert len(sent) == 20
    assert ["471" in text for text in sent] == [True] + 19 * [False]
    assert "471" in answer.json()["text"]
    assert counters["sessions_evicted"] > 10
    assert counters["requests_force_retracted"] > 20


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_sessions_that_do_not_fit_are_all_right_and_leave_nothing(tmp_path: Path) -> None:
    pool = NUM_SESSIONS * HISTORY // 4
    flags = (
        *("--context-length", "512", "--max-running-requests", "24", "--dp-size", "2"),
        *("--max-total-tokens", str(pool // 2), "--check-memory", "busy"),
        *("--memory-error-action", "crash"),
    )
    with (
        live_server(tmp_path, *flags) as server,
        httpx.Client(
            base_url=server.url, timeout=600, limits=httpx.Limits(max_connections=None)
        ) as client,
    ):
        with ThreadPoolExecutor(NUM_SESSIONS + NUM_PLAIN) as threads:
            jobs = [threads.submit(converse, client, i) for i in range(NUM_SESSIONS)]
            jobs += [threads.submit(ask_plainly, client, i) for i in range(NUM_PLAIN)]
            turns = [turn for job in jobs for turn in job.result()]
        check(server, turns)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_long_conversations_stay_in_place_and_answer_as_if_sent_whole(tmp_path: Path) -> None:
    num_sessions, num_turns = 8, 150
    flags = (
        *("--context-length", "2304", "--max-running-requests", str(num_sessions)),
        *("--max-total-tokens", "32768"),  # nothing needs to be evicted
        *("--check-memory", "busy", "--memory-error-action", "crash"),
    )
    with (
        live_server(tmp_path, *flags) as server,
        httpx.Client(base_url=server.url, timeout=600) as client,
    ):
        with ThreadPoolExecutor(num_sessions) as threads:
            jobs = [
                threads.submit(converse, client, i, num_turns, in_place=True)
                for i in range(num_sessions)
            ]
            turns = [turn for job in jobs for turn in job.result()]
        assert server.get("/get_server_info")["counters"]["sessions_evicted"] == 0
        asyncio.run(explain_differences(server.url, turns))
        server.assert_nothing_leaked()
        server.assert_flush_frees_everything()


async def explain_differences(url: str, turns: list[tuple[list[int], list[int]]]) -> None:
    """Each output is that of the whole prompt sent alone, but for near ties."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for ids, got in turns:
            body = {"input_ids": ids, "sampling_params": near_ties.greedy(NUM_OUTPUT)}
            wanted = (await near_ties.generate(client, body))["output_ids"]
            await near_ties.differences(client, ids, wanted, got)


def check(server: LiveServer, turns: list[tuple[list[int], list[int]]]) -> None:
    """All answers are right, and all pages are free in the end."""
    assert len(turns) == (NUM_SESSIONS + NUM_PLAIN) * NUM_TURNS
    asyncio.run(explain_differences(server.url, turns))
    server.assert_nothing_leaked()
    info = server.get("/get_server_info")
    assert info["counters"]["sessions_evicted"] > 0
    assert all(rank["session_rows"] == rank["session_held_pages"] == 0 for rank in info["ranks"])
    server.assert_flush_frees_everything()
    print(f"{info['counters']}")

"""Conversations that keep their memory, against a real server, as its clients have them."""

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.live.live_server import LiveServer, live_server
from tests.support.waiting import until

GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
LONG = {**GREEDY, "max_new_tokens": 900}
TIMEOUT_S = 120.0
FLAGS = (*("--context-length", "1024", "--max-running-requests", "8", "--check-memory", "busy"),)
# Two ranks with a quarter of the rows and of the pages that all their sessions want, drafts, and
# retracts though nothing is short. Small, so that there is little to compile.
HARD = (
    *("--dp-size", "2", "--max-running-requests", "8", "--max-total-tokens", "320"),
    *("--context-length", "256", "--chunked-prefill-size", "64", "--test-retract"),
    *("--speculative-algorithm", "NGRAM", "--check-memory", "busy"),
)


class Client:
    """Speaks to a server as SGLang's clients do."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self._http = httpx.Client(base_url=server.url, timeout=TIMEOUT_S)

    def post(self, path: str, **body: Any) -> Any:
        answer = self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refusal(self, path: str, **body: Any) -> str:
        """The message of the 400 that this must be."""
        answer = self._http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        message: str = answer.json()["error"]["message"]
        return message

    def open(self, **fields: Any) -> str:
        session_id: str = self.post("/open_session", capacity_of_str_len=0, **fields)
        return session_id

    def turn(self, session_id: str, ids: list[int], sampling: Any = GREEDY, **params: Any) -> Any:
        params["id"] = session_id
        return self.post(
            "/generate", input_ids=ids, sampling_params=sampling, session_params=params
        )

    def events(self, **body: Any) -> Iterator[Any]:
        """The events of a streamed answer; leaving early closes the connection."""
        with httpx.stream(
            "POST", self.server.url + "/generate", json={**body, "stream": True}, timeout=TIMEOUT_S
        ) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def entry(self, session_id: str) -> Any:
        listed = self.server.get("/list_sessions")["sessions"]
        return next(entry for entry in listed if entry["session_id"] == session_id)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("live"), *FLAGS) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    """All that a test opened is closed at its end, and then no page or row is held."""
    client = Client(server)
    yield client
    for entry in server.get("/list_sessions")["sessions"]:
        client.post("/close_session", session_id=entry["session_id"])
    assert server.get("/list_sessions") == {"sessions": []}
    server.assert_nothing_leaked()
    server.assert_flush_frees_everything()


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300, 700) for _ in range(rng.randrange(1, 30))] for _ in range(count)]


def test_turn_by_turn_is_the_same_as_all_at_once(client: Client) -> None:
    session_id = client.open(streaming=True)
    history: list[int] = []
    for i, new in enumerate(prompts(1, 8)):
        body = {"input_ids": new, "sampling_params": GREEDY, "session_params": {"id": session_id}}
        answer = list(client.events(**body))[-1] if i % 2 else client.post("/generate", **body)
        meta = answer["meta_info"]
        assert meta["prompt_tokens"] == len(history) + len(new)
        assert meta["cached_tokens"] == max(len(history) - 1, 0)
        expected = client.post("/generate", input_ids=history + new, sampling_params=GREEDY)
        assert answer["output_ids"] == expected["output_ids"]
        history += new + answer["output_ids"]


def test_a_regular_session_branches(client: Client) -> None:
    session_id = client.open()
    root = [301, 302, 303]
    first = client.turn(session_id, root)
    rid, history = first["meta_info"]["id"], root + first["output_ids"]
    for params, expected in (
        ({"rid": rid}, history),
        ({"rid": rid, "offset": 5}, history[:5]),
        ({"rid": rid, "drop_previous_output": True}, root),
        ({"rid": rid, "replace": True}, history),
        ({"rid": None}, []),
    ):
        answer = client.turn(session_id, [310, 311], **params)
        whole = client.post("/generate", input_ids=[*expected, 310, 311], sampling_params=GREEDY)
        assert answer["output_ids"] == whole["output_ids"], params
        assert answer["meta_info"]["prompt_tokens"] == len(expected) + 2
    assert "has no turn" in client.refusal(
        "/generate", text="hi", session_params={"id": session_id, "rid": "missing"}
    )


@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("how", ["abort", "disconnect"])
def test_a_turn_cut_short_never_was(client: Client, num_before: int, how: str) -> None:
    session_id = client.open(streaming=True)
    history: list[int] = []
    for new in prompts(2, num_before):
        history += new + client.turn(session_id, new)["output_ids"]
    body = {"input_ids": [350] * 20, "sampling_params": LONG, "session_params": {"id": session_id}}
    for i, event in enumerate(client.events(**body, rid="cut short")):
        if i == 1 and how == "disconnect":
            break
        if i == 1:
            assert client.post("/abort_request", rid="cut short") == {"aborted": 1}
        last = event
    if how == "abort":
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
    # A lost client is noticed later.
    until(lambda: client.entry(session_id)["num_running"] == 0, "the turn of a lost client ends")
    assert client.entry(session_id)["num_tokens"] == len(history)
    answer = client.turn(session_id, [360, 361])
    assert answer["meta_info"]["prompt_tokens"] == len(history) + 2
    whole = client.post("/generate", input_ids=[*history, 360, 361], sampling_params=GREEDY)
    assert answer["output_ids"] == whole["output_ids"]


def test_one_turn_at_a_time_and_a_close_waits_for_its_end(client: Client) -> None:
    session_id = client.open(streaming=True)
    events = client.events(input_ids=[301], sampling_params=LONG, session_params={"id": session_id})
    next(events)
    own = {"text": "hi", "session_params": {"id": session_id}}
    assert "in flight" in client.refusal("/generate", **own)
    client.post("/close_session", session_id=session_id)
    assert "it was closed" in client.refusal("/generate", **own)
    *_, last = events
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 900}
    assert client.server.get("/list_sessions") == {"sessions": []}


def test_an_idle_session_ends_by_itself_and_its_memory_with_it(client: Client) -> None:
    session_id = client.open(streaming=True, timeout=0.5)
    client.turn(session_id, [301] * 40)
    until(lambda: client.server.get("/list_sessions") == {"sessions": []}, "sessions end")
    client.server.assert_nothing_leaked()
    assert "there is no session" in client.refusal(
        "/generate", text="hi", session_params={"id": session_id}
    )


def test_an_id_is_taken_until_it_is_closed(client: Client) -> None:
    assert client.open(session_id="mine") == "mine"
    assert "exists already" in client.refusal("/open_session", session_id="mine")
    client.post("/close_session", session_id="mine")
    assert "there is no session" in client.refusal("/close_session", session_id="mine")
    assert client.open(session_id="mine", streaming=True) == "mine"


def test_back_to_an_earlier_turn_and_on_in_two_ways(client: Client) -> None:
    session_id = client.open(streaming=True)
    first, second = prompts(3, 2)
    history = first + client.turn(session_id, first)["output_ids"]
    client.turn(session_id, second)
    back = client.post("/rollback_session", session_id=session_id, num_turns=1)
    assert back == {"num_turns": 1, "num_tokens": len(history)}
    fork = client.post("/fork_session", session_id=session_id)["session_id"]
    for name, new in ((session_id, [350]), (fork, [351])):
        whole = client.post("/generate", input_ids=history + new, sampling_params=GREEDY)
        assert client.turn(name, new)["output_ids"] == whole["output_ids"]


def test_a_chat_is_answered_as_without_its_session_and_computes_only_what_is_new(
    client: Client,
) -> None:
    """A chat sends all of the conversation; `test_session_load.py` asks what only the session
    can know."""
    session_id = client.open(streaming=True)
    chat = openai.OpenAI(base_url=client.server.url + "/v1", api_key="none", max_retries=0)
    messages: list[Any] = []
    total = 0
    sums = [f"What is {i} + {i + 5}?" for i in range(11, 17)]
    for text in ("The code of Anna is 471.", *sums, "What is the code of Anna?"):
        messages.append({"role": "user", "content": text})
        alone = chat.chat.completions.create(model="demo", messages=messages, temperature=0)
        answer = chat.chat.completions.create(
            model="demo", messages=messages, temperature=0, extra_body={"session_id": session_id}
        )
        content = answer.choices[0].message.content
        assert content == alone.choices[0].message.content
        usage = answer.usage
        assert usage.prompt_tokens == alone.usage.prompt_tokens
        assert usage.prompt_tokens_details.cached_tokens >= total - 1
        total = usage.total_tokens
        messages.append({"role": "assistant", "content": content})
    assert "471" in content
    # A conversation that was edited keeps what it still has in common.
    messages[-2]["content"] = "What is the code of Ben?"
    edited = chat.chat.completions.create(
        model="demo",
        messages=messages[:-1],
        temperature=0,
        extra_body={"session_id": session_id},
    )
    assert "471" not in edited.choices[0].message.content
    assert edited.usage.prompt_tokens_details.cached_tokens > 100
    with pytest.raises(openai.BadRequestError, match="there is no session 'missing'"):
        chat.chat.completions.create(
            model="demo", messages=messages[:1], extra_body={"session_id": "missing"}
        )


def test_the_metrics_show_who_holds_what(client: Client) -> None:
    session_id = client.open(streaming=True)
    client.turn(session_id, [301] * 40)
    client.turn(session_id, [302])
    info = client.server.until_at_rest()
    assert info["num_sessions"] == 1
    text = httpx.get(client.server.url + "/metrics", timeout=TIMEOUT_S).text
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]

    def value(name: str, **labels: str) -> float:
        return sum(
            sample.value
            for sample in samples
            if sample.name == f"sglang:{name}" and labels.items() <= sample.labels.items()
        )

    assert value("num_streaming_sessions") == 1
    assert value("rows", dp_rank="0", state="session") == 1
    held = info["ranks"][0]["session_held_pages"]
    assert value("kv_pages", dp_rank="0", state="session_held") == held
    assert value("streaming_session_held_tokens") >= 40
    assert value("kv_pages") == 2 * value("kv_pages", state="total")
    # The history of a turn counts as prompt, too.
    assert 0 < value("cached_tokens_total") <= value("prompt_tokens_total")
    assert any(sample.name == "sglang:evicted_sessions_total" for sample in samples)


def test_nothing_was_compiled_meanwhile(server: LiveServer) -> None:
    assert server.get("/get_server_info")["counters"]["compiles_after_ready"] == 0


@pytest.mark.long
def test_more_sessions_than_memory_with_drafts_and_retracts(tmp_path: Path) -> None:
    """Sessions are evicted and turns retracted all the time; every answer is right."""
    conversations = {seed: prompts(seed, 5) for seed in range(16)}
    with live_server(tmp_path, *HARD) as server:
        client = Client(server)

        def converse(seed: int) -> list[tuple[list[int], list[int]]]:
            session_id = client.open(streaming=True)
            history: list[int] = []
            turns = []
            for new in conversations[seed]:
                answer = client.turn(session_id, new)
                assert answer["meta_info"]["prompt_tokens"] == len(history) + len(new)
                turns.append((history + new, answer["output_ids"]))
                history = history + new + answer["output_ids"]
                barrier.wait(TIMEOUT_S)
            client.post("/close_session", session_id=session_id)
            return turns

        barrier = threading.Barrier(len(conversations))
        with ThreadPoolExecutor(len(conversations)) as pool:
            told = [pair for turns in pool.map(converse, conversations) for pair in turns]
        counters = server.until_at_rest()["counters"]
        assert counters["sessions_evicted"] > 0
        assert counters["requests_force_retracted"] > 0
        assert counters["drafted_tokens"] > 0
        server.assert_nothing_leaked()
        server.assert_flush_frees_everything()
        for prompt, output in random.Random(0).sample(told, 24):
            whole = client.post("/generate", input_ids=prompt, sampling_params=GREEDY)
            assert output == whole["output_ids"]

"""The bodies that `bench_serving` of SGLang and of sglang-jax send, by backend.

The benches are not installable by themselves, so their fields are listed here. They read what they
measure from the streams: one line an event, text under a known name, the count of tokens.
"""

import json
from typing import Any

import httpx
import pytest

from tests.live.live_server import LiveServer

pytestmark = pytest.mark.long

NUM_TOKENS = 16
PROMPT = "What is 17 + 25?"

_GENERATE = {
    "text": PROMPT,
    "sampling_params": {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
    "stream": True,
    "lora_path": None,
    "return_logprob": False,
    "return_routed_experts": False,
    "logprob_start_len": -1,
}
_COMPLETION = {
    "model": "demo",
    "prompt": PROMPT,
    "temperature": 0.0,
    "best_of": 1,
    "max_tokens": NUM_TOKENS,
    "stream": True,
    "ignore_eos": True,
}
_CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": PROMPT}],
    "temperature": 0.0,
    "max_completion_tokens": NUM_TOKENS,
    "stream": True,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "sglang": ("/generate", _GENERATE),
    "sglang-ids": (
        "/generate",
        {key: value for key, value in _GENERATE.items() if key != "text"}
        | {"input_ids": list(range(20, 40))},
    ),
    "sglang-oai": ("/v1/completions", _COMPLETION),
    "vllm": ("/v1/completions", _COMPLETION | {"stream_options": {"include_usage": True}}),
    "sglang-oai-chat": ("/v1/chat/completions", _CHAT),
    "vllm-chat": ("/v1/chat/completions", _CHAT | {"top_p": 1.0}),
}


def _lines(worker: LiveServer, route: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, which must be whole lines that end with [DONE]."""
    with httpx.stream("POST", worker.url + route, json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _text(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


@pytest.mark.parametrize("backend", BODIES)
def test_a_streamed_body_gives_the_tokens_asked_for(worker: LiveServer, backend: str) -> None:
    route, body = BODIES[backend]
    events = _lines(worker, route, body)
    if route == "/generate":
        assert events[-1]["text"]
        assert events[-1]["meta_info"]["completion_tokens"] == NUM_TOKENS
        return
    assert "".join(_text(event) for event in events if event["choices"])
    if "stream_options" in body:
        assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS


@pytest.mark.parametrize("backend", BODIES)
def test_a_body_without_a_stream_gives_the_tokens_asked_for(
    worker: LiveServer, backend: str
) -> None:
    route, body = BODIES[backend]
    whole = {key: value for key, value in body.items() if key != "stream_options"}
    answer = httpx.post(worker.url + route, json=whole | {"stream": False}, timeout=60)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["meta_info" if route == "/generate" else "usage"]
    assert usage["completion_tokens"] == NUM_TOKENS


def test_the_other_calls_of_the_benches_are_there(worker: LiveServer) -> None:
    assert httpx.get(worker.url + "/v1/models").json()["data"][0]["id"] == "demo"
    assert httpx.post(worker.url + "/flush_cache").status_code == 200
    assert httpx.get(worker.url + "/get_server_info").status_code == 200

"""sglang-router, under two policies, passes on what clients ask of two workers."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from tests.clients.router import router
from tests.live.live_server import LiveServer

pytest.importorskip("sglang_router")
pytestmark = pytest.mark.long

CONVERSATION: list[Any] = [
    {"role": "user", "content": "The code of Anna is 471."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is the code of Anna?"},
]
PROMPT = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n"
SUM = "17 + 25 = 42."


@dataclass(frozen=True)
class Routed:
    url: str
    policy: str
    workers: tuple[LiveServer, LiveServer]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    def num_prompt_tokens(self) -> list[int]:
        """Prompt tokens that each worker has been sent since its start."""
        return [_num_prompt_tokens(worker) for worker in self.workers]


def _num_prompt_tokens(worker: LiveServer) -> int:
    metrics = httpx.get(worker.url + "/metrics", timeout=60).text
    found = re.search(r"^sglang:prompt_tokens_total(?:\{.*\})? (\S+)$", metrics, re.MULTILINE)
    assert found is not None, metrics
    return int(float(found[1]))


@pytest.fixture(scope="module", params=["cache_aware", "round_robin"])
def routed(
    request: pytest.FixtureRequest,
    worker: LiveServer,
    second_worker: LiveServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Routed]:
    folder = tmp_path_factory.mktemp("router")
    with router(folder, request.param, [worker.url, second_worker.url]) as url:
        yield Routed(url, request.param, (worker, second_worker))


def test_chat_is_answered(routed: Routed) -> None:
    for _ in range(4):  # by either worker
        answer = routed.client.chat.completions.create(
            model="demo", messages=CONVERSATION, temperature=0
        )
        assert answer.choices[0].message.content == "It is 471."
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0


def test_chat_streams(routed: Routed) -> None:
    for _ in range(2):
        events = list(
            routed.client.chat.completions.create(
                model="demo",
                messages=CONVERSATION,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        pieces = [e.choices[0].delta.content or "" for e in events if e.choices]
        assert "".join(pieces) == "It is 471."
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens > 0


def test_completions_are_answered_and_stream(routed: Routed) -> None:
    whole = routed.client.completions.create(model="demo", prompt=PROMPT, temperature=0)
    assert whole.choices[0].text == SUM
    stream = routed.client.completions.create(
        model="demo", prompt=PROMPT, temperature=0, stream=True
    )
    assert "".join(e.choices[0].text for e in stream if e.choices) == SUM


def test_generate_is_answered(routed: Routed) -> None:
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 32}}
    for _ in range(2):
        answer = httpx.post(routed.url + "/generate", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"] == SUM
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "stop"


def test_generate_streams(routed: Routed) -> None:
    body = {
        "text": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 32},
        "stream": True,
    }
    with httpx.stream("POST", routed.url + "/generate", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    texts = [json.loads(line)["text"] for line in lines[:-1]]
    assert all(SUM.startswith(text) for text in texts)
    assert texts[-1] == SUM


def test_long_streams_come_in_pieces(routed: Routed) -> None:
    """A short answer may be one event, if the server was busy when it was generated."""
    length = 200
    chat = routed.client.chat.completions.create(
        model="demo",
        messages=CONVERSATION,
        max_tokens=length,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert len([e for e in chat if e.choices and e.choices[0].delta.content]) > 1
    body = {
        "text": PROMPT,
        "sampling_params": {"ignore_eos": True, "max_new_tokens": length},
        "stream": True,
    }
    with httpx.stream("POST", routed.url + "/generate", json=body, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    lengths = [json.loads(line)["meta_info"]["completion_tokens"] for line in lines[:-1]]
    assert len(lengths) > 1
    assert lengths == sorted(lengths)
    assert lengths[-1] == length


def test_a_refusal_comes_through_with_its_code(routed: Routed) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 17 + 25? " * 200}]
    with pytest.raises(openai.BadRequestError) as refused:
        routed.client.chat.completions.create(model="demo", messages=messages)
    assert refused.value.code == "context_length_exceeded"


def test_work_goes_to_the_workers_that_the_policy_names(routed: Routed) -> None:
    """In turn, or to the one that has the prefix in its cache."""
    for worker in routed.workers:
        worker.assert_flush_frees_everything()
    text = f"{routed.policy}: " + "a prefix to be found again " * 8
    before = routed.num_prompt_tokens()
    cached = []
    for turn in range(4):
        body = {"text": f"{text}{turn}", "sampling_params": {"max_new_tokens": 1}}
        answer = httpx.post(routed.url + "/generate", json=body, timeout=60)
        cached.append(answer.json()["meta_info"]["cached_tokens"])
    busy = [new > old for old, new in zip(before, routed.num_prompt_tokens(), strict=True)]
    if routed.policy == "round_robin":
        assert busy == [True, True]
        assert cached[0] == cached[1] == 0
        assert min(cached[2:]) > 0
    else:
        assert sorted(busy) == [False, True]
        assert cached[0] == 0
        assert min(cached[1:]) > 0

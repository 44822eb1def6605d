"""A conversation through the official OpenAI client."""

import json
import re

import openai
import pydantic
import pytest

from tests.live.live_server import LiveServer

CONVERSATION = [
    {"role": "user", "content": "The code of Anna is 471."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is the code of Anna?"},
]


@pytest.fixture
def client(demo_server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0)


def test_a_fact_given_earlier_is_recalled(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=CONVERSATION, temperature=0)  # type: ignore[arg-type]
    assert "471" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == (
        answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


def test_a_stream_says_the_same_and_ends_with_its_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=CONVERSATION, temperature=0)  # type: ignore[arg-type]
    events = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            model="demo",
            messages=CONVERSATION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_second_time_the_prompt_comes_from_the_cache(
    demo_server: LiveServer, client: openai.OpenAI
) -> None:
    page_size = demo_server.get("/get_server_info")["ranks"][0]["page_size"]
    for _ in range(2):
        answer = client.chat.completions.create(model="demo", messages=CONVERSATION, temperature=0)  # type: ignore[arg-type]
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached == (answer.usage.prompt_tokens - 1) // page_size * page_size


def test_a_salt_finds_what_was_sent_with_the_same_salt_and_nothing_else(
    demo_server: LiveServer, client: openai.OpenAI
) -> None:
    page_size = demo_server.get("/get_server_info")["ranks"][0]["page_size"]

    def cached_of(salt: str | None) -> int:
        answer = client.chat.completions.create(
            model="demo",
            messages=CONVERSATION,  # type: ignore[arg-type]
            temperature=0,
            extra_body={"cache_salt": salt, "priority": 1},
        )
        assert "471" in answer.choices[0].message.content
        whole_pages = (answer.usage.prompt_tokens - 1) // page_size * page_size
        found = answer.usage.prompt_tokens_details.cached_tokens
        assert found in (0, whole_pages)
        assert whole_pages > 0
        return int(found)

    cached_of(None)
    assert cached_of(None) > 0
    for salt in ("red", "blue"):
        assert cached_of(salt) == 0
        assert cached_of(salt) > 0


def test_an_answer_is_json_by_its_schema(client: openai.OpenAI) -> None:
    class Answer(pydantic.BaseModel):
        result: int
        is_even: bool

    question = [{"role": "user", "content": "What is 12 plus 30?"}]
    parsed = client.chat.completions.parse(model="demo", messages=question, response_format=Answer)  # type: ignore[arg-type]
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        model="demo", messages=question, response_format={"type": "json_object"}, max_tokens=200
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    with pytest.raises(openai.BadRequestError, match="unclosed group"):
        client.completions.create(model="demo", prompt="1", extra_body={"regex": "(a"})
    whole = client.completions.create(
        model="demo", prompt=["1", "2"], extra_body={"regex": "[0-9]{4}"}, n=2
    )
    assert all(re.fullmatch("[0-9]{4}", choice.text) for choice in whole.choices)


def test_after_all_this_nothing_was_compiled_and_nothing_leaked(demo_server: LiveServer) -> None:
    demo_server.close_sessions()  # of other files, which share the server
    demo_server.assert_nothing_leaked()
    assert demo_server.get("/get_server_info")["counters"]["compiles_after_ready"] == 0

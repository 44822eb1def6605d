"""litellm and langchain-openai tell a prompt that is too long from other errors, and chat."""

import os
from typing import Any

import pytest

from tests.live.live_server import LiveServer

# At import, litellm otherwise asks GitHub what models cost.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
litellm = pytest.importorskip("litellm")
langchain_openai = pytest.importorskip("langchain_openai")
langchain_exceptions = pytest.importorskip("langchain_core.exceptions")
pytestmark = pytest.mark.long

QUESTION = "What is 17 + 25?"
SUM = "17 + 25 = 42."
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
TOO_LONG = f"{QUESTION} " * 200


def _litellm(worker: LiveServer, content: str, **settings: Any) -> Any:
    return litellm.completion(
        model="openai/demo",
        api_base=worker.url + "/v1",
        api_key="none",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_retries=0,
        **settings,
    )


def _langchain(kind: str, worker: LiveServer, **settings: Any) -> Any:
    return getattr(langchain_openai, kind)(
        model="demo",
        base_url=worker.url + "/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
        **settings,
    )


def test_litellm_chats(worker: LiveServer) -> None:
    answer = _litellm(worker, QUESTION)
    assert answer.choices[0].message.content == SUM
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 0


def test_litellm_streams(worker: LiveServer) -> None:
    events = list(_litellm(worker, QUESTION, stream=True))
    assert "".join(e.choices[0].delta.content or "" for e in events) == SUM
    assert events[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_knows_a_prompt_that_is_too_long(worker: LiveServer, stream: bool) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        _litellm(worker, TOO_LONG, stream=stream)


def test_litellm_may_ask_for_more_output_than_there_is_room_for(worker: LiveServer) -> None:
    answer = _litellm(worker, QUESTION, max_tokens=4096)
    assert answer.choices[0].message.content == SUM


def test_litellm_takes_other_errors_for_what_they_are(worker: LiveServer) -> None:
    with pytest.raises(litellm.BadRequestError) as refused:
        _litellm(worker, QUESTION, top_p=5)
    assert not isinstance(refused.value, litellm.ContextWindowExceededError)


def test_langchain_chats(worker: LiveServer) -> None:
    answer = _langchain("ChatOpenAI", worker).invoke(QUESTION)
    assert answer.content == SUM
    assert answer.usage_metadata["output_tokens"] > 0


def test_langchain_streams(worker: LiveServer) -> None:
    chunks = list(_langchain("ChatOpenAI", worker, stream_usage=True).stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == SUM
    assert any(chunk.usage_metadata for chunk in chunks)


def test_langchain_completes(worker: LiveServer) -> None:
    model = _langchain("OpenAI", worker)
    assert model.invoke(PROMPT) == SUM
    assert "".join(model.stream(PROMPT)) == SUM


def test_langchain_knows_a_prompt_that_is_too_long(worker: LiveServer) -> None:
    with pytest.raises(langchain_exceptions.ContextOverflowError):
        _langchain("ChatOpenAI", worker).invoke(TOO_LONG)
    with pytest.raises(langchain_exceptions.ContextOverflowError):
        list(_langchain("ChatOpenAI", worker).stream(TOO_LONG))

"""The OpenAI API, as its clients know it."""

import asyncio
import json
from typing import Any

import openai
import pytest

from sgl_jax.core.messages import AbortRequest, GenerateRequest
from sgl_jax.core.sampling_params import choice_seed
from tests.engine.scripted_engine import (
    CRASH_SEED,
    FULL_SEED,
    LATE_SEED,
    LOGPROB,
    MAX_RUNNING,
    SECOND_FULL_SEED,
)
from tests.server.conftest import MAX_QUEUED, Rig
from tests.support.waiting import meanwhile_until

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi there"}]


def events(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [
        "[DONE]" if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
        for line in lines
    ]


async def chat(rig: Rig, **fields: Any) -> Any:
    answer = await rig.http.post("/v1/chat/completions", json={"messages": HI} | fields)
    assert answer.status_code == 200, answer.text
    return events(answer.text) if fields.get("stream") else answer.json()


async def complete(rig: Rig, **fields: Any) -> Any:
    answer = await rig.http.post("/v1/completions", json={"prompt": "hello, "} | fields)
    assert answer.status_code == 200, answer.text
    return events(answer.text) if fields.get("stream") else answer.json()


async def test_a_conversation_is_answered(rig: Rig) -> None:
    answer = await chat(rig, max_tokens=100)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hi there"}
    assert choice["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 2


async def test_a_stream_spells_the_same_answer(rig: Rig) -> None:
    *chunks, usage, done = await chat(rig, stream=True, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "hi there"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "stop"
    ]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == (await chat(rig))["usage"]


async def test_without_include_usage_a_stream_says_nothing_of_it(rig: Rig) -> None:
    *chunks, _ = await chat(rig, stream=True)
    assert all("usage" not in chunk for chunk in chunks)


async def test_several_choices_come_interleaved_with_seeds_of_their_own(rig: Rig) -> None:
    *chunks, _ = await chat(rig, stream=True, n=3, seed=-3)
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"]["content"]
    assert texts == ["hi there"] * 3
    seeds = [m.sampling.seed for m in rig.engine.seen if isinstance(m, GenerateRequest)]
    assert seeds == [-3, choice_seed(-3, 1), choice_seed(-3, 2)]


async def test_seed_minus_one_is_random(rig: Rig) -> None:
    await chat(rig, n=6, seed=-1)
    seeds = [m.sampling.seed for m in rig.engine.seen if isinstance(m, GenerateRequest)]
    assert seeds == [None] * 6


async def test_content_may_come_in_parts_and_from_developers(rig: Rig) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    await chat(rig, messages=messages, max_tokens=1)
    (sent,) = rig.engine.seen
    assert isinstance(sent, GenerateRequest)
    prompt = rig.front.tokenizer.decode(sent.input_ids, skip_special_tokens=False)
    assert prompt == "<|system|>be brief</s><|user|>a\nb</s><|assistant|>"


async def test_answers_can_be_sent_back_as_they_came(rig: Rig) -> None:
    own = {"refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    history = [*HI, {"role": "assistant", "content": "well", **own}, *HI]
    await chat(rig, messages=history, max_tokens=1, user="me", metadata={"a": "1"}, store=False)


async def test_chat_may_use_all_that_the_context_leaves(rig: Rig) -> None:
    await chat(rig, ignore_eos=True)
    (sent,) = rig.engine.seen
    assert isinstance(sent, GenerateRequest)
    assert sent.sampling.max_new_tokens == 256 - len(sent.input_ids)


async def test_stop_strings_end_the_text(rig: Rig) -> None:
    answer = await complete(rig, prompt="one two three ", stop=["thr", "zzz"], max_tokens=50)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two ", "stop")
    assert choice["matched_stop"] == "thr"
    *chunks, _ = await complete(
        rig, prompt="one two three ", stop="thr", max_tokens=50, stream=True
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one two "


async def test_stop_strings_may_be_special_tokens(rig: Rig) -> None:
    (choice,) = (await complete(rig, prompt="one<|user|>two", stop="<|user|>"))["choices"]
    assert (choice["text"], choice["matched_stop"]) == ("one", "<|user|>")
    (choice,) = (await chat(rig, stop=["<|user|>h"], ignore_eos=True))["choices"]
    assert (choice["message"]["content"], choice["matched_stop"]) == ("", "<|user|>h")


async def test_chat_logprobs_name_tokens_and_alternatives(rig: Rig) -> None:
    answer = await chat(rig, logprobs=True, top_logprobs=2, max_tokens=3)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for entry in content:
        assert entry["logprob"] == LOGPROB
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert [top["logprob"] for top in entry["top_logprobs"]] == [LOGPROB, LOGPROB - 1]


async def test_completion_logprobs_line_up_with_the_text(rig: Rig) -> None:
    answer = await complete(rig, max_tokens=4, logprobs=1, echo=True)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert logprobs["token_logprobs"][0] is None
    assert set(logprobs["token_logprobs"][1:]) == {LOGPROB}
    assert all(len(top) in (1, 2) for top in logprobs["top_logprobs"][1:])


async def test_the_prompt_alone_can_be_scored(rig: Rig) -> None:
    answer = await complete(rig, max_tokens=0, logprobs=0, echo=True)
    (choice,) = answer["choices"]
    assert choice["text"] == "hello, "
    assert "".join(choice["logprobs"]["tokens"]) == "hello, "
    assert answer["usage"]["completion_tokens"] == 0


async def test_several_prompts_have_choices_in_order(rig: Rig) -> None:
    ids = rig.front.tokenizer.encode("ab")
    answer = await complete(rig, prompt=[ids, [*ids, *ids]], n=2, max_tokens=1, echo=True)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [len(text) for text in texts] == [len("aba")] * 2 + [len("ababa")] * 2
    assert answer["usage"]["prompt_tokens"] == 3 * len(ids)
    assert answer["usage"]["completion_tokens"] == 4


async def test_completions_end_after_16_tokens_unless_told_otherwise(rig: Rig) -> None:
    assert (await complete(rig))["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    "fields", [{"n": 120}, {"prompt": ["hi"] * 120}, {"n": 60, "prompt": ["hi"] * 2}]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_more_than_queue_and_rows_hold_is_a_400_with_what_they_hold(
    rig: Rig, fields: dict[str, Any], stream: bool
) -> None:
    body = {"prompt": "hi", "stream": stream} | fields
    answer = await rig.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert f"at most {MAX_QUEUED + MAX_RUNNING}, got 120" in answer.json()["error"]["message"]
    assert rig.engine.seen == []


async def test_a_full_queue_is_a_503_that_says_when_to_come_back(rig: Rig) -> None:
    for stream in (False, True):
        body = {"prompt": "hi", "seed": FULL_SEED, "stream": stream}
        answer = await rig.http.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"


async def test_a_request_that_takes_too_long_is_a_504(rig: Rig) -> None:
    answer = await rig.http.post("/v1/completions", json={"prompt": "hi", "seed": LATE_SEED})
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert (error["message"], error["code"]) == ("it took too long", "timeout")
    assert error["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_an_abort_is_an_error_since_clients_know_no_such_reason(
    rig: Rig, route: str, stream: bool
) -> None:
    rig.engine.step_s = 0.05
    body = {"ignore_eos": True, "max_tokens": 200, "rid": "me", "stream": stream}
    prompt = {"messages": HI} if "chat" in route else {"prompt": "hi"}
    running = asyncio.create_task(rig.http.post(route, json=body | prompt))
    await meanwhile_until(lambda: rig.engine.running, "the request runs")
    await asyncio.sleep(0.2)
    await rig.http.post("/abort_request", json={"rid": "me"})
    answer = await running
    assert answer.status_code == (200 if stream else 503)
    last = events(answer.text)[-1] if stream else answer.json()
    assert last["error"]["code"] == "aborted"
    assert '"abort"' not in answer.text


async def test_a_stream_that_takes_too_long_ends_with_an_error_event(rig: Rig) -> None:
    rig.engine.step_s = 0.05  # so that the stream has begun when it ends
    body = {"prompt": "hi", "seed": LATE_SEED, "stream": True}
    answer = await rig.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    *events, last = answer.text.strip().split("\n\n")
    assert len(events) >= 1
    assert all("choices" in event for event in events)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert "[DONE]" not in answer.text
    await rig.until_idle()


async def test_when_one_of_a_list_fails_its_siblings_are_aborted(rig: Rig) -> None:
    rig.engine.step_s = 0.01
    # The second choice finds the queue full.
    body = {"prompt": "hi", "n": 2, "seed": SECOND_FULL_SEED, "ignore_eos": True, "max_tokens": 200}
    answer = await rig.http.post("/v1/completions", json=body)
    assert answer.status_code == 503
    await rig.until_idle()
    first = next(m for m in rig.engine.seen if isinstance(m, GenerateRequest))
    assert [m.rid for m in rig.engine.seen if isinstance(m, AbortRequest)] == [first.rid]


async def test_a_dead_engine_ends_streams_with_an_error_event(rig: Rig) -> None:
    rig.engine.step_s = 0.02
    running = asyncio.create_task(complete(rig, stream=True, max_tokens=200))
    await meanwhile_until(lambda: rig.engine.running, "the request runs")
    await asyncio.sleep(0.1)
    crash = await rig.http.post("/v1/completions", json={"prompt": "hi", "seed": CRASH_SEED})
    assert crash.status_code == 503
    *chunks, last = await running
    assert len(chunks) > 0
    assert "crash" in last["error"]["message"]
    after = await rig.http.post("/v1/completions", json={"prompt": "hi"})
    assert (after.status_code, after.json()["error"]["code"]) == (503, "engine_dead")
    assert (await rig.http.get("/health")).status_code == 503


async def test_the_model_is_listed(rig: Rig) -> None:
    (card,) = (await rig.http.get("/v1/models")).json()["data"]
    assert card["id"] == "scripted"
    assert (await rig.http.get("/v1/models/scripted")).json() == card
    missing = await rig.http.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_openais_own_client_understands_it(rig: Rig) -> None:
    client = openai.AsyncOpenAI(
        api_key="none",
        base_url="http://localhost/v1",
        http_client=rig.http,  # type: ignore[arg-type]
        max_retries=0,
    )
    answer = await client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "hi there"}],
        logprobs=True,
        top_logprobs=1,
    )
    assert answer.choices[0].message.content == "hi there"
    text = ""
    stream = await client.completions.create(
        model="scripted", prompt="hello", stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        text += chunk.choices[0].text if chunk.choices else ""
    assert text.startswith("hellohello")
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="other", prompt="hi")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="scripted", prompt="hi", temperature=-1)
    assert refused.value.param == "temperature"

"""OpenAI's Responses API, as OpenAI's client sees it.

The scripted engine answers with what the chat template writes first: here the text of the first
message, up to the end of it.
"""

import contextlib
import json
from typing import Any

import openai
import pydantic
import pytest

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.server.apis.response_store import ResponseStore, StoredResponse
from sgl_jax.server.errors import ApiError
from tests.server.conftest import Served, prompt_of
from tests.server.test_tool_calls import PARIS
from tests.text.recorded_answers import ANSWERS, TOOLS

pytestmark = pytest.mark.anyio

DECLARED: list[Any] = [
    {"type": "function", "name": name, "parameters": schema, "strict": False}
    for name, schema in TOOLS.items()
]
CALL = ANSWERS["hermes"]


async def test_a_text_is_answered_and_can_be_asked_for_until_it_is_deleted(
    served_tools: Served,
) -> None:
    _, client = served_tools
    made = await client.responses.create(
        model="default", input="Sunny.", metadata={"a": "b"}, temperature=0.5
    )
    assert made.output_text == "Sunny."
    assert (made.status, made.metadata, made.temperature) == ("completed", {"a": "b"}, 0.5)
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert await client.responses.retrieve(made.id) == made
    items = await client.responses.input_items.list(made.id)
    assert [item.content for item in items.data] == ["Sunny."]
    await client.responses.delete(made.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await gone(made.id)


async def test_what_is_not_stored_cannot_be_asked_for(served_tools: Served) -> None:
    _, client = served_tools
    made = await client.responses.create(model="default", input="Sunny.", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError) as refused:
        await client.responses.create(model="default", input="x", previous_response_id=made.id)
    assert refused.value.param == "previous_response_id"


async def test_a_conversation_goes_on_by_the_id_of_its_last_response(served_tools: Served) -> None:
    served_rig, client = served_tools
    first = await client.responses.create(model="default", input="One.", instructions="Zero.")
    assert first.output_text == "Zero."
    served_rig.engine.seen.clear()
    second = await client.responses.create(
        model="default", input="Three.", previous_response_id=first.id
    )
    assert second.output_text == "One."
    # Without the instructions, which were for once.
    assert prompt_of(served_rig) == "<|assistant|>Zero.</s><|user|>Three.</s><|assistant|>"
    served_rig.engine.seen.clear()
    third = await client.responses.create(
        model="default", input="Four.", previous_response_id=second.id
    )
    assert third.previous_response_id == second.id
    said = "<|assistant|>Zero.</s><|user|>Three.</s><|assistant|>One.</s><|user|>Four.</s>"
    assert prompt_of(served_rig) == f"{said}<|assistant|>"


async def test_an_item_is_referred_to_by_its_id(served_tools: Served) -> None:
    """Vercel's client sends stored items back this way."""
    served_rig, client = served_tools
    first = await client.responses.create(model="default", input="One.", instructions="Zero.")
    (asked,) = (await client.responses.input_items.list(first.id)).data
    served_rig.engine.seen.clear()
    references: Any = [{"type": "item_reference", "id": each.id} for each in (asked, *first.output)]
    told = [*references, {"role": "user", "content": "Two."}]
    second = await client.responses.create(model="default", input=told)
    assert second.output_text == "One."
    said = "<|assistant|>Zero.</s><|user|>Two.</s>"
    assert prompt_of(served_rig) == f"{said}<|assistant|>"
    items = (await client.responses.input_items.list(second.id)).data
    assert [item.type for item in items] == ["message"] * 3
    with pytest.raises(openai.NotFoundError) as refused:
        await client.responses.create(model="default", input=[*told, references[0]])
    assert refused.value.param == "input[3].id"
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as refused:
        await client.responses.create(model="default", input=told)
    assert refused.value.param == "input[0].id"


async def test_reasoning_may_be_asked_for_encrypted(served_tools: Served) -> None:
    """Clients that store nothing ask for it. It comes as text, which they send back."""
    _, client = served_tools
    thought = "<think>\nIt rains.\n</think>\n\nTake a coat."
    made = await client.responses.create(
        model="default", input=thought, store=False, include=["reasoning.encrypted_content"]
    )
    assert [item.type for item in made.output] == ["reasoning", "message"]
    talk: Any = [{"role": "user", "content": "Go on."}, *made.output]
    assert (await client.responses.create(model="default", input=talk)).output_text == "Go on."


async def test_calls_and_their_results_are_items(served_tools: Served) -> None:
    served_rig, client = served_tools
    made = await client.responses.create(model="default", input=CALL.text, tools=DECLARED)
    calls = [item for item in made.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [
        ("get_weather", PARIS),
        ("now", "{}"),
    ][: len(calls)]
    assert calls
    assert all(call.status == "completed" for call in calls)
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        for call in calls
    ]
    references = [{"type": "item_reference", "id": item.id} for item in made.output]
    for output in (made.output, references):
        served_rig.engine.seen.clear()
        told: Any = [{"role": "user", "content": "ok"}, *output, *results]
        answer = await client.responses.create(model="default", input=told, tools=DECLARED)
        assert answer.output_text == "ok"
        prompt = prompt_of(served_rig)
        assert f"get_weather(Paris)={calls[0].call_id}" in prompt
        assert f"<|tool|>rain{calls[0].call_id}</s>" in prompt


async def test_a_tool_that_must_be_called_is_a_grammar(served_tools: Served) -> None:
    served_rig, client = served_tools
    named: Any = {"type": "function", "name": "get_weather"}
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [named]}
    for choice in (named, "required", allowed):
        await client.responses.create(
            model="default", input="x", tools=DECLARED, tool_choice=choice
        )
        request = [m for m in served_rig.engine.seen if isinstance(m, GenerateRequest)][-1]
        assert request.sampling.ebnf is not None
        assert "get_weather" in request.sampling.ebnf


async def test_text_may_be_held_to_a_schema(served_tools: Served) -> None:
    class Answer(pydantic.BaseModel):
        rain: bool

    served_rig, client = served_tools
    parsed = await client.responses.parse(
        model="default", input='{"rain": true}', text_format=Answer
    )
    assert parsed.output_parsed == Answer(rain=True)
    (request,) = (m for m in served_rig.engine.seen if isinstance(m, GenerateRequest))
    assert "rain" in json.loads(request.sampling.json_schema or "")["properties"]


@pytest.mark.parametrize(
    "text", ["Sunny.", "<think>\nIt rains.\n</think>\n\nTake a coat.", CALL.text], ids=str
)
async def test_a_stream_tells_of_each_item_as_it_is_made(served_tools: Served, text: str) -> None:
    _, client = served_tools
    body: Any = {"model": "default", "input": text, "tools": DECLARED}
    whole = await client.responses.create(**body)
    async with client.responses.stream(**body) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    names = [event.type for event in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    shown = [item.model_dump(exclude={"id", "call_id"}) for item in final.output]
    wanted = [item.model_dump(exclude={"id", "call_id"}) for item in whole.output]
    strip: Any = {"parsed", "parsed_arguments"}
    assert [_without(item, strip) for item in shown] == [_without(item, strip) for item in wanted]
    for kind, name in (("message", "output_text"), ("reasoning", "reasoning_text")):
        told = "".join(e.delta for e in events if e.type == f"response.{name}.delta")  # type: ignore[misc]
        texts = [part["text"] for i in wanted if i["type"] == kind for part in i["content"]]
        assert told == "".join(texts)
        assert names.count(f"response.{name}.done") == len(texts)  # type: ignore[arg-type]
    arguments = "".join(
        e.delta for e in events if e.type == "response.function_call_arguments.delta"
    )
    calls = [item["arguments"] for item in wanted if item["type"] == "function_call"]
    assert arguments == "".join(calls)
    assert await client.responses.retrieve(final.id) is not None


async def test_each_event_begins_with_its_type_and_number(served_tools: Served) -> None:
    _, client = served_tools
    create = client.responses.with_streaming_response.create
    async with create(model="default", input="Sunny.", stream=True) as response:
        events = [line[6:] async for line in response.iter_lines() if line.startswith("data: ")]
    assert len(events) > 5
    assert {tuple(json.loads(event))[:2] for event in events} == {("type", "sequence_number")}


def _without(item: Any, names: set[str]) -> Any:
    if isinstance(item, dict):
        return {key: _without(value, names) for key, value in item.items() if key not in names}
    return [_without(each, names) for each in item] if isinstance(item, list) else item


async def test_an_answer_that_is_cut_off_is_incomplete(served_tools: Served) -> None:
    _, client = served_tools
    made = await client.responses.create(
        model="default", input="A long answer.", max_output_tokens=3
    )
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    (message,) = made.output
    assert message.status == "incomplete"


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("background", {"background": True}),
        ("truncation", {"truncation": "auto"}),
        ("include", {"include": ["message.output_text.logprobs"]}),
        ("include", {"include": ["reasoning.encrypted_content", "web_search_call.results"]}),
        ("max_output_tokens", {"max_output_tokens": 2**40}),
        ("input", {"input": "x" * 70_000}),
        ("text", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 1}}}}),
        ("tools[0]", {"tools": [{"type": "computer"}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("input", {"input": [{"type": "item_reference", "id": "a"}]}),
        ("input", {"input": [["no item"]]}),
        ("input", {"input": [{"type": ["message"]}]}),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("invented", {"invented": 1}),
    ],
)
async def test_what_is_not_there_is_refused_by_name(
    served_tools: Served, param: str, body: dict[str, Any]
) -> None:
    answer = await served_tools[0].http.post(
        "/v1/responses", json={"model": "default", "input": "x"} | body
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


def kept(store: ResponseStore) -> str:
    """The ids of ann's responses in the store."""
    found = ""
    for response_id in "abcdefg":
        with contextlib.suppress(ApiError):
            store.get(response_id, "ann")
            found += response_id
    return found


def test_the_store_forgets_the_oldest_and_shows_each_to_its_owner() -> None:
    store = ResponseStore(max_count=2, max_bytes=100)
    for name, size in (("a", 30), ("b", 30), ("c", 30)):
        store.put(name, StoredResponse("ann", b"r" * size, b"", b""))
    assert kept(store) == "bc"
    assert store.get("c", "ann").response == b"r" * 30
    for response_id, owner in (("a", "ann"), ("c", "bob")):
        with pytest.raises(ApiError):
            store.get(response_id, owner)
    store.put("d", StoredResponse("ann", b"r", b"i" * 40, b"m" * 40))
    assert kept(store) == "d"
    store.put("e", StoredResponse("ann", b"r" * 101, b"", b""))
    assert kept(store) == ""
    store.put("f", StoredResponse("ann", b"r" * 100, b"", b""))
    store.delete("f", "ann")
    store.put("g", StoredResponse("ann", b"r" * 100, b"", b""))
    assert kept(store) == "g"

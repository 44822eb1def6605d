"""Each answer of each API is taken as history by each API, wherever it was cut off."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Rig, prompt_of, served
from tests.text.recorded_answers import ANSWERS, TOOLS

pytestmark = pytest.mark.anyio

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOOLS_OF: dict[str, list[Any]] = {
    CHAT: [
        {"type": "function", "function": {"name": n, "parameters": s}} for n, s in TOOLS.items()
    ],
    RESPONSES: [{"type": "function", "name": n, "parameters": s} for n, s in TOOLS.items()],
    MESSAGES: [{"name": n, "input_schema": s} for n, s in TOOLS.items()],
}
QUESTION = {"role": "user", "content": "Go on."}


def body_of(route: str, told: list[Any], limit: int) -> dict[str, Any]:
    names = {CHAT: ("messages", "max_tokens"), RESPONSES: ("input", "max_output_tokens")}
    messages, max_tokens = names.get(route, ("messages", "max_tokens"))
    return {"model": "default", "tools": TOOLS_OF[route], messages: told, max_tokens: limit}


async def post(rig: Rig, route: str, told: list[Any], limit: int = 1, **more: Any) -> Any:
    answer = await rig.http.post(route, json=body_of(route, told, limit) | more)
    assert answer.status_code == 200, (route, told, answer.text)
    return answer.json()


def own_part(route: str, answer: Any) -> list[Any]:
    """The answer as history, in the form of its own API."""
    if route == CHAT:
        return [answer["choices"][0]["message"]]
    if route == RESPONSES:
        return list(answer["output"])
    return [{"role": "assistant", "content": answer["content"]}]


def as_chat(route: str, answer: Any) -> dict[str, Any]:
    """The answer as the message of a chat."""
    if route == CHAT:
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message
    said, thought, calls = "", "", []
    for part in answer["output"] if route == RESPONSES else answer["content"]:
        match part["type"]:
            case "message":
                said += part["content"][0]["text"]
            case "text":
                said += part["text"]
            case "reasoning":
                thought += part["content"][0]["text"]
            case "thinking":
                thought += part["thinking"]
            case "function_call":
                calls.append((part["call_id"], part["name"], part["arguments"]))
            case "tool_use":
                calls.append((part["id"], part["name"], json.dumps(part["input"])))
    made = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in calls
    ]
    own = {"role": "assistant", "content": said, "reasoning_content": thought or None}
    return own | {"tool_calls": made or None}


def to_chat(message: dict[str, Any]) -> list[Any]:
    return [message]


def to_responses(message: dict[str, Any]) -> list[Any]:
    items: list[Any] = []
    if message.get("reasoning_content"):
        text = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"type": "reasoning", "content": [text], "summary": []})
    if message["content"]:
        items.append({"role": "assistant", "content": message["content"]})
    for call in message.get("tool_calls") or ():
        items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def to_messages(message: dict[str, Any]) -> list[Any]:
    """As clients do that hold the input of a call as an object."""
    blocks: list[Any] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"]})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        try:
            given = json.loads(function["arguments"])
        except ValueError:
            given = {}
        given = given if isinstance(given, dict) else {}
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"]})
        blocks[-1]["input"] = given
    return [{"role": "assistant", "content": blocks}]


FORMS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    CHAT: to_chat,
    RESPONSES: to_responses,
    MESSAGES: to_messages,
}


# A format each, and both kinds of reasoning.
BY_DEFAULT = (
    ("glm45", CHAT),
    ("gpt-oss", RESPONSES),
    ("qwen3_coder", MESSAGES),
    ("hermes, arguments first", MESSAGES),
)


@pytest.mark.parametrize(
    ("name", "route", "every"),
    [
        pytest.param(
            *(name, route, every),
            marks=() if every == 4 and (name, route) in BY_DEFAULT else pytest.mark.long,
        )
        for name in ("hermes, arguments first", "glm45", "gpt-oss", "qwen3_coder")
        for route in (CHAT, RESPONSES, MESSAGES)
        for every in (4, 1)
    ],
)
async def test_an_answer_that_was_cut_off_is_history_for_every_api(
    tools_folder: Path, name: str, route: str, every: int
) -> None:
    recorded = ANSWERS[name]
    asked = {"role": "user", "content": recorded.text}
    reasoning = recorded.reasoning or "none"
    async with served(tools_folder, recorded.tool or "none", reasoning) as (rig, _):
        size = len(rig.front.tokenizer.encode(recorded.text))
        for limit in range(1, size + 2, every):
            answer = await post(rig, route, [asked], limit)
            await post(rig, route, [asked, *own_part(route, answer), QUESTION])
            message = as_chat(route, answer)
            for other, form in FORMS.items():
                await post(rig, other, [asked, *form(message), QUESTION])
            if route == RESPONSES:
                await post(rig, route, [QUESTION], previous_response_id=answer["id"])
                items = [{"type": "item_reference", "id": each["id"]} for each in answer["output"]]
                await post(rig, route, [*items, QUESTION])


async def test_reasoning_that_was_cut_off_stays_in_the_history(tools_folder: Path) -> None:
    thought = [{"type": "reasoning_text", "text": "It rains"}]
    told = [QUESTION, {"type": "reasoning", "content": thought, "summary": []}, QUESTION]
    prompts = set()
    async with served(tools_folder) as (rig, _):
        for route, given in (
            (RESPONSES, told),
            (CHAT, [QUESTION, {"role": "assistant", "reasoning_content": "It rains"}, QUESTION]),
        ):
            rig.engine.seen.clear()
            await post(rig, route, given)
            prompts.add(prompt_of(rig))
    assert len(prompts) == 1


@pytest.mark.parametrize("arguments", ["it is", "[1]", '{"a": b}', '"', '{"a": "\\ud800"}', "{}}"])
async def test_arguments_that_are_no_object_are_history(tools_folder: Path, arguments: str) -> None:
    answer = (
        f"<|channel|>commentary to=functions.now <|constrain|>json<|message|>{arguments}<|call|>"
    )
    asked = {"role": "user", "content": answer}
    async with served(tools_folder, "gpt-oss", "gpt-oss") as (rig, _):
        for route in FORMS:
            told = await post(rig, route, [asked], 100)
            own = own_part(route, told)
            assert as_chat(route, told)["tool_calls"]
            await post(rig, route, [asked, *own, QUESTION])

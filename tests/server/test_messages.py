"""Anthropic's Messages API. The scripted engine answers with what the chat template writes first:
here the text of the first message, up to the end of it."""

import datetime
import json
from typing import Any

import pytest

from sgl_jax.core.messages import GenerateRequest
from tests.server.conftest import Rig, prompt_of
from tests.server.test_tool_calls import PARIS
from tests.text.recorded_answers import ANSWERS, TOOLS

pytestmark = pytest.mark.anyio

DECLARED = [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()]
CALL = ANSWERS["hermes"].text
THOUGHT = "<think>\nIt rains.\n</think>\n\nTake a coat."
ROUTE = "/v1/messages"


def asking(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "default",
        "max_tokens": 300,
        "messages": [{"role": "user", "content": text}],
        **fields,
    }


async def answer_to(rig: Rig, body: dict[str, Any]) -> dict[str, Any]:
    answer = await rig.http.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def events_of(rig: Rig, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await rig.http.post(ROUTE, json=body | {"stream": True})
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_message_is_answered(tools_rig: Rig) -> None:
    told = await answer_to(tools_rig, asking("Sunny."))
    assert told["content"] == [{"type": "text", "text": "Sunny."}]
    assert told["id"].startswith("msg_")
    shown = {name: told[name] for name in ("type", "role", "stop_reason", "stop_sequence")}
    assert shown == {
        "type": "message",
        "role": "assistant",
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    counted = await tools_rig.http.post(
        f"{ROUTE}/count_tokens", json={"messages": [{"role": "user", "content": "Sunny."}]}
    )
    usage = told["usage"]
    assert (
        usage["input_tokens"]
        + usage["cache_read_input_tokens"]
        + usage["cache_creation_input_tokens"]
        == counted.json()["input_tokens"]
    )
    assert usage["output_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["c", "long"]}, "stop_sequence", "long"),
        ({"stop_sequences": ["answer.</s>"]}, "stop_sequence", "answer.</s>"),
    ],
)
async def test_an_answer_says_why_it_ends(
    tools_rig: Rig, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    told = await answer_to(tools_rig, asking("A long answer.", **fields))
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)


async def test_a_call_that_a_stop_sequence_cuts_off_is_none_to_make(tools_rig: Rig) -> None:
    told = await answer_to(tools_rig, asking(CALL, tools=DECLARED, stop_sequences=["Par"]))
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "Par")


async def test_the_conversation_is_told_in_order(tools_rig: Rig) -> None:
    cached = {"type": "ephemeral"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "id1", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "id1", "content": "rain", "is_error": False},
                {"type": "text", "text": "c"},
            ],
        },
    ]
    system = [{"type": "text", "text": "s", "cache_control": cached}]
    await answer_to(tools_rig, asking("", messages=messages, system=system, tools=DECLARED))
    prompt = prompt_of(tools_rig)
    at = [prompt.index(text) for text in ("<|user|>a</s>", "|>b", "rainid1", "<|user|>c")]
    assert at == sorted(at)
    assert "get_weather(Rome)=id1" in prompt
    assert prompt.endswith("<|assistant|>")


async def test_the_models_own_last_message_is_continued(tools_rig: Rig) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer"}]
    await answer_to(tools_rig, asking("", messages=messages))
    assert prompt_of(tools_rig).endswith("<|assistant|>The answer")


@pytest.mark.parametrize("text", ["Sunny.", THOUGHT, CALL], ids=["text", "thinking", "calls"])
async def test_a_stream_tells_of_the_blocks_of_the_whole_answer(tools_rig: Rig, text: str) -> None:
    body = asking(text, tools=DECLARED)
    whole, events = await answer_to(tools_rig, body), await events_of(tools_rig, body)
    assert events[0]["type"] == "message_start"
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    made: list[dict[str, Any]] = []
    arguments: list[str] = []
    for event in events[1:-2]:
        assert event["index"] == len(made) - (event["type"] != "content_block_start")
        match event["type"]:
            case "content_block_start":
                made.append(event["content_block"])
                arguments.append("")
            case "content_block_delta":
                delta = event["delta"]
                kind, value = delta["type"].removesuffix("_delta"), delta[list(delta)[1]]
                if kind == "input_json":
                    arguments[-1] += value
                else:
                    made[-1][kind] += value
            case "content_block_stop":
                if arguments[-1]:
                    made[-1]["input"] = json.loads(arguments[-1])
    assert [without_id(block) for block in made] == [without_id(b) for b in whole["content"]]
    ending, stop = events[-2:]
    assert ending["type"] == "message_delta"
    assert ending["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert ending["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert stop == {"type": "message_stop"}


def without_id(block: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if name != "id"}


async def test_calls_and_thoughts_are_blocks(tools_rig: Rig) -> None:
    told = await answer_to(tools_rig, asking(CALL, tools=DECLARED))
    calls = [block for block in told["content"] if block["type"] == "tool_use"]
    assert calls[0]["name"] == "get_weather"
    assert calls[0]["input"] == json.loads(PARIS)
    assert told["stop_reason"] == "tool_use"
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    told = await answer_to(tools_rig, asking(CALL + CALL, tools=DECLARED, tool_choice=alone))
    assert [block["type"] for block in told["content"]].count("tool_use") == 1
    told = await answer_to(tools_rig, asking(THOUGHT))
    thinking, said = told["content"]
    assert (thinking["thinking"].strip(), thinking["signature"]) == ("It rains.", "")
    assert said["text"] == "Take a coat."


async def test_of_a_call_that_is_cut_off_what_was_complete_is_shown(tools_rig: Rig) -> None:
    whole = await answer_to(tools_rig, asking(CALL, tools=DECLARED))
    seen = []
    for limit in range(1, whole["usage"]["output_tokens"]):
        told = await answer_to(tools_rig, asking(CALL, tools=DECLARED, max_tokens=limit))
        assert told["stop_reason"] == "max_tokens"
        seen += [block["input"] for block in told["content"] if block["type"] == "tool_use"][:1]
    assert {} in seen
    assert all(shown.items() <= json.loads(PARIS).items() for shown in seen)


async def test_a_tool_that_must_be_called_and_a_schema_are_grammars(tools_rig: Rig) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        await answer_to(tools_rig, asking("x", tools=DECLARED, tool_choice=choice))
        assert "get_weather" in (last_request(tools_rig).sampling.ebnf or "")
    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}}
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    await answer_to(tools_rig, asking('{"rain": true}', output_config=wanted))
    assert "rain" in (last_request(tools_rig).sampling.json_schema or "")
    tools_rig.engine.seen.clear()
    await answer_to(tools_rig, asking("x", tools=DECLARED, tool_choice={"type": "none"}))
    assert "get_weather" not in prompt_of(tools_rig)


def last_request(rig: Rig) -> GenerateRequest:
    return [message for message in rig.engine.seen if isinstance(message, GenerateRequest)][-1]


@pytest.mark.parametrize(
    ("told", "fields"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": -1}),
        (
            "messages[0].content[0]",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        ),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": [["no block"]]}]}),
        ("messages", {"messages": [{"role": "user", "content": []}]}),
        ("prompt tokens", {"messages": [{"role": "user", "content": "x" * 70_000}]}),
        (
            "tool_calls",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                    }
                ]
            },
        ),
        ("tools[0]", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        ("tool_choice", {"tool_choice": {"type": "tool"}}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        (
            "output_config",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 1}}}},
        ),
        ("container", {"container": "c"}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("invented", {"invented": 1}),
    ],
)
async def test_what_is_not_there_is_refused_in_anthropics_envelope(
    tools_rig: Rig, told: str, fields: dict[str, Any]
) -> None:
    for stream in (False, True):
        answer = await tools_rig.http.post(ROUTE, json=asking("x", **fields) | {"stream": stream})
        assert answer.status_code == 400, answer.text
        body = answer.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert told in body["error"]["message"]


async def test_the_model_is_described_as_anthropics_clients_read_it(tools_rig: Rig) -> None:
    models = (await tools_rig.http.get("/v1/models")).json()
    (model,) = models["data"]
    assert (models["first_id"], models["last_id"], models["has_more"]) == (
        *[model["id"]] * 2,
        False,
    )
    assert (model["type"], model["display_name"]) == ("model", model["id"])
    made = datetime.datetime.fromisoformat(model["created_at"])
    assert made.timestamp() == model["created"]
    assert (await tools_rig.http.get(f"/v1/models/{model['id']}")).json() == model


async def test_a_thread_is_refused_so_that_clients_go_on_without(tools_rig: Rig) -> None:
    """Anthropic's tool runner requests one by default, and reads the details of the refusal."""
    body = asking("x", thread={"type": "create"})
    for stream in (False, True):
        answer = await tools_rig.http.post(ROUTE, json=body | {"stream": stream})
        assert answer.status_code == 400
        details = answer.json()["error"]["details"]
        assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    answer = await tools_rig.http.post(ROUTE, json=asking("x", container="c"))
    assert "details" not in answer.json()["error"]


async def test_other_failures_have_the_kinds_that_clients_know(tools_rig: Rig) -> None:
    answer = await tools_rig.http.post(ROUTE, json=asking("x", model="other"))
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    answer = await tools_rig.http.post(f"{ROUTE}/count_tokens", content=b"x" * 40_000_000)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
    tools_rig.refs.draining = True
    answer = await tools_rig.http.post(ROUTE, json=asking("x"))
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")

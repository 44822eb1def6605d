"""Tools in namespaces and hosted tools, as coding agents offer them."""

import json
from typing import Any

import openai
import pytest

from tests.server.conftest import Rig, prompt_of, served
from tests.server.test_agent_bodies import body_of, events_in

pytestmark = pytest.mark.anyio

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS: list[dict[str, Any]] = [
    WEATHER | {"name": "get_time"},
    {"type": "namespace", "name": "mcp__sky", "description": "The sky.", "tools": [WEATHER]},
    {"type": "web_search", "external_web_access": False, "tools": [{}], "verbosity": "low"},
]
CALL = '<tool_call>\n{"name": "mcp__sky__get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def says(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "default", "input": text, "tools": TOOLS, **fields}


async def response_to(rig: Rig, body: dict[str, Any]) -> dict[str, Any]:
    answer = await rig.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def test_the_model_is_offered_functions_of_namespaces_and_no_hosted_tools(
    tools_rig: Rig,
) -> None:
    told = await response_to(tools_rig, says("Sunny.", previous_response_id=None))
    assert prompt_of(tools_rig).startswith("get_time: 1; mcp__sky__get_weather: 1; ")
    assert [tool["type"] for tool in told["tools"]] == ["function", "namespace"]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_a_call_has_the_name_and_the_namespace_of_the_function(
    tools_rig: Rig, streams: bool
) -> None:
    answer = await tools_rig.http.post("/v1/responses", json=says(CALL, stream=streams))
    events = events_in(answer.text) if streams else [{"response": answer.json()}]
    (item,) = events[-1]["response"]["output"]
    assert (item["namespace"], item["name"]) == ("mcp__sky", "get_weather")
    assert json.loads(item["arguments"]) == {"city": "Rome"}
    shown = [event["item"] for event in events if "item" in event]
    assert all(each["name"] == "get_weather" for each in shown)
    assert all(each["namespace"] == "mcp__sky" for each in shown)


async def test_a_function_outside_of_namespaces_has_none(tools_rig: Rig) -> None:
    told = await response_to(tools_rig, says(CALL.replace("mcp__sky__get_weather", "get_time")))
    assert told["output"][0]["name"] == "get_time"
    assert "namespace" not in told["output"][0]


async def test_a_call_of_the_history_has_the_name_that_the_model_was_offered(
    tools_rig: Rig,
) -> None:
    first = await response_to(tools_rig, says(CALL))
    tools_rig.engine.seen.clear()
    call_id = first["output"][0]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "rain"}
    whole = [{"role": "user", "content": CALL}, *first["output"], result]
    await response_to(tools_rig, says("", input=whole))
    by_items = prompt_of(tools_rig)
    assert "mcp__sky__get_weather(Rome)=" in by_items
    tools_rig.engine.seen.clear()
    # The conversation of a stored response has the same.
    await response_to(tools_rig, says("", input=[result], previous_response_id=first["id"]))
    assert prompt_of(tools_rig) == by_items


@pytest.mark.parametrize("namespace", [{}, {"namespace": "mcp__sky"}], ids=["name", "both"])
async def test_a_function_of_a_namespace_can_be_chosen(tools_rig: Rig, namespace: Any) -> None:
    choice = {"type": "function", "name": "get_weather", **namespace}
    await response_to(tools_rig, says(CALL, tool_choice=choice))
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    await response_to(tools_rig, says(CALL, tool_choice=allowed))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": TOOLS[2:], "tool_choice": "required"}, "there is no such tool"),
        ({"tools": [{"type": "computer"}]}, "tools[0]: type must be function or namespace"),
        ({"tools": [{"type": "hosted"}]}, "tools[0]: type must be function or namespace"),
        ({"tools": [*TOOLS, WEATHER | {"name": "mcp__sky__get_weather"}]}, "two of them are"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools"),
    ],
    ids=["chosen", "required", "run by the client", "no type", "one name", "custom"],
)
async def test_what_cannot_be_left_out_is_refused(tools_rig: Rig, fields: Any, text: str) -> None:
    answer = await tools_rig.http.post("/v1/responses", json=says("Sunny.", **fields))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert text in error["message"]
    assert error["param"].startswith("tool")


async def test_codex_is_offered_its_namespaces(tools_rig: Rig) -> None:
    body = body_of("codex-namespace-result")
    body["input"] = [{"role": "user", "content": "Sunny."}, *body["input"][-2:]]
    body["tools"] = body["tools"][-3:]
    body["stream"] = False
    told = await response_to(tools_rig, body)
    assert told["status"] == "completed"
    prompt = prompt_of(tools_rig)
    assert "tool_5__tool_6: 1; tool_5__tool_10: 2; " in prompt
    assert "tool_5__tool_6()=call_014" in prompt
    assert "web_search" not in prompt


async def test_openais_client_reads_the_namespace(tools_folder: Any) -> None:
    async with served(tools_folder, "hermes", "qwen3") as (_, client):
        made = await client.responses.create(
            model="default",
            input=CALL,
            tools=TOOLS,  # type: ignore[arg-type]
        )
        (item,) = made.output
        assert isinstance(item, openai.types.responses.ResponseFunctionToolCall)
        assert (item.namespace, item.name) == ("mcp__sky", "get_weather")

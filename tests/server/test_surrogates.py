"""Half of a surrogate pair in any text of a body does not end the conversation."""

import json
from typing import Any

import pytest

from sgl_jax.core.messages import GenerateRequest
from tests.server.conftest import Rig, prompt_of
from tests.server.test_tool_calls import DECLARED

pytestmark = pytest.mark.anyio

HALVES = ("cut \ud83d", "\ude00 cut", "a \ud83d b", "\ud83d\ud83d\ude00", "\udc00\ud800")
COUNTER = "sglang:replaced_surrogates_total"


def bodies(text: str) -> dict[str, dict[str, Any]]:
    user = {"role": "user", "content": "Sunny."}
    return {
        "/v1/chat/completions": {"messages": [user, {"role": "user", "content": text}]},
        "/v1/responses": {"input": [user, {"role": "user", "content": text}], "model": "default"},
        "/v1/messages": {
            "messages": [user, {"role": "user", "content": text}],
            "model": "default",
            "max_tokens": 9,
        },
        "/v1/completions": {"prompt": text},
        "/generate": {"text": text, "sampling_params": {"max_new_tokens": 3}},
    }


def whole(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


async def counted(rig: Rig) -> float:
    lines = (await rig.http.get("/metrics")).text.splitlines()
    (value,) = (line.split()[-1] for line in lines if line.startswith(COUNTER))
    return float(value)


@pytest.mark.parametrize("text", HALVES, ids=ascii)
async def test_a_half_is_replaced_on_every_route_and_counted(tools_rig: Rig, text: str) -> None:
    num_replaced = 0
    for path, body in bodies(text).items():
        tools_rig.engine.seen.clear()
        headers = {"content-type": "application/json"}
        answer = await tools_rig.http.post(path, content=json.dumps(body), headers=headers)
        assert answer.status_code == 200, (path, answer.text)
        (request,) = (m for m in tools_rig.engine.seen if isinstance(m, GenerateRequest))
        assert whole(text) in tools_rig.front.tokenizer.decode(request.input_ids)
        num_replaced += whole(text).count("\ufffd")
    assert await counted(tools_rig) == num_replaced


async def test_a_half_in_the_json_of_arguments_is_replaced(tools_rig: Rig) -> None:
    """The arguments are JSON within JSON, so that the body itself has none."""
    function = {"name": "get_weather", "arguments": json.dumps({"city": "cut \ud83d"})}
    call = {"id": "a", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "Sunny."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    body = {"model": "default", "messages": messages, "tools": DECLARED}
    answer = await tools_rig.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert "get_weather(cut \ufffd)" in prompt_of(tools_rig)


async def test_a_call_that_the_model_writes_with_a_half_is_answered(tools_rig: Rig) -> None:
    call = (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "cut \\ud83d"}}\n</tool_call>'
    )
    tools = [{"name": "get_weather", "input_schema": {"type": "object"}}]
    body = {"messages": [{"role": "user", "content": call}], "max_tokens": 300, "tools": tools}
    answer = await tools_rig.http.post("/v1/messages", json=body | {"model": "default"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][0]["input"] == {"city": "cut \ufffd"}

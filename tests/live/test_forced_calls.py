"""A model that was never taught to call a tool calls one, through the official OpenAI client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.live.live_server import DEMO, LiveServer, live_server

pytestmark = pytest.mark.long

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "left": {"type": "integer", "minimum": 0, "maximum": 99},
                    "right": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["left", "right"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
QUESTION: Any = [{"role": "user", "content": "What is 12 plus 30?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("forced")
    template = json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]
    file = folder / "template.jinja"
    file.write_text("{% set known = tools %}" + template)
    flags = ("--tool-call-parser", "hermes", "--chat-template", str(file))
    with live_server(folder, "--check-memory", "busy", *flags) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **body: Any) -> Any:
    fixed: Any = {"model": "demo", "messages": QUESTION, "tools": TOOLS, "temperature": 0.7}
    return client.chat.completions.create(**fixed, **body)


@pytest.mark.parametrize("seed", range(3))
def test_a_named_tool_is_called_with_valid_arguments(client: openai.OpenAI, seed: int) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    (choice,) = ask(client, tool_choice=named, seed=seed).choices
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "add"
    assert arguments.keys() == {"left", "right"}
    assert all(0 <= number <= 99 for number in arguments.values())
    assert choice.finish_reason == "tool_calls"


def test_a_required_call_comes_in_a_stream(client: openai.OpenAI, server: LiveServer) -> None:
    name = arguments = ""
    body = {"tool_choice": "required", "parallel_tool_calls": False, "stream": True}
    for chunk in ask(client, **body, seed=1):
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name in ("add", "now")
    assert isinstance(json.loads(arguments), dict)
    server.assert_balance()


def test_free_text_stays_free_beside_strict_tools(client: openai.OpenAI) -> None:
    (choice,) = ask(client, max_tokens=20, seed=1).choices
    assert choice.message.content or choice.message.tool_calls

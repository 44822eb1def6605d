"""Schemas with keywords that no grammar holds: refused where they are strict, and else held in
part, by each way to send one."""

from typing import Any

import openai
import pytest

from sgl_jax.core.grammar import Grammar
from sgl_jax.core.messages import GenerateRequest
from tests.server.conftest import Rig, Served
from tests.server.test_tool_calls import says

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "required": ["tags"],
}


def last_grammar(rig: Rig) -> Grammar:
    request = [m for m in rig.engine.seen if isinstance(m, GenerateRequest)][-1]
    assert request.sampling.grammar is not None
    return request.sampling.grammar


def chat_format(strict: bool | None) -> dict[str, Any]:
    schema = {"name": "tags", "schema": SCHEMA, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def chat_tool(strict: bool | None) -> dict[str, Any]:
    function = {"name": "tag", "parameters": SCHEMA, "strict": strict}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def response_format(strict: bool | None) -> dict[str, Any]:
    wanted = {"type": "json_schema", "name": "tags", "schema": SCHEMA, "strict": strict}
    return {"text": {"format": wanted}}


def response_tool(strict: bool | None) -> dict[str, Any]:
    tool = {"type": "function", "name": "tag", "parameters": SCHEMA, "strict": strict}
    return {"tools": [tool], "tool_choice": "required"}


CHAT, RESPONSES = "/chat/completions", "/responses"
WAYS = [
    (CHAT, chat_format),
    (CHAT, chat_tool),
    (RESPONSES, response_format),
    (RESPONSES, response_tool),
]


@pytest.mark.parametrize(("path", "body"), WAYS, ids=lambda value: getattr(value, "__name__", ""))
async def test_what_is_not_strict_is_held_in_part(
    served_tools: Served, path: str, body: Any
) -> None:
    engine, client = served_tools
    said = says("x") if path == CHAT else {"model": "default", "input": "x"}
    for strict in (None, False):
        await client.post(path, body={**said, **body(strict)}, cast_to=object)
        assert "tags" in last_grammar(engine).text
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        await client.post(path, body={**said, **body(True)}, cast_to=object)


@pytest.mark.parametrize(
    ("path", "of_text", "of_tool", "param"),
    [
        (CHAT, chat_format, chat_tool, "response_format"),
        (RESPONSES, response_format, response_tool, "text"),
    ],
)
async def test_of_a_schema_and_tools_the_one_at_fault_is_named(
    served_tools: Served, path: str, of_text: Any, of_tool: Any, param: str
) -> None:
    _, client = served_tools
    said = says("x") if path == CHAT else {"model": "default", "input": "x"}
    for text_strict, tool_strict in ((True, False), (False, True)):
        body = {**said, **of_text(text_strict), **of_tool(tool_strict), "tool_choice": "auto"}
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
            await client.post(path, body=body, cast_to=object)
        assert refused.value.param == (param if text_strict else "tools")


async def test_a_client_may_say_how_its_json_is_written(served_tools: Served) -> None:
    engine, client = served_tools
    for options in ({"item_separator": ","}, 5):
        function = {"name": "tag", "parameters": {**SCHEMA, "x-guidance": options}}
        body: Any = {"tools": [{"type": "function", "function": function}]}
        body |= {"tool_choice": "required", **says("x")}
        if options == 5:
            with pytest.raises(openai.BadRequestError, match=r"x-guidance|invalid type"):
                await client.chat.completions.create(**body)
        else:
            await client.chat.completions.create(**body)
            assert '"item_separator": ","' in last_grammar(engine).text

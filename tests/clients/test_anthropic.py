"""Anthropic's own client against a server, with the demonstration model and its one tool."""

from typing import Any

import pydantic
import pytest

from tests.clients.demo_tool import PARAMETERS, QUESTION, REPORT, RESULT, get_weather
from tests.live.live_server import LiveServer

pytestmark = pytest.mark.long

TOOL = {
    "name": "get_weather",
    "description": "The weather in a city now.",
    "input_schema": PARAMETERS,
}


def asking(client: Any, text: str, **fields: Any) -> dict[str, Any]:
    talk = [{"role": "user", "content": text}]
    return {"model": "demo", "max_tokens": 100, "messages": talk} | fields


class Total(pydantic.BaseModel):
    total: int  # the client leaves bounds out of the schema that it sends


@pytest.fixture
def client(server: LiveServer) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_a_message_whole_streamed_and_counted(client: Any) -> None:
    body = asking(client, "What is 17 + 25?", extra_body={"temperature": 0})
    whole = client.messages.create(**body)
    (block,) = whole.content
    assert (block.type, whole.stop_reason) == ("text", "end_turn")
    with client.messages.stream(**body) as stream:
        told = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert told == block.text == final.content[0].text
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model="demo", messages=body["messages"])
    usage = final.usage
    num_cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert usage.input_tokens + num_cached == counted.input_tokens


def test_a_tool_is_called_and_its_result_reported(client: Any) -> None:
    body = asking(client, QUESTION, tools=[TOOL], extra_body={"temperature": 0})
    for is_streamed in (False, True):
        if is_streamed:
            with client.messages.stream(**body) as stream:
                called = stream.get_final_message()
        else:
            called = client.messages.create(**body)
        assert called.stop_reason == "tool_use"
        (call,) = (block for block in called.content if block.type == "tool_use")
        assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
        talk = [
            *body["messages"],
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ]
        (report,) = client.messages.create(**body | {"messages": talk}).content
        assert report.text == REPORT


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=str
)
def test_a_tool_is_forced(client: Any, choice: dict[str, str]) -> None:
    answer = client.messages.create(**asking(client, "Hello!", tools=[TOOL], tool_choice=choice))
    assert answer.content[0].type == "tool_use"
    assert answer.content[0].name == "get_weather"


def test_an_answer_is_json_by_its_schema(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    (block,) = client.messages.create(**asking(client, "17 + 25?", output_config=wanted)).content
    assert block.text.startswith('{"sum"')


def test_an_answer_is_parsed_beside_tools(client: Any) -> None:
    fields: dict[str, Any] = {"output_format": Total, "extra_body": {"temperature": 0}}
    body = asking(client, "What is 17 + 25?", **fields)
    assert isinstance(client.messages.parse(**body).parsed_output, Total)
    with client.messages.stream(**body) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Total)
    (call,) = client.messages.parse(**asking(client, QUESTION, tools=[TOOL], **fields)).content
    assert (call.type, call.input) == ("tool_use", {"city": "Paris"})


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_the_tool_runner_calls_and_reports(client: Any, is_streamed: bool) -> None:
    """It requests a thread first, and goes on without one."""
    anthropic = pytest.importorskip("anthropic")
    body = asking(client, QUESTION, extra_body={"temperature": 0}, stream=is_streamed)
    runner = client.beta.messages.tool_runner(tools=[anthropic.beta_tool(get_weather)], **body)
    *_, last = (turn.get_final_message() if is_streamed else turn for turn in runner)
    assert last.content[0].text == REPORT


def test_the_model_is_listed(client: Any) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("demo", "model", "demo")
    assert client.models.retrieve("demo").created_at == model.created_at


def test_failures_are_the_clients_own(client: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    for fields, kind in (
        ({"model": "other"}, anthropic.NotFoundError),
        ({"max_tokens": -1}, anthropic.BadRequestError),
        ({"tools": [TOOL | {"type": "bash_20250124"}]}, anthropic.BadRequestError),
    ):
        with pytest.raises(kind) as refused:
            client.messages.create(**asking(client, "x", **fields))
        assert refused.value.body["type"] == "error"

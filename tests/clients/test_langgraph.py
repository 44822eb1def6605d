"""A langgraph agent on langchain-openai: tools, streams, typed results, memory."""

from typing import Any

import pytest

from tests.clients.demo_tool import QUESTION, REPORT, SUM_QUESTION, Sum, get_weather
from tests.clients.langchain_model import chat_model
from tests.live.live_server import LiveServer

pytest.importorskip("langchain_openai")
prebuilt = pytest.importorskip("langgraph.prebuilt")
memory = pytest.importorskip("langgraph.checkpoint.memory")
tools = pytest.importorskip("langchain_core.tools")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(params=[False, True], ids=["chats", "responses"])
def model(server: LiveServer, request: pytest.FixtureRequest) -> Any:
    return chat_model(server, use_responses_api=request.param)


def asking(text: str) -> dict[str, Any]:
    return {"messages": [("user", text)]}


def test_an_agent_calls_a_tool_and_reports(model: Any) -> None:
    agent = prebuilt.create_react_agent(model, [tools.tool(get_weather)])
    messages = agent.invoke(asking(QUESTION))["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[-1].text == REPORT
    told = ""
    for message, _ in agent.stream(asking(QUESTION), stream_mode="messages"):
        told += message.text if message.type == "AIMessageChunk" else ""
    assert told == REPORT


def test_an_agent_has_a_typed_result(model: Any) -> None:
    agent = prebuilt.create_react_agent(model, [tools.tool(get_weather)], response_format=Sum)
    assert isinstance(agent.invoke(asking(QUESTION))["structured_response"], Sum)


def test_a_model_with_a_schema_may_call_a_strict_tool(model: Any) -> None:
    bound = model.with_structured_output(
        Sum, tools=[tools.tool(get_weather)], strict=True, include_raw=True
    )
    assert [call["args"] for call in bound.invoke(QUESTION)["raw"].tool_calls] == [
        {"city": "Paris"}
    ]
    assert isinstance(bound.invoke(SUM_QUESTION)["parsed"], Sum)


def test_an_agent_remembers(model: Any) -> None:
    agent = prebuilt.create_react_agent(model, [], checkpointer=memory.InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    agent.invoke(asking("The code of Mira is 471."), thread)
    answer = agent.invoke(asking("What is the code of Mira?"), thread)
    assert answer["messages"][-1].text == "It is 471."

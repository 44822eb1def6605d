"""Agent frameworks: structured output and tools through instructor, pydantic-ai, langchain-openai,
litellm and OpenAI's agents, with the demonstration model and its one tool."""

import asyncio
import json
import os
from typing import Any

import openai
import pydantic
import pytest
from tokenizers import Tokenizer

from tests.clients.demo_tool import QUESTION, REPORT, RESULT, Sum, get_weather
from tests.clients.langchain_model import chat_model
from tests.live.live_server import DEMO, LiveServer

# At import, litellm otherwise asks GitHub what models cost.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
pytestmark = pytest.mark.long


class Total(pydantic.BaseModel):
    total: int


class AnyObject(pydantic.BaseModel):
    """Where the server knows of no schema: the model is made to close the object at once, since it
    would go on for long."""

    model_config = pydantic.ConfigDict(extra="allow")


CLOSING = {str(Tokenizer.from_file(str(DEMO / "tokenizer.json")).token_to_id("}")): 100}


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_instructor_gets_an_object(client: openai.OpenAI, mode: str, is_streamed: bool) -> None:
    instructor = pytest.importorskip("instructor")
    asking = instructor.from_openai(client, mode=instructor.Mode[mode])
    kind = AnyObject if mode == "JSON" else Sum
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "response_model": kind,
        "max_retries": 0,
        "temperature": 0,
        "max_tokens": 200,
        **({"logit_bias": CLOSING} if kind is AnyObject else {}),
    }
    if is_streamed:
        *_, answer = asking.chat.completions.create_partial(**body)
        answer = kind.model_validate(answer.model_dump())
    else:
        answer = asking.chat.completions.create(**body)
    assert isinstance(answer, kind)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_an_object_of_one_number_ends(client: openai.OpenAI, mode: str) -> None:
    """Without a limit of tokens: objects are closed, so no key can be invented."""
    instructor = pytest.importorskip("instructor")
    asking = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions
    talk = [{"role": "user", "content": "What is 17 + 25?"}]
    body: dict[str, Any] = {"model": "demo", "messages": talk, "response_model": Total}
    body |= {"max_retries": 0, "temperature": 0}
    assert isinstance(asking.create(**body), Total)
    *_, answer = asking.create_partial(**body)
    assert isinstance(answer.total, int)


@pytest.mark.parametrize("output", ["tool", "native", "prompted"])
def test_pydantic_ai_gets_an_object(server: LiveServer, output: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    kinds = {"tool": ai.ToolOutput, "native": ai.NativeOutput, "prompted": ai.PromptedOutput}
    kind = AnyObject if output == "prompted" else Sum
    agent = ai.Agent(_pydantic_model(server), output_type=kinds[output](kind), retries=0)
    settings = {"max_tokens": 200, **({"logit_bias": CLOSING} if kind is AnyObject else {})}
    answer = agent.run_sync("What is 17 + 25?", model_settings=settings)
    assert isinstance(answer.output, kind)


def test_pydantic_ai_calls_a_tool_and_reports(server: LiveServer) -> None:
    ai = pytest.importorskip("pydantic_ai")
    agent = ai.Agent(_pydantic_model(server), tools=[ai.Tool(get_weather)], retries=0)
    answer = agent.run_sync(QUESTION, model_settings={"temperature": 0, "max_tokens": 200})
    assert answer.output == REPORT
    assert answer.usage.tool_calls == 1


def _pydantic_model(server: LiveServer) -> Any:
    openai_models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=server.url + "/v1", api_key="none")
    return openai_models.OpenAIChatModel("demo", provider=provider)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_gets_an_object(server: LiveServer, method: str) -> None:
    kind = AnyObject if method == "json_mode" else Sum
    settings = {"logit_bias": CLOSING} if kind is AnyObject else {}
    model = chat_model(server, **settings).with_structured_output(kind, method=method)
    assert isinstance(model.invoke("What is 17 + 25?"), kind)


def test_langchain_calls_a_tool_and_reports(server: LiveServer) -> None:
    tools = pytest.importorskip("langchain_core.tools")
    messages = pytest.importorskip("langchain_core.messages")
    model = chat_model(server).bind_tools([tools.tool(get_weather)])
    call = model.invoke(QUESTION)
    assert [(each["name"], each["args"]) for each in call.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    result = messages.ToolMessage(RESULT, tool_call_id=call.tool_calls[0]["id"])
    talk = [messages.HumanMessage(QUESTION), call, result]
    assert model.invoke(talk).content == REPORT
    whole = None
    for chunk in model.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [each["args"] for each in whole.tool_calls] == [{"city": "Paris"}]


def test_langchain_forces_a_tool(server: LiveServer) -> None:
    tools = pytest.importorskip("langchain_core.tools")
    for choice in ("any", "get_weather"):
        model = chat_model(server).bind_tools([tools.tool(get_weather)], tool_choice=choice)
        (call,) = model.invoke("Hello!").tool_calls[:1]
        assert call["name"] == "get_weather"


def test_litellm_calls_a_tool_and_reports(server: LiveServer) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    talk: list[Any] = [{"role": "user", "content": QUESTION}]
    message = _litellm(server, talk, tools=tools).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    talk += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    assert _litellm(server, talk, tools=tools).choices[0].message.content == REPORT
    arguments = ""
    for chunk in _litellm(server, talk[:1], tools=tools, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            arguments += piece.function.arguments or ""
    assert json.loads(arguments) == {"city": "Paris"}


def test_litellm_gets_an_object(server: LiveServer) -> None:
    talk = [{"role": "user", "content": "What is 17 + 25?"}]
    answer = _litellm(server, talk, response_format=Sum).choices[0].message.content
    assert Sum.model_validate_json(answer)


def _litellm(server: LiveServer, messages: list[Any], **body: Any) -> Any:
    litellm = pytest.importorskip("litellm")
    return litellm.completion(
        model="openai/demo",
        api_base=server.url + "/v1",
        api_key="none",
        messages=messages,
        temperature=0,
        max_tokens=200,
        max_retries=0,
        **body,
    )


async def _run_agent(agent: Any, question: str, *, is_streamed: bool) -> Any:
    """The result of an agent of openai-agents."""
    runner = pytest.importorskip("agents").Runner
    if not is_streamed:
        return await runner.run(agent, question)
    answer = runner.run_streamed(agent, question)
    async for _ in answer.stream_events():
        pass
    return answer


@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_openai_agents_have_a_typed_result_beside_strict_tools(
    server: LiveServer, model: str, is_streamed: bool
) -> None:
    """The demonstration model would call again after a call: the first one ends the run."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def run(question: str) -> Any:
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        agent = agents.Agent(
            name="sums",
            tools=[agents.function_tool(get_weather)],
            tool_use_behavior="stop_on_first_tool",
            output_type=Sum,
            model=getattr(agents, model)(model="demo", openai_client=client),
            model_settings=agents.ModelSettings(temperature=0, max_tokens=200),
        )
        return await _run_agent(agent, question, is_streamed=is_streamed)

    assert isinstance(asyncio.run(run("What is 17 + 25?")).final_output, Sum)
    called = asyncio.run(run(QUESTION))
    assert [item.type for item in called.new_items] == ["tool_call_item", "tool_call_output_item"]


@pytest.mark.parametrize("choice", [None, "required"])
@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_openai_agents_call_a_strict_tool_and_report(
    server: LiveServer, model: str, choice: str | None, is_streamed: bool
) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def run() -> Any:
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        agent = agents.Agent(
            name="weather",
            tools=[agents.function_tool(get_weather)],
            model=getattr(agents, model)(model="demo", openai_client=client),
            model_settings=agents.ModelSettings(temperature=0, max_tokens=200, tool_choice=choice),
        )
        return await _run_agent(agent, QUESTION, is_streamed=is_streamed)

    answer = asyncio.run(run())
    assert answer.final_output == REPORT
    assert [item.type for item in answer.new_items] == [
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]

"""smolagents over OpenAI's client and over litellm: models, an agent of tool calls, one of code.

The demonstration model cannot follow the prompts of agents: the steps are counted, not judged.
"""

import os
from typing import Any

import pytest

from tests.clients.demo_tool import QUESTION, RESULT, SUM, SUM_QUESTION, Sum
from tests.live.live_server import LiveServer

# At import, litellm otherwise asks GitHub what models cost.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
smolagents = pytest.importorskip("smolagents")
pytestmark = pytest.mark.long


@smolagents.tool  # type: ignore[untyped-decorator]
def get_weather(city: str) -> str:
    """The weather in a city now.

    Args:
        city: its name
    """
    return RESULT


@pytest.fixture(params=["OpenAIServerModel", "LiteLLMModel"])
def model(server: LiveServer, request: pytest.FixtureRequest) -> Any:
    name = "openai/demo" if request.param == "LiteLLMModel" else "demo"
    # litellm gives up on a stream that repeats a piece a hundred times.
    settings = {"temperature": 0, "max_tokens": 80}
    kind = getattr(smolagents, request.param)
    return kind(name, api_base=server.url + "/v1", api_key="none", **settings)


def asking(text: str) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def test_a_model_answers(model: Any) -> None:
    assert model.generate(asking(SUM_QUESTION)).content == SUM
    assert "".join(e.content or "" for e in model.generate_stream(asking(SUM_QUESTION))) == SUM
    cut = model.generate(asking(SUM_QUESTION), stop_sequences=["25", "Observation:"])
    assert cut.content == "17 + "
    schema = {"name": "sum", "strict": True, "schema": Sum.model_json_schema()}
    wanted = {"type": "json_schema", "json_schema": schema}
    assert Sum.model_validate_json(
        model.generate(asking(SUM_QUESTION), response_format=wanted).content
    )
    called = model.generate(asking(QUESTION), tools_to_call_from=[get_weather])
    assert [call.function.name for call in called.tool_calls] == ["get_weather"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_agent_calls_tools(model: Any, stream: bool) -> None:
    agent = smolagents.ToolCallingAgent(
        [get_weather], model, max_steps=2, stream_outputs=stream, verbosity_level=0
    )
    agent.run(QUESTION)
    steps = [step for step in agent.memory.steps if getattr(step, "step_number", None)]
    assert steps
    for step in steps[:2]:
        names = {call.name for call in step.tool_calls or ()}
        assert names
        assert names <= {"get_weather", "final_answer"}


@pytest.mark.parametrize("is_structured", [False, True], ids=["text", "schema"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_agent_writes_code(model: Any, stream: bool, is_structured: bool) -> None:
    agent = smolagents.CodeAgent(
        [],
        model,
        max_steps=2,
        stream_outputs=stream,
        use_structured_outputs_internally=is_structured,
        verbosity_level=0,
    )
    assert agent.run(SUM_QUESTION)  # after its last step, by a plain chat
    outputs = [step.model_output for step in agent.memory.steps if hasattr(step, "model_output")]
    assert all(outputs[:2])
    if is_structured:
        assert all(output.startswith('{"thought": "') for output in outputs[:2])

"""dspy: typed signatures, chains of thought and tools, over its own engine and over litellm's.

dspy sends schemas and tools to models that it knows to take them. A provider that is declared, as
here, says so.
"""

import asyncio
import os
from typing import Any, Literal

import pytest

from tests.clients.demo_tool import QUESTION, SUM, SUM_QUESTION, get_weather
from tests.live.live_server import LiveServer

# At import, litellm otherwise asks GitHub what models cost.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
dspy = pytest.importorskip("dspy")
providers = pytest.importorskip("dspy.lm15")
pytestmark = pytest.mark.long

SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "cache": False, "num_retries": 0}


class Added(dspy.Signature):  # type: ignore[misc, name-defined]
    """Add."""

    question: str = dspy.InputField()
    total: int = dspy.OutputField()
    kind: Literal["sum", "difference"] = dspy.OutputField()


@pytest.fixture(scope="module")
def model(server: LiveServer) -> Any:
    access = providers.AccessPolicy(provider="sgl_jax", env_keys=(), base_url=server.url + "/v1")
    provider = providers.ProviderDefinition.chat(
        access, compat=providers.OpenAIChatCompat.preset("sglang"), placeholder_key="none"
    )
    supports = providers.ModelSupport(function_calling=True, response_schema=True)
    providers.register_provider(provider, supports=supports)
    return dspy.LM("sgl_jax/demo", **SETTINGS)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_a_model_without_a_declaration_answers(server: LiveServer, kind: str) -> None:
    where = {"api_base": server.url + "/v1", "api_key": "none"}
    model = dspy.LM("openai/demo", model_type=kind, **where, **SETTINGS)
    (answer,) = model(SUM_QUESTION)
    assert (answer if kind == "chat" else answer["text"]) == SUM


@pytest.mark.parametrize("adapter", ["ChatAdapter", "JSONAdapter"])
def test_outputs_have_their_types(model: Any, adapter: str) -> None:
    with dspy.context(lm=model, adapter=getattr(dspy, adapter)()):
        answer = dspy.Predict(Added)(question=SUM_QUESTION)
        assert isinstance(answer.total, int)
        assert answer.kind in ("sum", "difference")
        thought = dspy.ChainOfThought("question -> answer: float")(question=SUM_QUESTION)
        assert isinstance(thought.answer, float)


def test_outputs_are_streamed(model: Any) -> None:
    async def run() -> list[Any]:
        with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
            stream = dspy.streamify(dspy.Predict(Added))(question=SUM_QUESTION)
            return [event async for event in stream]

    *chunks, answer = asyncio.run(run())
    assert len(chunks) > 1
    assert isinstance(answer.total, int)


def test_tools_are_called_natively(model: Any) -> None:
    """dspy sends the tools beside a schema of no properties."""

    class Calls(dspy.Signature):  # type: ignore[misc, name-defined]
        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()  # type: ignore[name-defined]
        outputs: dspy.ToolCalls = dspy.OutputField()  # type: ignore[name-defined]

    with dspy.context(lm=model, adapter=dspy.JSONAdapter(use_native_function_calling=True)):
        answer = dspy.Predict(Calls)(question=QUESTION, tools=[dspy.Tool(get_weather)])
    assert [call.name for call in answer.outputs.tool_calls] == ["get_weather"]

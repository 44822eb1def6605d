"""litellm's proxy as a process before a server: it speaks OpenAI's and Anthropic's APIs to both."""

import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from tests.clients.demo_tool import (
    PARAMETERS,
    QUESTION,
    SUM,
    SUM_PROMPT,
    SUM_QUESTION,
    Sum,
)
from tests.live.live_server import LiveServer, free_port

pytest.importorskip("litellm")
pytest.importorskip("apscheduler")  # of litellm[proxy]
pytestmark = pytest.mark.long

MODELS = """
model_list:
  - model_name: openai
    litellm_params: {{model: openai/demo, api_base: "{url}/v1", api_key: none}}
  - model_name: hosted
    litellm_params: {{model: hosted_vllm/demo, api_base: "{url}/v1"}}
  - model_name: anthropic
    litellm_params: {{model: anthropic/demo, api_base: "{url}", api_key: none}}
  - model_name: text
    litellm_params: {{model: text-completion-openai/demo, api_base: "{url}/v1", api_key: none}}
"""
START_TIMEOUT_S = 120.0
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS, "strict": True}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


class Proxy(NamedTuple):
    url: str
    key: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=self.key, max_retries=0)


@pytest.fixture(scope="module")
def proxy(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder, port = tmp_path_factory.mktemp("proxy"), free_port()
    (folder / "config.yaml").write_text(MODELS.format(url=server.url))
    key = f"sk-{secrets.token_hex(24)}"  # it does not start with a weak one
    proxy = Proxy(f"http://127.0.0.1:{port}", key)
    environment = {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = ["litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | environment, stdout=log, stderr=log
        )
    try:
        _wait_until_live(proxy, process, folder / "log")
        yield proxy
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def _wait_until_live(proxy: Proxy, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{proxy.url}/health/liveliness", timeout=5).status_code == 200:
                return
        except httpx.TransportError:  # not listening yet
            time.sleep(0.2)
    raise AssertionError(f"the proxy is not up: {log.read_text()[-2000:]}")


def asking(model: str, text: str, **fields: Any) -> Any:
    talk = [{"role": "user", "content": text}]
    return {"model": model, "messages": talk, "temperature": 0, "max_tokens": 200} | fields


@pytest.mark.parametrize("model", ["openai", "hosted", "anthropic"])
def test_chats_pass_through(proxy: Proxy, model: str) -> None:
    chats = proxy.client.chat.completions
    whole = chats.create(**asking(model, SUM_QUESTION))
    assert whole.choices[0].message.content == SUM
    told, usage = "", None
    options = {"include_usage": True}
    for event in chats.create(**asking(model, SUM_QUESTION, stream=True, stream_options=options)):
        told += "".join(choice.delta.content or "" for choice in event.choices)
        usage = event.usage or usage
    assert told == SUM
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens

    called = chats.create(**asking(model, QUESTION, tools=TOOLS)).choices[0]
    assert called.finish_reason == "tool_calls"
    assert json.loads(called.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    arguments = ""
    for event in chats.create(**asking(model, QUESTION, tools=TOOLS, stream=True)):
        for choice in event.choices:
            arguments += "".join(c.function.arguments or "" for c in choice.delta.tool_calls or ())
    assert json.loads(arguments) == {"city": "Paris"}
    held = chats.parse(**asking(model, SUM_QUESTION, response_format=Sum))
    assert isinstance(held.choices[0].message.parsed, Sum)


@pytest.mark.parametrize("model", ["openai", "hosted"])
def test_responses_pass_through(proxy: Proxy, model: str) -> None:
    responses = proxy.client.responses
    asked: Any = {"model": model, "input": SUM_QUESTION, "temperature": 0}
    assert responses.create(**asked).output_text == SUM
    events = list(responses.create(**asked, stream=True))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == SUM


def test_texts_pass_through(proxy: Proxy) -> None:
    answer = proxy.client.completions.create(model="text", prompt=SUM_PROMPT, temperature=0)
    assert answer.choices[0].text == SUM


@pytest.mark.parametrize("model", ["openai", "anthropic"])
def test_anthropics_client_is_served(proxy: Proxy, model: str) -> None:
    """For an OpenAI model by `/v1/responses`, of which the proxy asks encrypted reasoning."""
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=proxy.url, api_key=proxy.key, max_retries=0)
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    body: Any = {"model": model, "max_tokens": 200, "extra_body": {"temperature": 0}}
    body |= {"messages": [{"role": "user", "content": QUESTION}], "tools": [tool]}
    (call,) = client.messages.create(**body).content
    assert (call.type, call.input) == ("tool_use", {"city": "Paris"})
    with client.messages.stream(**body) as stream:
        (call,) = stream.get_final_message().content
    assert (call.type, call.input) == ("tool_use", {"city": "Paris"})


def test_refusals_pass_through(proxy: Proxy) -> None:
    chats = proxy.client.chat.completions
    with pytest.raises(openai.BadRequestError, match="ContextWindowExceededError"):
        chats.create(**asking("openai", f"{SUM_QUESTION} " * 2000))
    with pytest.raises(openai.BadRequestError, match="top_p") as refused:
        chats.create(**asking("openai", "x", top_p=5))
    assert "ContextWindowExceededError" not in str(refused.value)

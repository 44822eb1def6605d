"""simonw's llm on its command line: chats, streams, conversations, schemas and tools."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.demo_tool import QUESTION, REPORT, SUM, SUM_PROMPT, SUM_QUESTION
from tests.live.live_server import LiveServer

pytest.importorskip("llm")
pytestmark = pytest.mark.long

MODELS = """
- {{model_id: demo, model_name: demo, api_base: {url}/v1, supports_schema: true,
   supports_tools: true}}
- {{model_id: demo-text, model_name: demo, api_base: {url}/v1, completion: true}}
"""
TOOL = """
def get_weather(city: str) -> str:
    "The weather in a city now."
    return '{"weather": "rainy", "degrees": 12}'
"""
Llm = Callable[..., str]


@pytest.fixture
def llm(server: LiveServer, tmp_path: Path) -> Llm:
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=server.url))
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def run(*words: str, model: str = "demo") -> str:
        command = [sys.executable, "-m", "llm", "prompt", "-m", model, *words]
        command += ["-o", "temperature", "0", "-o", "max_tokens", "200"]
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.mark.parametrize("mode", [[], ["--no-stream"]], ids=["streamed", "whole"])
def test_llm_gets_what_it_asks_for(llm: Llm, mode: list[str], tmp_path: Path) -> None:
    assert llm(*mode, SUM_QUESTION) == SUM
    answer = json.loads(llm(*mode, "--schema", "left int, is_sure bool", SUM_QUESTION))
    assert {name: type(value) for name, value in answer.items()} == {"left": int, "is_sure": bool}
    (tmp_path / "tools.py").write_text(TOOL)
    assert llm(*mode, "--functions", str(tmp_path / "tools.py"), QUESTION) == REPORT


def test_llm_continues_a_conversation(llm: Llm) -> None:
    assert llm("The code of Mira is 471.") == "Noted."
    assert llm("--continue", "What is the code of Mira?") == "It is 471."


def test_llm_completes_a_text(llm: Llm) -> None:
    assert llm(SUM_PROMPT, model="demo-text") == SUM

"""Vercel's ai and @langchain/openai in node.

npm install --prefix tests/clients/node
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.demo_tool import REPORT, SUM
from tests.live.live_server import LiveServer

FOLDER = Path(__file__).parent / "node"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (FOLDER / "node_modules").exists(), reason="needs npm install"),
]


def run(script: str, server: LiveServer) -> Any:
    done = subprocess.run(
        ["node", script, server.url], cwd=FOLDER, timeout=200, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_vercels_ai_gets_what_it_asks_for(server: LiveServer) -> None:
    answers = run("vercel.mjs", server)
    report = "It is rainy and 5 degrees in Paris."
    assert answers.pop("stateless") == report
    assert answers.keys() == {"compatible", "chat", "responses", "anthropic"}
    for answer in answers.values():
        assert answer == {
            "whole": SUM,
            "streamed": SUM,
            "hasUsage": True,
            "called": report,
            "calledStream": report,
            "forced": "get_weather",
            "object": "isSure,left",
            "objectStream": "isSure,left",
            "beside": "get_weather",
            "recalled": "It is 471.",
        }


def test_langchain_gets_what_it_asks_for(server: LiveServer) -> None:
    answers = run("langchain.mjs", server)
    assert answers.pop("completion") == SUM
    assert answers.keys() == {"chats", "responses"}
    for answer in answers.values():
        assert answer == {
            "whole": SUM,
            "streamed": SUM,
            "hasUsage": True,
            "called": {"city": "Paris"},
            "calledStream": {"city": "Paris"},
            "forced": "get_weather",
            "jsonSchema": "isSure,left",
            "functionCalling": "isSure,left",
            "report": REPORT,
            "typed": "isSure,left",
        }

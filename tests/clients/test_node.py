"""npm's openai in node: chats, streams, schemas, its own loop of tool calls, errors."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.live.live_server import LiveServer

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm"),
]


def test_npms_openai_gets_what_it_asks_for(server: LiveServer, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent / "agent.mjs", tmp_path)
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), "openai@6"]
    subprocess.run(install, check=True, timeout=300)
    run = subprocess.run(
        ["node", "agent.mjs", server.url], cwd=tmp_path, timeout=120, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {
        "whole": "17 + 25 = 42.",
        "streamed": "17 + 25 = 42.",
        "hasUsage": True,
        "held": "boolean",
        "report": "It is rainy and 5 degrees in Paris.",
        "forced": ["get_weather", "string"],
        "refused": {"status": 400, "param": "top_p"},
        "names": ["demo"],
    }

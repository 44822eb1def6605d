"""Codex, Claude Code and opencode, as published, read a file, edit it and run a command.

npm install --prefix tests/clients/agents

Settings are those of docs/guide/agents.md. The scripted engine answers with what the chat template
writes first, and this template writes a call of the agent's next tool, by the number of results in
the conversation.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.server_process import SCRIPTED, Server, running_server
from tests.server.test_agent_bodies import GUARD
from tests.support.tokenizers import byte_level, save

BIN = Path(__file__).parent / "agents" / "node_modules" / ".bin"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not BIN.exists(), reason="needs npm install"),
]

TASK = "Change one to two in a.txt, and count its bytes."
CONTEXT = 400_000  # the tokenizer makes nearly a token of each byte
# Tool of an agent by which it is known -> its calls, one a turn.
STEPS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "exec_command": [
        ("exec_command", {"cmd": "cat a.txt"}),
        ("exec_command", {"cmd": "sed -i s/one/two/ a.txt"}),
        ("exec_command", {"cmd": "wc -c a.txt > count"}),
    ],
    "Bash": [
        ("Read", {"file_path": "BOX/a.txt"}),
        ("Edit", {"file_path": "BOX/a.txt", "old_string": "one", "new_string": "two"}),
        ("Bash", {"command": "wc -c a.txt > count", "description": "Count."}),
    ],
    "bash": [
        ("read", {"filePath": "BOX/a.txt"}),
        ("edit", {"filePath": "BOX/a.txt", "oldString": "one", "newString": "two"}),
        ("bash", {"command": "wc -c a.txt > count", "description": "Count."}),
    ],
}


def template(box: Path) -> str:
    """A chat template that takes one system message only, and writes the next call first."""
    script = (
        "{% set n = messages | selectattr('role', 'equalto', 'tool') | list | length %}"
        "{% set names = (tools or []) | map(attribute='function.name') | list %}"
        "{% if not names %}A title."
    )
    for tool, steps in STEPS.items():
        for number, (name, arguments) in enumerate(steps):
            call = json.dumps({"name": name, "arguments": arguments}).replace("BOX", str(box))
            script += f"{{% elif '{tool}' in names and n == {number} %}}"
            script += f"{{% raw %}}<tool_call>\n{call}\n</tool_call>{{% endraw %}}"
    return (
        f"{GUARD}{script}{{% else %}}All is done.{{% endif %}}</s>"
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<|assistant|>"
    )


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """The folder that an agent works in."""
    folder = tmp_path / "box"
    folder.mkdir()
    (folder / "a.txt").write_text("one line\n")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


@pytest.fixture
def server(tmp_path: Path, box: Path) -> Iterator[Server]:
    folder = save(byte_level(), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template(box))
    flags = ("--served-model-name", "coder", "--tool-call-parser", "hermes")
    with running_server(SCRIPTED, folder, *flags, "--context-length", str(CONTEXT)) as server:
        yield server.wait_ready()


def run(box: Path, home: Path, *command: str, **environment: str) -> str:
    """Run an agent to its end; returns what it prints."""
    home.mkdir(exist_ok=True)
    own = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), **environment}
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=box,
        env=kept | own,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def assert_done(server: Server, box: Path, printed: str) -> None:
    assert "All is done." in printed
    assert (box / "a.txt").read_text() == "two line\n"
    assert (box / "count").read_text().split() == ["9", "a.txt"]
    statuses = [line.split(" 200 ")[0] for line in server.printed if " 200 " in line]
    refused = [line for line in server.printed if "POST /v1/" in line and " 200 " not in line]
    assert refused == []
    assert len([line for line in statuses if "POST /v1/" in line]) >= 4


def test_codex_completes_a_task(server: Server, box: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".codex").mkdir(parents=True)
    (home / ".codex" / "config.toml").write_text(f"""
model = "coder"
model_provider = "sgl"
model_context_window = 131072

[model_providers.sgl]
name = "sgl_jax"
base_url = "{server.url}/v1"
wire_api = "responses"
env_key = "SGL_KEY"
""")
    allowed = "--dangerously-bypass-approvals-and-sandbox"
    printed = run(box, home, "codex", "exec", allowed, TASK, SGL_KEY="none")
    assert_done(server, box, printed)


def test_claude_code_completes_a_task(server: Server, box: Path, tmp_path: Path) -> None:
    names = ("MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    printed = run(
        box,
        tmp_path / "home",
        "claude",
        "-p",
        TASK,
        "--dangerously-skip-permissions",
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_AUTH_TOKEN="none",
        CLAUDE_CODE_SUBAGENT_MODEL="coder",
        IS_SANDBOX="1",
        **{f"ANTHROPIC_{name}": "coder" for name in names},
    )
    assert_done(server, box, printed)


def test_opencode_completes_a_task(server: Server, box: Path, tmp_path: Path) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": "none"},
        "models": {"coder": {"limit": {"context": 131072, "output": 32000}}},
    }
    config = {"model": "sgl/coder", "provider": {"sgl": provider}}
    (box / "opencode.json").write_text(json.dumps(config))
    printed = run(box, tmp_path / "home", "opencode", "run", TASK)
    assert_done(server, box, printed)

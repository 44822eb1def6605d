"""aider on one file of a git repository, by its command line, looked for on the PATH.

The demonstration model writes no code: each of aider's edit formats is asked for, and answered.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.live.live_server import LiveServer

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("aider") is None, reason="needs aider (aider-chat)"),
]
FLAGS = (
    "--yes-always --no-check-update --analytics-disable --no-show-model-warnings --no-pretty "
    "--no-show-release-notes --map-tokens 0"
)


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
@pytest.mark.parametrize("edit_format", ["whole", "diff", "udiff"])
def test_aider_is_answered(
    server: LiveServer, tmp_path: Path, edit_format: str, stream: str
) -> None:
    (tmp_path / "a.py").write_text('print("hello")\n')
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "OPENAI_API_BASE": server.url + "/v1",
        "OPENAI_API_KEY": "none",
        "HOME": str(tmp_path),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = ["aider", *FLAGS.split(), "--model", "openai/demo", "--edit-format", edit_format]
    command += [stream, "--message", "Print goodbye.", "a.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert " received." in done.stdout

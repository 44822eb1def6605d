"""The programs in `examples/` print what their docstrings show, on one server of the demonstration
model."""

import ast
import importlib.util
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.live.live_server import LiveServer, live_server

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PRIORITIES = ("--enable-priority-scheduling", "--max-running-requests", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("examples")
    with live_server(folder, *PRIORITIES, is_quickly_compiled=True) as started:
        yield started
        started.assert_nothing_leaked()


def shown_output(example: Path) -> str:
    """The last indented block of the module's docstring."""
    docstring = ast.get_docstring(ast.parse(example.read_text())) or ""
    *_, block = re.findall(r"(?:^    .*\n?)+", docstring, re.MULTILINE)
    return textwrap.dedent(block).strip() + "\n"


def test_there_are_eight_short_examples() -> None:
    assert len(EXAMPLES) == 8
    for example in EXAMPLES:
        docstring = ast.get_docstring(ast.parse(example.read_text())) or ""
        assert len(example.read_text().splitlines()) - len(docstring.splitlines()) <= 45


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_prints_what_it_shows(example: Path, request: pytest.FixtureRequest) -> None:
    if example.stem == "planner" and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, the TPU's compiler, is not installed")
    command = [sys.executable, str(example)]
    if "http://" in example.read_text():
        server: LiveServer = request.getfixturevalue("server")
        httpx.post(server.url + "/flush_cache").raise_for_status()
        command.append(server.url)
    printed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert printed.stdout == shown_output(example)

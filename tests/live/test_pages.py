"""Programs and commands of README and guide succeed on a server, as for a reader."""

import itertools
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.live.live_server import DEMO, LiveServer
from tests.support.documented import PAGES, blocks, command_lines

ADDRESS = "http://127.0.0.1:30000"


def examples(page: Path) -> list[tuple[str, str]]:
    """Programs that use a server, each with the output that the page shows for it."""
    return [
        (code, output)
        for (kind, code), (next_kind, output) in itertools.pairwise(blocks(page))
        if kind == "python" and next_kind == ""
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_print_what_it_shows(
    page: Path, demo_server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    httpx.post(demo_server.url + "/flush_cache").raise_for_status()
    for code, output in examples(page):
        exec(code.replace(ADDRESS, demo_server.url), {})
        assert capsys.readouterr().out == output


def test_there_are_examples() -> None:
    assert sum(len(examples(page)) for page in PAGES) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_curl_command_of_a_page_succeeds(
    page: Path, demo_server: LiveServer, tmp_path: Path
) -> None:
    names = {ADDRESS: demo_server.url, '"M2"': f'"{DEMO}"', '"trace"': f'"{tmp_path}"'}
    for line in command_lines(page):
        if not line.startswith("curl "):
            continue
        for shown, real in names.items():
            line = line.replace(shown, real)
        done = subprocess.run(
            ["bash", "-c", line.replace("curl ", "curl --silent --fail-with-body ", 1)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)


def test_after_all_this_nothing_leaked(demo_server: LiveServer) -> None:
    demo_server.close_sessions()
    demo_server.assert_nothing_leaked()

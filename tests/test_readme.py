"""README and guide are true: their links resolve, and their commands exist with their flags."""

import importlib.util
import itertools
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from sgl_jax.core.command_line import parse_server_args
from sgl_jax.doctor.__main__ import parse_doctor_request
from sgl_jax.planner.arguments import parse_plan_request
from tests.support.documented import PAGES, README, ROOT, command_lines

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUN_BY_A_LIVE_TEST = ("curl",)  # tests/live/test_pages.py
TOOLS_OF_OTHERS = ("docker", "kubectl", "mkdocs", "printf", "source")


def test_the_readme_has_at_most_1200_words() -> None:
    assert len(README.read_text().split()) <= 1200


def test_every_file_the_readme_links_to_exists() -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README.read_text())
    assert len(targets) > 15
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_there_and_takes_its_flags(page: Path) -> None:
    for line in command_lines(page):
        words = shlex.split(line, comments=True)
        words = list(itertools.dropwhile(re.compile(r"\w+=").match, words))  # variables
        if words and Path(words[0]).name not in (*RUN_BY_A_LIVE_TEST, *TOOLS_OF_OTHERS):
            check_command(words)


def check_command(words: list[str]) -> None:
    name = Path(words[0]).name
    if name == "sgl-jax":
        check_own_command(words[1:])
    elif name == "pip":
        (extras,) = re.findall(r"\[(.*)\]", words[-1])
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    elif name == "python":
        check_python(words[1:])
    else:
        assert os.access(ROOT / words[0], os.X_OK), words


def check_own_command(words: list[str]) -> None:
    command, flags = words[0], words[1:]
    if command == "plan":
        parse_plan_request(flags)
    elif command == "serve":
        parse_server_args(flags)
    elif command == "doctor":
        parse_doctor_request(flags)
    else:
        raise AssertionError(f"no command {command}")


def check_python(words: list[str]) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None
    else:
        assert (ROOT / words[0]).is_file()

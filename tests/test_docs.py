"""The docs are true: references follow the code, and every named file and anchor is there."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from scripts import make_reference
from sgl_jax.core.server_args import ServerArgs

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LIFE = (DOCS / "inside" / "life_of_a_request.md").read_text()
FLAGS = (make_reference.REFERENCE / "flags.md").read_text()
CODE = ("sgl_jax", "tests", "scripts", "benchmarks")


def names_in(path: Path) -> set[str]:
    """Functions, classes and methods (`Class.method`) that a module defines."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{own.name}" for own in node.body if hasattr(own, "name")}
    return names


@pytest.mark.parametrize("stop", re.findall(r"`(\w+/[\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", LIFE))
def test_each_stop_of_a_requests_life_is_where_it_says(stop: tuple[str, str]) -> None:
    path, named = stop
    assert set(re.findall(r"`([\w.]+)`", named)) <= names_in(ROOT / "sgl_jax" / path)


def test_each_file_of_a_requests_life_exists() -> None:
    mentioned = re.findall(r"`(\w+/[\w/]+(?:\.py|/))`", LIFE)
    assert len(mentioned) > 15
    assert [path for path in mentioned if not (ROOT / "sgl_jax" / path).exists()] == []


def test_the_page_of_flags_is_up_to_date() -> None:
    assert make_reference.flags_page() == FLAGS, "run python scripts/make_reference.py"


def test_the_page_of_flags_lists_every_flag_with_default_and_meaning() -> None:
    rows = dict(re.findall(r"^\| `--([a-z0-9-]+)` \| (.+) \|$", FLAGS, re.MULTILINE))
    settings = {field.name.replace("_", "-"): field for field in dataclasses.fields(ServerArgs)}
    assert sorted(rows) == sorted(settings)
    for name, setting in settings.items():
        default, *_, meaning = rows[name].split(" | ")
        assert meaning.startswith(setting.metadata["help"]), name
        if setting.default not in ("", None, (), False):
            assert default == f"`{setting.default}`", name


def test_the_table_of_large_parts_names_files_their_lines_and_flags() -> None:
    page = (DOCS / "inside" / "architecture.md").read_text().partition("## What the large parts")[2]
    rows = [row.split(" | ") for row in page.splitlines() if "`" in row and row.startswith("| ")]
    assert len(rows) > 15
    settings = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(ServerArgs)}
    for part, lines, off, _ in rows:
        assert set(re.findall(r"--[a-z-]+", off)) <= settings, part
        num_lines = 0
        for name in re.findall(r"`([\w./]+)`", part):
            path = ROOT / "sgl_jax" / name
            files = [path] if path.suffix else [*path.rglob("*.py")]
            num_lines += sum(len(file.read_text().splitlines()) for file in files)
        assert num_lines == pytest.approx(int(lines.replace(",", "")), rel=0.15), part


def test_the_page_of_metrics_is_up_to_date() -> None:
    page = (make_reference.REFERENCE / "metrics.md").read_text()
    assert make_reference.metrics_page() == page, "run python scripts/make_reference.py"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_every_relative_link_of_a_page_resolves(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_that_the_code_names_exists() -> None:
    files = [path for room in CODE for path in (ROOT / room).rglob("*.py")]
    named = {name for path in files for name in re.findall(r"docs/[\w/]+\.md", path.read_text())}
    assert len(named) > 5
    assert sorted(name for name in named if not (ROOT / name).exists()) == []

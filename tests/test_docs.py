"""The docs are true: where they say that something is in a file, it is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIFE = (ROOT / "docs" / "life_of_a_request.md").read_text()


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

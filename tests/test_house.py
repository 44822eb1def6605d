"""Rules for the whole package, by its syntax trees: no import cycle, one class for each name."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import sgl_jax

ROOT = Path(sgl_jax.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """The package's modules by name, a package under its own name."""
    modules = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = ast.parse(path.read_text())
    return modules


def imports(tree: ast.Module) -> Iterator[str]:
    """Names of all that a module imports, also within functions and for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found = submodules & set(trees())
            yield from found
            if len(found) < len(submodules):
                yield node.module


def cycles() -> set[frozenset[str]]:
    """Sets of modules that import each other, directly or by way of others."""
    graph = {name: set(imports(tree)) & set(trees()) for name, tree in trees().items()}
    reached = {name: reach(graph, name) for name in graph}
    knots = {frozenset(b for b in reached[a] if a in reached[b]) for a in graph}
    return knots - {frozenset()}


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    """All modules that `start` imports, directly or by way of others."""
    found: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def test_no_modules_import_each_other() -> None:
    assert not cycles()


def test_a_class_name_has_one_meaning() -> None:
    places = defaultdict(list)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}

"""The glossary defines each term once, and each term occurs in a name of the package."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLOSSARY = (ROOT / "docs" / "inside" / "glossary.md").read_text()
TERMS = [
    term
    for term in re.findall(r"^\| ([^|]+) \| [^|]+ \|$", GLOSSARY, re.MULTILINE)
    if term != "term"
]
# Words that names had before 0.1.0, and the words of the field that replaced them.
RETIRED = {
    "candidate order": "admission order",
    "dealt out": "distributed",
    "either way": "one of",
    "expert lines": "expert dispatch",
    "favourite": "leading policy",
    "gained outputs": "output buffer",
    "host blocks": "CPU pool",
    "host store": "CPU blocks",
    "host tier": "CPU tier",
    "in slots": "placed",
    "launched rows": "in flight rows",
    "leader link": "coordinator link",
    "lend": "check out",
    "lent": "checked out",
    "let go": "free passed",
    "no group": "join refused",
    "of part": "derived",
    "park": "mark idle",
    "passed over": "skip count",
    "patient send": "backpressured send",
    "put off": "defer",
    "rank host": "rank offload",
    "stays for": "deferred rank",
    "stem": "shared prefix",
    "stems": "shared prefixes",
    "step room": "rank capacity",
    "store tier": "remote tier",
    "stretch": "scan segment",
    "tell prompt len": "pop prompt len",
    "unpark": "mark running",
}
# Public settings and metrics keep their names.
_PUBLIC = {"host blocks"}
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def words_of(name: str) -> str:
    """Return the words of a name in lower case, with a blank before and after each."""
    return f" {' '.join(_WORD.findall(name)).lower()} "


def names_of(path: Path) -> Iterator[str]:
    """Yield the names in a module: its own, classes, functions, arguments and fields."""
    yield path.parent.name if path.stem == "__init__" else path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.AnnAssign(target=ast.Name(name)) | ast.Assign(targets=[ast.Name(name)]):
                yield name


@pytest.fixture(scope="module")
def names() -> str:
    found = {name for path in (ROOT / "sgl_jax").rglob("*.py") for name in names_of(path)}
    return "\n".join(sorted(map(words_of, found)))


def test_each_term_is_defined_once() -> None:
    assert len(TERMS) > 50
    assert sorted({term.lower() for term in TERMS}) == sorted(term.lower() for term in TERMS)


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_the_glossary_occurs_in_a_name(term: str, names: str) -> None:
    assert re.search(rf" {words_of(term).strip()}(s|es)? ", names), term


@pytest.mark.parametrize("word", sorted(RETIRED))
def test_a_retired_word_is_in_no_name(word: str, names: str) -> None:
    found = [name.strip() for name in names.splitlines() if f" {word} " in name]
    assert set(found) <= _PUBLIC, f"say {RETIRED[word]!r}"

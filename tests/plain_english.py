"""Count the dialect in code and pages: `python -m tests.plain_english [room ...]`.

Without arguments it prints hits per thousand words of each room, beside the room's ceiling. With
rooms it prints each hit with its file and line. `--write` lowers the ceilings in
`plain_english_ceilings.json` to today's counts; it never raises one.

It reads docstrings, comments and pages, the names of functions and classes, the help of flags, and
the messages of errors. Quoted text is no prose of ours: text between backticks or quotation marks,
and blocks of code, are left out. "known" is an adjective here, and "answer" counts only where it is
a verb.
"""

import ast
import collections
import io
import json
import math
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CEILINGS = Path(__file__).with_name("plain_english_ceilings.json")
GOAL = 1.0  # the sum of all kinds per thousand words, and the ceiling of a new room

PATTERNS = {
    "what": re.compile(r"\bwhat\b"),
    "that of": re.compile(r"\b(?:that|those) of\b|\bthose (?:that|which|whose|who)\b"),
    "opening": re.compile(
        r"(?:^|[.!?]\s+|\n\s*\n\s*|\n\s*[-*#]+ +)(?:Of|What|Where|Whether|How|As)\b"
    ),
    "verb": re.compile(
        r"\b(?:tells?|told|telling|says?|said|saying|asks?|asked|asking|knows?|knew|knowing"
        r"|lets?|letting|wants?|wanted|wanting|learns?|learnt|hears?|heard|weather|untold"
        r"|answered|answering"
        r"|(?:to|not|can|cannot|must|may|will|would|it|that|who|which|and) answers?(?! of))\b"
    ),
}
_QUOTED = re.compile(r"``.*?``|`[^`]*`|\"[^\"\n]*\"|(?<!\w)'[^'\n]*'(?!\w)|\w+://\S+", re.DOTALL)
_CODE_BLOCK = re.compile(r"^```.*?^```|^(?: {4}|\t).*$", re.DOTALL | re.MULTILINE)
_NAME_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_WORD = re.compile(r"[A-Za-z][\w'-]*")


class Text(NamedTuple):
    """One docstring, block of comments, name, message or page, and its first line's number."""

    line: int
    text: str


class Hit(NamedTuple):
    path: Path
    line: int
    kind: str
    context: str


class Count(NamedTuple):
    words: int
    hits: list[Hit]

    @property
    def per_thousand(self) -> float:
        return 1000 * len(self.hits) / max(1, self.words)


def docstrings(source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            yield Text(body[0].lineno, body[0].value.value)


def comments(source: str) -> Iterator[Text]:
    """Comments; those on consecutive lines of their own are one text."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, own_line = token.start[0], not token.line[: token.start[1]].strip()
        if block and not (own_line and line == last + 1):
            yield Text(first, "\n".join(block))
            block = []
        first = line if not block else first
        block.append(token.string.lstrip("# "))
        last = line if own_line else -1
    if block:
        yield Text(first, "\n".join(block))


def names(source: str) -> Iterator[Text]:
    """Names of functions and classes, as words in lower case."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield Text(node.lineno, " ".join(_NAME_PART.findall(node.name)).lower())


def messages(source: str) -> Iterator[Text]:
    """Texts for users: of errors that are raised, and of the help of flags and settings."""
    for node in ast.walk(ast.parse(source)):
        values: list[ast.expr] = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            values = node.exc.args
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "setting":
                values = node.args[1:2]
            values = values + [
                keyword.value for keyword in node.keywords if keyword.arg in ("help", "description")
            ]
        for value in values:
            if text := _literal(value):
                yield Text(value.lineno, text)


def _literal(value: ast.expr) -> str:
    """The text of a string; a blank for each value in it. Empty for any other expression."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        return "".join(_literal(part) or "_" for part in value.values)
    return ""


def prose(path: Path) -> Iterator[Text]:
    source = path.read_text()
    if path.suffix == ".md":
        yield Text(1, _CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), source))
    else:
        yield from docstrings(source)
        yield from comments(source)
        yield from names(source)
        yield from messages(source)


def _without_quoted(text: str) -> str:
    """The text with quoted parts as blanks; line breaks stay, so that lines can be counted."""
    return _QUOTED.sub(lambda quoted: re.sub(r"[^\n]", "_", quoted[0]), text)


def hits(path: Path, text: Text) -> Iterator[Hit]:
    plain = _without_quoted(text.text.strip())
    for kind, pattern in PATTERNS.items():
        for found in pattern.finditer(plain):
            around = " ".join(plain[max(0, found.start() - 50) : found.end() + 50].split())
            yield Hit(path, text.line + plain.count("\n", 0, found.end()), kind, around)


def count(paths: list[Path]) -> Count:
    texts = [(path, text) for path in paths for text in prose(path)]
    words = sum(len(_WORD.findall(_without_quoted(text.text))) for _, text in texts)
    return Count(words, [hit for path, text in texts for hit in hits(path, text)])


def rooms() -> dict[str, list[Path]]:
    """The files of each room: folders of the package, its top level, and the pages."""
    package = ROOT / "sgl_jax"
    found = {
        folder.name: sorted(folder.rglob("*.py"))
        for folder in sorted(package.iterdir())
        if (folder / "__init__.py").exists()
    }
    found["top level"] = sorted(package.glob("*.py"))
    return found | {
        "README.md": [ROOT / "README.md"],
        "docs": sorted((ROOT / "docs").rglob("*.md")),
    }


def ceilings() -> dict[str, float]:
    return json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}


def lower_ceilings(counts: dict[str, Count]) -> None:
    """Write today's counts, rounded up to a tenth, where they are below the old ceilings."""
    old = ceilings()
    new = {
        room: min(old.get(room, GOAL), math.ceil(count.per_thousand * 10) / 10)
        for room, count in counts.items()
    }
    CEILINGS.write_text(json.dumps(new, indent=4) + "\n")


def print_table(counts: dict[str, Count]) -> None:
    columns = ["words", *PATTERNS, "sum", "ceiling"]
    print(f"{'room':12}" + "".join(f"{column:>9}" for column in columns))
    for room, found in counts.items():
        kinds = collections.Counter(hit.kind for hit in found.hits)
        rates = [1000 * kinds[kind] / max(1, found.words) for kind in PATTERNS]
        rates += [found.per_thousand, ceilings().get(room, GOAL)]
        print(f"{room:12}{found.words:9}" + "".join(f"{rate:9.1f}" for rate in rates))


def main(arguments: list[str]) -> None:
    counts = {room: count(paths) for room, paths in rooms().items()}
    if arguments == ["--write"]:
        lower_ceilings(counts)
    elif arguments:
        for hit in (hit for room in arguments for hit in counts[room].hits):
            print(f"{hit.path.relative_to(ROOT)}:{hit.line}: {hit.kind}: {hit.context}")
    else:
        print_table(counts)


if __name__ == "__main__":
    main(sys.argv[1:])

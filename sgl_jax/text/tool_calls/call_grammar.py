"""Calls whose names and arguments are valid: what an answer is held to that must call a tool.

A format is described by texts around names and arguments; the grammar is made from it for the
tools of a request. Texts of special tokens are written by their ids, since no grammar can spell
them.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from sgl_jax.core.grammar import JSON_STYLE

NUMBER = "\0"  # within a text: digits
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_PLAIN_NAME = re.compile(r"[\w.-]+")

Schema = Mapping[str, Any]
# The name of each tool -> the JSON schema of its arguments.
Schemas = Mapping[str, Schema]
# The text of each special token that a format has -> its id.
SpecialIds = Mapping[str, int]


class CallForm(NamedTuple):
    """A way to write calls.

    head, after_name, tail: before a call's name, before its arguments, after them.
    between: what stands between two calls; None where an answer has only one.
    begin, end: what stands around all calls.
    is_json: a call is one JSON object: its name is the inside of a string.
    """

    head: str
    after_name: str
    tail: str
    between: str | None
    begin: str = ""
    end: str = ""
    is_json: bool = False

    def named(self, tool: str) -> str:
        """What stands before the arguments of `tool`.

        Raises ValueError for a name that would not be read.
        """
        if self.is_json:
            return self.head + json.dumps(tool, ensure_ascii=False)[1:-1] + self.after_name
        if not _PLAIN_NAME.fullmatch(tool):
            raise ValueError(
                f"{tool!r}: names are letters, digits and _.- in calls of this model's format"
            )
        return self.head + tool + self.after_name


def json_arguments(rule: str, schema: Schema, special: SpecialIds) -> Iterator[str]:
    """The lines of rule `rule`: the arguments as a JSON object."""
    # Each schema is a root of its own, which references in it begin with.
    yield f"{rule}: {of_json(schema or _NO_ARGUMENTS)}"


class CallGrammar(NamedTuple):
    """How the calls of a format are written, in one of several forms.

    arguments: writes the lines of a rule for those of one tool; raises ValueError for a schema
        that the format has no way to hold.
    thought: what stands around free text that may come before the calls.
    """

    forms: tuple[CallForm, ...]
    arguments: Callable[[str, Schema, SpecialIds], Iterator[str]] = json_arguments
    thought: tuple[str, str] | None = None

    def calls(self, tools: Schemas, special: SpecialIds, *, is_single: bool) -> str:
        """Nothing but calls of `tools`, one or several, in Lark's form.

        Raises ValueError, saying why, for tools whose calls cannot be held to this format.
        """
        forms = [f"form_{number}" for number in range(len(self.forms))]
        start = f"({' | '.join(forms)})"
        lines = list[str]()
        if self.thought is not None:
            opening, closing = self.thought
            start = f"({literal(opening, special)} thought)? {start}"
            lines += free_text("thought", closing, special)
        for name, form in zip(forms, self.forms, strict=True):
            call = f"{name}_call"
            more = ""
            if form.between is not None and not is_single:
                more = f"({literal(form.between, special)} {call})*"
            begin, end = literal(form.begin, special), literal(form.end, special)
            lines.append(f"{name}: {begin} {call} {more} {end}")
            of_tools = [f"{call}_{number}" for number in range(len(tools))]
            lines.append(f"{call}: {' | '.join(of_tools)}")
            tail = literal(form.tail, special)
            for number, (rule, tool) in enumerate(zip(of_tools, tools, strict=True)):
                named = literal(form.named(tool), special)
                lines.append(f"{rule}: {named} arguments_{number} {tail}")
        for number, schema in enumerate(tools.values()):
            lines += self.arguments(f"arguments_{number}", schema, special)
        return "\n".join([f"start: {start}", *lines])

    def calls_amid_content(self, tools: Schemas) -> str:
        """Any text, in which what follows the mark of a call is one of `tools`: a structural tag.

        Raises ValueError for a format whose calls are not JSON after a mark.
        """
        form = self.forms[0]
        mark = form.head.partition("\n")[0]
        if not form.is_json or form.begin or mark == form.head:
            raise ValueError("calls of this model cannot be held to a schema amid text")
        structures = [
            {"begin": form.named(tool), "schema": schema or _NO_ARGUMENTS, "end": form.tail}
            for tool, schema in tools.items()
        ]
        return json.dumps({"structures": structures, "triggers": [mark]})


def literal(text: str, special: SpecialIds) -> str:
    """A text in Lark's form, special tokens by their ids."""
    marks = [*map(re.escape, sorted(special, key=len, reverse=True)), NUMBER]
    pieces = re.split(f"({'|'.join(marks)})", text)
    return " ".join(_piece(piece, special) for piece in pieces if piece) or '""'


def _piece(piece: str, special: SpecialIds) -> str:
    if piece == NUMBER:
        return "/[0-9]{1,3}/"
    return f"<[{special[piece]}]>" if piece in special else quoted(piece)


def free_text(rule: str, end: str, special: SpecialIds) -> Iterator[str]:
    """The lines of rule `rule`: any text up to `end`, and `end`."""
    mark = next((mark for mark in special if end.startswith(mark)), None)
    if mark is not None:  # a token, which is no text
        yield f"{rule}: /(?s:.*)/ {literal(end, special)}"
        return
    cut = min((end.find(mark) for mark in special if mark in end), default=len(end))
    yield f"{rule}: {rule}_text {literal(end[cut:], special)}"
    yield f"{rule}_text[suffix={quoted(end[:cut])}]: /(?s:.*)/"


def quoted(text: str) -> str:
    """A text without special tokens in Lark's form."""
    return json.dumps(text, ensure_ascii=False)


def of_json(schema: Schema) -> str:
    """JSON that `schema` allows, in Lark's form."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}"

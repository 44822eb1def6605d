"""The table that describes a format of calls, from which its reader and grammar are built.

`call_reader` reads every call allowed by `call_grammar`, and more: spaces anywhere, marks missing
at the end of a value or a call, JSON in any order. It cannot read a string between tags that
contains the marks at the end of its call.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from sgl_jax.core.grammar import SpecialIds
from sgl_jax.text.formats.lark import NUMBER, of_json
from sgl_jax.text.reader import Reading, Unread

# Placeholders in a text, like NUMBER: letters and digits; the begin and the end of a call's id.
WORD, ID, ID_END = "\1\2\3"
_NO_IDS = str.maketrans("", "", ID + ID_END)
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_MARK = r"<[^<>\s]*[>=]|\[[A-Z_]+\]|```"
_PATTERNS = {NUMBER: r"\d+", WORD: r"\w+", ID: "(?P<id>", ID_END: ")"}

Schema = Mapping[str, Any]
# The name of each tool -> the JSON schema of its arguments.
Tools = Mapping[str, Schema]


class ArgumentForm(Protocol):
    """A notation for the arguments of a call."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the texts that contain its marks."""

    def rule(self, name: str, schema: Schema, special: SpecialIds) -> Iterator[str]:
        """Return the lines of the grammar rule `name`: arguments that `schema` allows.

        Raises ValueError for a schema that the form cannot enforce.
        """


class JsonArguments(NamedTuple):
    texts: tuple[str, ...] = ()

    def rule(self, name: str, schema: Schema, special: SpecialIds) -> Iterator[str]:
        yield f"{name}: {of_json({'type': 'object', **schema} if schema else _NO_ARGUMENTS)}"


class CallForm(NamedTuple):
    """A way to write calls.

    Attributes:
        head, after_name, tail: text before a call's name, before its arguments, after them.
        between: text between two calls; None if an answer has only one.
        begin, end: text around all calls.
        mark: starts calls within text; "" if calls occur only at the beginning of an answer. If
            `begin` (or `head`) repeats it, it must precede all calls (or each call); else it is
            optional.
        names: pattern of valid names; None if a call is a JSON object and its name a string in it.
        needs_known_name: a call must call one of the request's tools.
        openings: the marks at the beginning of calls of the same format.
    """

    head: str
    after_name: str
    tail: str
    between: str | None
    begin: str = ""
    end: str = ""
    mark: str = ""
    arguments: ArgumentForm = JsonArguments()
    names: str | None = r"[\w.-]+"
    needs_known_name: bool = False
    openings: tuple[str, ...] = ()

    def named(self, tool: str) -> str:
        """Return the text before the arguments of `tool`. Raises ValueError for an invalid name."""
        if self.names is None:
            tool = json.dumps(tool, ensure_ascii=False)[1:-1]
        elif not re.fullmatch(self.names, tool):
            raise ValueError(f"{tool!r}: names are {self.names} in calls of this model's format")
        return (self.head + tool + self.after_name).translate(_NO_IDS)

    def after_mark(self) -> "CallForm":
        """Return the form after `mark`, which starts each call or all of them."""
        if self.begin:
            return self._replace(begin=self.begin.removeprefix(self.mark))
        if self.mark and self.head.startswith(self.mark):
            return self._replace(head=self.head.removeprefix(self.mark), between=None)
        return self

    @property
    def head_pattern(self) -> str:
        """Return a pattern of the text before the arguments, with groups `name` and maybe `id`."""
        head, after_name = _loose(self.head), _loose(self.after_name)
        pattern = rf"\s*{head}(?P<name>{self.names}){after_name}\s*"
        # Adjacent `\s*` would take quadratic time on many spaces.
        return re.sub(r"(\\s\*)+", r"\\s*", pattern)

    @property
    def closing_marks(self) -> list[str]:
        return re.findall(_MARK, self.tail)

    @property
    def ends(self) -> dict[str, list[str]]:
        """Return each mark that ends a call, with the marks that may follow it."""
        marks = self.closing_marks
        return {mark: [*marks[at:], *self.openings] for at, mark in enumerate(marks, 1)}

    @property
    def texts(self) -> tuple[str, ...]:
        around = (self.mark, self.begin, self.between or "", self.end)
        return (*around, self.head, self.after_name, self.tail, *self.arguments.texts)


class Messages(NamedTuple):
    """Marks of an answer that consists of messages, of which the last is a call or a text.

    Attributes:
        texts: the marks that may begin each earlier message, before its text.
        text_end: ends each earlier message, after its text.
        last: begins the last message if it is a text.
    """

    texts: tuple[str, ...]
    text_end: str
    last: str


class ToolFormat(NamedTuple):
    """The notation of one model's calls, in one of several forms.

    Attributes:
        also_read: forms that the reader accepts, but not the grammar.
        first_of_calls: characters with which unmarked calls at the beginning start or continue, and
            no text starts; "" if each call has a mark.
        messages: set if an answer consists of messages; calls then have no mark.
        reader: reads an answer after its reasoning; None for the generic `call_reader`.
        has_short_ids: the chat template accepts only ids of nine characters.
    """

    forms: tuple[CallForm, ...]
    also_read: tuple[CallForm, ...] = ()
    first_of_calls: str = ""
    messages: Messages | None = None
    reader: Callable[[Unread, Tools], Reading[None]] | None = None
    has_short_ids: bool = False

    @property
    def by_mark(self) -> dict[str, list[CallForm]]:
        """Return the forms to read after each mark within text."""
        found = dict[str, list[CallForm]]()
        for form in (*self.forms, *self.also_read):
            found.setdefault(form.mark, []).append(form.after_mark())
        return found

    @property
    def marks(self) -> frozenset[str]:
        """Return texts of the tokens needed for reading, including special tokens."""
        texts = (text for form in (*self.forms, *self.also_read) for text in form.texts)
        return frozenset(re.findall(_MARK, "\n".join(texts)))


def _loose(text: str) -> str:
    """Return a pattern of `text` with any spaces around its words and marks."""
    pieces = re.split(rf"(\s+|{_MARK}|[{NUMBER}{WORD}{ID}{ID_END}])", text)
    return "".join(_PATTERNS.get(piece) or _loose_piece(piece) for piece in pieces)


def _loose_piece(piece: str) -> str:
    if not piece.strip():
        return piece and r"\s*"
    return rf"\s*{re.escape(piece)}\s*" if re.fullmatch(_MARK, piece) else re.escape(piece)

"""Calls whose names and arguments are valid: what an answer is held to that must call a tool.

A format is described by texts around names and arguments; the grammar is made from it for the
tools of a request, in Lark's form.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from sgl_jax.core.grammar import MAX_GRAMMAR_CHARS
from sgl_jax.text.tool_calls.lark import SpecialIds, free_text, literal, of_json

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

Schema = Mapping[str, Any]
# The name of each tool -> the JSON schema of its arguments.
Schemas = Mapping[str, Schema]


def json_arguments(rule: str, schema: Schema, special: SpecialIds) -> Iterator[str]:
    """The lines of rule `rule`: the arguments as a JSON object."""
    yield f"{rule}: {of_json({'type': 'object', **schema} if schema else _NO_ARGUMENTS)}"


class CallForm(NamedTuple):
    """A way to write calls.

    head, after_name, tail: before a call's name, before its arguments, after them.
    between: what stands between two calls; None where an answer has only one.
    begin, end: what stands around all calls.
    mark: what calls begin with amid text; "" where they stand at the beginning of an answer only.
    arguments: writes the lines of a rule for those of one tool; raises ValueError for a schema
        that the form has no way to hold.
    names: pattern of the names that are read; None where a name is the inside of a JSON string.
    """

    head: str
    after_name: str
    tail: str
    between: str | None
    begin: str = ""
    end: str = ""
    mark: str = ""
    arguments: Callable[[str, Schema, SpecialIds], Iterator[str]] = json_arguments
    names: str | None = r"[\w.-]+"

    def named(self, tool: str) -> str:
        """What stands before the arguments of `tool`.

        Raises ValueError for a name that would not be read.
        """
        if self.names is None:
            return self.head + json.dumps(tool, ensure_ascii=False)[1:-1] + self.after_name
        if not re.fullmatch(self.names, tool):
            raise ValueError(f"{tool!r}: names are {self.names} in calls of this model's format")
        return self.head + tool + self.after_name

    def after_mark(self) -> "CallForm":
        """The same where `mark` has been written, which each call or all of them begin with."""
        if self.begin:
            return self._replace(begin=self.begin.removeprefix(self.mark))
        if self.mark and self.head.startswith(self.mark):
            return self._replace(head=self.head.removeprefix(self.mark), between=None)
        return self


class Messages(NamedTuple):
    """How an answer that consists of messages is written.

    texts: what may stand before the texts of messages that come before a call or the last text.
    text_end: after each of these texts.
    last: before a text that ends the answer without a call.
    """

    texts: tuple[str, ...]
    text_end: str
    last: str


class CallGrammar(NamedTuple):
    """How the calls of a format are written, in one of several forms.

    first_of_calls: where calls without a mark may stand at the beginning, the characters that they
        begin or go on with: no text begins with these.
    messages: where an answer consists of such; calls then have no mark.
    """

    forms: tuple[CallForm, ...]
    first_of_calls: str = ""
    messages: Messages | None = None

    def calls(self, tools: Schemas, special: SpecialIds, *, is_single: bool) -> str:
        """Nothing but calls of `tools`, one or several, in Lark's form.

        Raises ValueError, saying why, for tools whose calls cannot be held to this format.
        """
        forms = self.forms
        if is_single:
            forms = tuple(form._replace(between=None) for form in forms)
        text = "" if self.messages is None else "message*"
        lines = [f"start: {text} calls", *self._calls("calls", forms, tools, special)]
        return _joined(lines, self._messages(special), self._arguments(tools, special))

    def calls_amid_content(self, tools: Schemas, special: SpecialIds) -> str:
        """Any text, in which whatever begins as a call is one of `tools`, in Lark's form.

        Raises ValueError as `calls` does.
        """
        text = rf"/\s*([^\s{re.escape(self.first_of_calls)}](?s:.*))?/"
        lines, marked = [f"text: {text}"], list[str]()
        for number, mark in enumerate(dict.fromkeys(form.mark for form in self.forms)):
            forms = tuple(form.after_mark() for form in self.forms if form.mark == mark)
            lines += self._calls(f"calls_{number}", forms, tools, special)
            if mark:
                lines += free_text(f"text_{number}", mark, special, text)
                marked.append(f"text_{number} calls_{number}")
        if self.messages is not None:
            start = f"message* (calls_0 | {literal(self.messages.last, special)} text)"
        else:
            first = "calls_0?" if self.first_of_calls else ""
            later = f"({' | '.join(marked)})*" if marked else ""
            start = f"{first} {later} text"
        lines = [f"start: {start}", *lines]
        return _joined(lines, self._messages(special), self._arguments(tools, special))

    def _messages(self, special: SpecialIds) -> Iterator[str]:
        if self.messages is not None:
            texts = " | ".join(literal(text, special) for text in self.messages.texts)
            yield f"message: ({texts}) message_text"
            yield from free_text("message_text", self.messages.text_end, special)

    def _calls(
        self, rule: str, forms: tuple[CallForm, ...], tools: Schemas, special: SpecialIds
    ) -> Iterator[str]:
        """The lines of rule `rule`: one or several calls in one of `forms`."""
        names = [f"{rule}_{number}" for number in range(len(forms))]
        yield f"{rule}: {' | '.join(names)}"
        for name, form in zip(names, forms, strict=True):
            call, more = f"{name}_call", ""
            if form.between is not None:
                more = f"({literal(form.between, special)} {call})*"
            begin, end = literal(form.begin, special), literal(form.end, special)
            yield f"{name}: {begin} {call} {more} {end}"
            of_tools = [f"{call}_{number}" for number in range(len(tools))]
            yield f"{call}: {' | '.join(of_tools)}"
            tail, writer = literal(form.tail, special), self._writers.index(form.arguments)
            for number, (of_tool, tool) in enumerate(zip(of_tools, tools, strict=True)):
                named = literal(form.named(tool), special)
                yield f"{of_tool}: {named} arguments_{writer}_{number} {tail}"

    def _arguments(self, tools: Schemas, special: SpecialIds) -> Iterator[str]:
        for number, (tool, schema) in enumerate(tools.items()):
            for index, writer in enumerate(self._writers):
                try:
                    yield from writer(f"arguments_{index}_{number}", schema, special)
                except (AttributeError, TypeError) as error:  # by what stands where it cannot
                    raise ValueError(f"{tool!r}: parameters are no JSON schema: {error}") from error

    @property
    def _writers(self) -> list[Callable[[str, Schema, SpecialIds], Iterator[str]]]:
        """Of arguments, those that the forms have."""
        return [*dict.fromkeys(form.arguments for form in self.forms)]


def _joined(*lines: Iterable[str]) -> str:
    """A grammar of these lines.

    Raises ValueError before there are more than one may have: those of arguments may be many times
    as long as their schemas, which tell each of common definitions.
    """
    num_chars, grammar = 0, list[str]()
    for line in chain(*lines):
        num_chars += len(line) + 1
        if num_chars > MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"the grammar of their calls is longer than {MAX_GRAMMAR_CHARS} characters"
            )
        grammar.append(line)
    return "\n".join(grammar)

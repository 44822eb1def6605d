"""Builds the grammar of valid calls, in Lark's form, from a format's table."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from sgl_jax.core.grammar import JSON_RULE, MAX_GRAMMAR_CHARS, SpecialIds
from sgl_jax.text.formats.call_form import ArgumentForm, CallForm, Schema, ToolFormat, Tools
from sgl_jax.text.formats.lark import free_text, literal, of_json


class CallGrammar(NamedTuple):
    format: ToolFormat

    def calls(
        self,
        tools: Tools,
        special: SpecialIds,
        *,
        is_single: bool,
        or_json: Schema | None = None,
    ) -> str:
        """Return a grammar of only calls of `tools`, one or several, or of JSON by `or_json`.

        Raises ValueError, with the reason, for tools that this format cannot enforce.
        """
        forms = self.format.forms
        if is_single:
            forms = tuple(form._replace(between=None) for form in forms)
        messages = self.format.messages
        text = "" if messages is None else "message*"
        lines = [f"start: {text} calls", *self._calls("calls", forms, tools, special)]
        if or_json is not None:
            last = "" if messages is None else literal(messages.last, special)
            lines[0] = f"start: {text} (calls | {last} {JSON_RULE})"
            lines.append(f"{JSON_RULE}: {of_json(or_json)}")
        return _joined(lines, self._messages(special), self._arguments(tools, special))

    def calls_amid_content(self, tools: Tools, special: SpecialIds) -> str:
        """Return a grammar of text with calls of `tools`. Raises ValueError if not enforceable."""
        first, messages = self.format.first_of_calls, self.format.messages
        text = rf"/\s*([^\s{re.escape(first)}](?s:.*))?/"
        lines, marked = [f"text: {text}"], list[str]()
        own = {form.mark for form in self.format.forms}
        # A call found by the reader through another mark must also be one of `tools`.
        all_forms = [*self.format.forms, *(f for f in self.format.also_read if f.mark not in own)]
        for number, mark in enumerate(dict.fromkeys(form.mark for form in all_forms)):
            forms = tuple(form.after_mark() for form in all_forms if form.mark == mark)
            lines += self._calls(f"calls_{number}", forms, tools, special)
            if mark:
                lines += free_text(f"text_{number}", mark, special, text)
                marked.append(f"text_{number} calls_{number}")
        if messages is not None:
            start = f"message* (calls_0 | {literal(messages.last, special)} text)"
        else:
            later = f"({' | '.join(marked)})*" if marked else ""
            start = f"{'calls_0?' if first else ''} {later} text"
        lines = [f"start: {start}", *lines]
        return _joined(lines, self._messages(special), self._arguments(tools, special))

    def _messages(self, special: SpecialIds) -> Iterator[str]:
        messages = self.format.messages
        if messages is not None:
            texts = " | ".join(literal(text, special) for text in messages.texts)
            yield f"message: ({texts}) message_text"
            yield from free_text("message_text", messages.text_end, special)

    def _calls(
        self, rule: str, forms: tuple[CallForm, ...], tools: Tools, special: SpecialIds
    ) -> Iterator[str]:
        """Yield the lines of rule `rule`: one or several calls in one of `forms`."""
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

    def _arguments(self, tools: Tools, special: SpecialIds) -> Iterator[str]:
        for number, (tool, schema) in enumerate(tools.items()):
            for index, writer in enumerate(self._writers):
                try:
                    yield from writer.rule(f"arguments_{index}_{number}", schema, special)
                except (AttributeError, TypeError) as error:  # a value has a wrong type
                    raise ValueError(f"{tool!r}: parameters are no JSON schema: {error}") from error

    @property
    def _writers(self) -> list[ArgumentForm]:
        forms = (*self.format.forms, *self.format.also_read)
        return [*dict.fromkeys(form.arguments for form in forms)]


def _joined(*lines: Iterable[str]) -> str:
    """Return a grammar of these lines. Raises ValueError as soon as it is too long.

    The rules of arguments may be many times as long as their schemas, because each repeats common
    definitions.
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

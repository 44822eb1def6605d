"""Arguments written one by one between tags, strings without quotes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sgl_jax.text.formats.argument_schema import ArgumentSchema
from sgl_jax.text.formats.lark import SpecialIds, free_text, literal, of_json
from sgl_jax.text.output_events import Arguments, CallEnded, Content, as_json
from sgl_jax.text.reader import Reading, Unread

_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


class Tags(NamedTuple):
    """The texts before an argument's name, between name and value, and after the value."""

    begin: str
    after_name: str
    end: str

    @property
    def texts(self) -> tuple[str, ...]:
        return self

    def rule(self, name: str, schema: Mapping[str, Any], special: SpecialIds) -> Iterator[str]:
        """The lines of a rule: the properties in their order, without those not required.

        A string is one of its `enum`, or any text; its pattern, format and length are not
        enforced. Raises ValueError for a schema of anything but an object's properties.
        """
        parts = ArgumentSchema.of(schema)
        names = [f"{name}_{number}" for number in range(len(parts.properties))]
        each = (
            rule if key in parts.required else f"{rule}?"
            for rule, key in zip(names, parts.properties, strict=True)
        )
        yield f"{name}: {' '.join(each)}" if names else f'{name}: ""'
        for rule, (key, value) in zip(names, parts.properties.items(), strict=True):
            yield f"{rule}: {literal(self.begin + key + self.after_name, special)} {rule}_value"
            yield from self._value(f"{rule}_value", value, parts.root, special)

    def _value(
        self, rule: str, schema: Any, root: Mapping[str, Any], special: SpecialIds
    ) -> Iterator[str]:
        """An argument's value and the text after it."""
        end = literal(self.end, special)
        if not isinstance(schema, dict):
            schema = {}
        if schema.get("type") != "string":
            yield f"{rule}: {rule}_json {end}"
            yield f"{rule}_json: {of_json({**root, **schema})}"
        elif "enum" in schema or "const" in schema:
            allowed = schema.get("enum", [schema.get("const")])
            texts = [literal(text, special) for text in allowed if isinstance(text, str)]
            yield f"{rule}: ({' | '.join(texts)}) {end}"
        else:
            yield from free_text(rule, self.end, special)


class TaggedArguments:
    """The arguments of one call, handed out as a JSON object as they arrive."""

    def __init__(self, unread: Unread, schema: Mapping[str, Any], tags: Tags) -> None:
        self._unread = unread
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        self._tags = tags
        self._end = tags.end.strip()
        self._has_lines = tags.end.startswith("\n")  # a line end before each value and after it
        self._next = "{"

    def read(self) -> Reading[bool]:
        """Hand out all arguments; returns False if one of them breaks off."""
        unread = self._unread
        name_end, *before_value = self._tags.after_name.split()
        while (yield from unread.skip(self._tags.begin)):
            size = yield from unread.find(name_end)
            if size < 0:
                return False
            name = unread.take(size).strip()
            unread.take(len(name_end))
            for mark in before_value:
                if not (yield from unread.skip(mark)):
                    yield Content(name)
                    return False
            if not (yield from self._read_value(name)):
                return False
        return True

    def close(self) -> Reading[None]:
        """Hand out the end of the object."""
        yield Arguments("{}" if self._next == "{" else "}")
        yield CallEnded()

    def _read_value(self, name: str) -> Reading[bool]:
        """Hand out an argument, a string as it arrives; returns whether its end came."""
        key = f"{self._next}{as_json(name)}: "
        self._next = ", "
        declared = self._properties.get(name)
        if isinstance(declared, dict) and declared.get("type") == "string":
            yield Arguments(key + '"')
            return (yield from self._string())
        size = yield from self._unread.find(self._end)
        if size < 0:
            yield Content(name)
            return False
        yield Arguments(key + _as_value(self._unread.take(size).strip()))
        self._unread.take(len(self._end))
        return True

    def _string(self) -> Reading[bool]:
        unread = self._unread
        if self._has_lines and (yield from unread.begins_with("\n")):
            unread.take(1)
        lead = yield from unread.pass_on(lambda text: Arguments(as_json(text)[1:-1]), [self._end])
        spaces = lead.removesuffix(self._end)
        if self._has_lines:
            spaces = spaces.removesuffix("\n")
        if lead:
            yield Arguments(as_json(spaces)[1:])
        return bool(lead)


def _as_value(text: str) -> str:
    """JSON as it is, Python's constants as JSON's, anything else as a string."""
    try:
        return as_json(json.loads(_PYTHON_CONSTANTS.get(text, text)))
    except (ValueError, RecursionError):
        return as_json(text)

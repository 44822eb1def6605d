"""Arguments written one by one between tags, without quotes: made JSON by their schema."""

import json
from collections.abc import Mapping
from typing import Any

from sgl_jax.text.output_events import Arguments, CallEnded, Content, as_json
from sgl_jax.text.reader import Reading, Unread

_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


class TaggedArguments:
    """The arguments of one call, handed out as a JSON object as they arrive."""

    def __init__(self, unread: Unread, schema: Mapping[str, Any], *, has_lines: bool) -> None:
        """
        Args:
            schema: of the arguments, as the tool declares it.
            has_lines: each value has lines of its own: a line end before it and after it.
        """
        self._unread = unread
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        self._has_lines = has_lines
        self._next = "{"

    def value(self, name: str, end: str) -> Reading[bool]:
        """Hand out the argument `name`, of which the value comes next, up to the tag `end`.

        A string is handed out as it arrives. Returns whether `end` came; if not, and nothing was
        handed out, the name is content.
        """
        key = f"{self._next}{as_json(name)}: "
        self._next = ", "
        if self._is_string(name):
            yield Arguments(key + '"')
            return (yield from self._string(end))
        size = yield from self._unread.find(end)
        if size < 0:
            yield Content(name)
            return False
        yield Arguments(key + _as_value(self._unread.take(size).strip()))
        self._unread.take(len(end))
        return True

    def close(self) -> Reading[None]:
        """Hand out the end of the object."""
        yield Arguments("{}" if self._next == "{" else "}")
        yield CallEnded()

    def _string(self, end: str) -> Reading[bool]:
        unread = self._unread
        if self._has_lines and (yield from unread.begins_with("\n")):
            unread.take(1)
        lead = yield from unread.pass_on(lambda text: Arguments(as_json(text)[1:-1]), [end])
        spaces = lead.removesuffix(end)
        if self._has_lines:
            spaces = spaces.removesuffix("\n")
        if lead:
            yield Arguments(as_json(spaces)[1:])
        return bool(lead)

    def _is_string(self, name: str) -> bool:
        declared = self._properties.get(name)
        return isinstance(declared, dict) and declared.get("type") == "string"


def _as_value(text: str) -> str:
    """JSON as it is, Python's constants as JSON's, anything else as a string."""
    try:
        return as_json(json.loads(_PYTHON_CONSTANTS.get(text, text)))
    except (ValueError, RecursionError):
        return as_json(text)

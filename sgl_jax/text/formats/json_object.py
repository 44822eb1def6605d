"""Reads calls and arguments written as JSON objects."""

import json
import re
from typing import Any

from sgl_jax.text.reader import Arguments, CallBegun, CallEnded, Content, Reading, Unread, as_json

_ARGUMENTS = ("arguments", "parameters")
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){0,256}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class ObjectEnd:
    """Finds the end of the object or list at the beginning of a text, fed piece by piece."""

    def __init__(self, quotes: str = '"', depth: int = 0) -> None:
        """Start at the beginning of the text; `depth` brackets are already open."""
        self._quotes = quotes
        self._depth = depth
        self._quote = ""  # the open quote, if any
        self._is_escaped = False

    def feed(self, piece: str) -> int:
        """Return the characters of `piece` up to and including the end; -1 if it has no end."""
        for index, char in enumerate(piece):
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                if char == "\\":
                    self._is_escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in self._quotes:
                self._quote = char
            elif char in "{[(":
                self._depth += 1
            elif char in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return -1


def find_end(unread: Unread, end: ObjectEnd) -> Reading[int]:
    """Return the number of unread characters through `end`; -1 if the text stops before it."""
    num_seen = 0
    while True:
        size = end.feed(unread.held[num_seen:])
        if size >= 0:
            return num_seen + size
        num_seen = len(unread.held)
        if unread.has_ended:
            return -1
        yield None


def arguments(unread: Unread) -> Reading[bool]:
    """Yield the next object as the arguments of the open call. Return whether it ended."""
    end = ObjectEnd()
    while True:
        size = end.feed(unread.held)
        piece = unread.take(len(unread.held) if size < 0 else size)
        if piece:
            yield Arguments(piece)
        if size >= 0:
            yield CallEnded()
            return True
        if unread.has_ended:
            return False
        yield None


def json_call(unread: Unread, lead: str, known: frozenset[str] | None) -> Reading[bool]:
    """Read a call as an object `{"name": ..., "arguments": {...}}`, or with `parameters`.

    Args:
        lead: the text read before it, which becomes content if no such object comes.
        known: names of tools: an object with another name, or without arguments, is not a call.
            None: any name is valid, and arguments may be missing.

    Returns:
        True if there was a call.
    """
    end, num_seen = ObjectEnd(), 0
    while True:
        start = unread.held.lstrip()
        if start and start[0] != "{":
            break
        head = _HEAD.match(unread.held)
        if head is not None:
            name = _name(head[1])
            if name is None or (known is not None and name not in known):
                break
            unread.take(head.end())
            yield CallBegun(name)
            if (yield from arguments(unread)):
                size = yield from find_end(unread, ObjectEnd(depth=1))
                unread.take(size if size >= 0 else len(unread.held))
            return True
        size = end.feed(unread.held[num_seen:])
        if size >= 0:
            call = _parsed(unread.held[: num_seen + size], may_lack_arguments=known is None)
            if call is None or (known is not None and call[0] not in known):
                break
            unread.take(num_seen + size)
            yield CallBegun(call[0])
            yield Arguments(call[1])
            yield CallEnded()
            return True
        num_seen = len(unread.held)
        if unread.has_ended:
            break
        yield None
    if lead:
        yield Content(lead)
    return False


def _name(text: str) -> str | None:
    try:
        name: str = json.loads(text)
        as_json(name)
    except ValueError:
        return None
    return name


def _parsed(text: str, *, may_lack_arguments: bool) -> tuple[str, str] | None:
    """Return name and arguments of a call; None if `text` is not a call."""
    try:
        call: Any = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        found = [call[name] for name in _ARGUMENTS if call.get(name) is not None]
        given = found[0] if found else ({} if may_lack_arguments else None)
        as_json(call)
        if isinstance(given, str):
            return call["name"], given
        return (call["name"], as_json(given)) if isinstance(given, dict) else None
    except (ValueError, RecursionError):
        return None

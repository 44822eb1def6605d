"""The parts of a model's answer: reasoning, content and tool calls."""

import json
from collections.abc import Iterable
from typing import NamedTuple


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Reasoning that the model wrote before its answer."""

    text: str


class CallBegun(NamedTuple):
    """A call of a tool; its arguments follow. `id` is None unless the format has ids."""

    name: str
    id: str | None = None


class Arguments(NamedTuple):
    """The next piece of the JSON text of the open call's arguments."""

    text: str


class CallEnded(NamedTuple):
    """The arguments are complete. Missing if the answer ends within a call."""


Event = Content | Reasoning | CallBegun | Arguments | CallEnded
_TEXTS = (Content, Reasoning, Arguments)


def joined(events: Iterable[Event]) -> list[Event]:
    """Return the events, with adjacent texts of one kind joined."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, _TEXTS) and isinstance(last, _TEXTS) and type(last) is type(event):
            merged[-1] = last._replace(text=last.text + event.text)
        else:
            merged.append(event)
    return merged


def as_json(value: object) -> str:
    """Return `value` as JSON text. Raises ValueError or TypeError if JSON has no such value.

    Unpaired surrogates, which escapes can write but UTF-8 cannot, are an error too.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text

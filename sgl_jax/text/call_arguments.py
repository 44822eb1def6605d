"""The arguments of earlier calls, as chat templates want them: an object, or its text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


class CallArguments(dict[str, Any]):
    """An object that is its JSON text where a template prints it or adds it to a text.

    Some templates go through the items or write them by `tojson`, others take a text for granted.
    """

    def __init__(self, text: str) -> None:
        """`text`: of a JSON object."""
        super().__init__(json.loads(text))
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __radd__(self, before: str) -> str:
        return before + self._text

    def __add__(self, after: str) -> str:
        return self._text + after


def with_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with the arguments of their calls as `CallArguments`."""
    return [
        {**message, "tool_calls": [_with_arguments(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = CallArguments(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}

"""The arguments of earlier calls, for chat templates: some take objects, some the JSON text.

Most templates go through the items of an object or write it by `tojson`; DeepSeek's, among others,
add the arguments to a text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]


def has_calls(messages: Messages) -> bool:
    return any(message.get("tool_calls") for message in messages)


def with_objects(messages: Messages) -> list[dict[str, Any]]:
    """Parse the JSON text of the arguments of all calls in `messages`."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def are_printed(messages: Messages, prompt: str) -> bool:
    """True if a template that got objects wrote one as Python does: then it needs the text."""
    return any(arguments and repr(arguments) in prompt for arguments in _arguments(messages))


def _arguments(messages: Messages) -> Iterator[Any]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            yield call["function"]["arguments"]


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}

"""Detects how a chat template takes the arguments of calls, and prepares a conversation for it.

Only probe conversations decide, once per template, and never a request: a tool's result may contain
any text.
"""

import copy
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from pydantic_core import from_json

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.surrogates import replace_in_json_text
from sgl_jax.text.reader import as_json

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]

PROBE = {"probe_key": "probe value"}
PROBE_RESULT = "probe result"
_CUT_OFF = '{"probe_key": "probe va'
_DECLARED = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
PROBE_TOOLS = ({"type": "function", "function": _DECLARED},)


class ArgumentUse(msgspec.Struct, frozen=True):
    """The forms of arguments that a template can write.

    Attributes:
        takes_objects: an object is written in the model's notation, by JSON or by tags.
        takes_text: a text is written unchanged.
        writes_json: an object is written as JSON on one line.
    """

    takes_objects: bool = True
    takes_text: bool = False
    writes_json: bool = False

    @classmethod
    def of(cls, render: Render) -> "ArgumentUse":
        """Probe a template. `render` raises `InvalidRequestError` if the template refuses.

        A template that refuses all probes is assumed to take objects, as most templates do.
        """
        by_object, by_text = (_probed(render, each) for each in (PROBE, _CUT_OFF))
        if by_object is by_text is None:
            return cls()
        return cls(
            takes_objects=by_object is not None and repr(PROBE) not in by_object,
            takes_text=by_text is not None and _CUT_OFF in by_text,
            writes_json=by_object is not None and json.dumps(PROBE) in by_object,
        )

    def render(self, messages: Messages, render: Render) -> str:
        """Return the prompt of `messages`, in which calls have their arguments as text.

        Text other than a JSON object, such as the arguments of an incomplete call, is written
        unchanged. A template that writes objects by tags gets the part that can be parsed.
        """
        prepared = copy.deepcopy([*messages])
        substitutes = dict[str, str]()  # JSON written by the template -> its replacement
        for function in functions(prepared):
            function["arguments"] = text = replace_in_json_text(function["arguments"])
            value = _as_object(text)
            if value is not None:
                function["arguments"] = value if self.takes_objects else text
            elif self.writes_json and not self.takes_text:
                stand_in = {uuid.uuid4().hex: ""}
                function["arguments"] = stand_in
                substitutes[json.dumps(stand_in)] = text
            elif self.takes_objects and not self.takes_text:
                function["arguments"] = readable_part(text, has_cut_string=True)
        prompt = render(prepared)
        for written, text in substitutes.items():
            prompt = prompt.replace(written, text)
        return prompt


def functions(messages: Messages) -> Iterator[dict[str, Any]]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            yield call["function"]


def readable_part(text: str, *, has_cut_string: bool) -> dict[str, Any]:
    """Return the members of a possibly incomplete JSON object.

    Text that does not begin an object becomes the only member.

    Args:
        has_cut_string: include the last member if it is an incomplete string.
    """
    try:
        value = from_json(text, allow_partial="trailing-strings" if has_cut_string else True)
        as_json(value)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _as_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in `text`; None if it is not an object that UTF-8 can encode."""
    try:
        value = json.loads(text)
        as_json(value)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def probe_call(arguments: Any) -> list[dict[str, Any]]:
    """Return a question, a call with these arguments, and its result."""
    call = {"name": "probe", "arguments": arguments}
    calls = [{"id": "probe0001", "type": "function", "function": call}]
    return [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "name": "probe", "tool_call_id": "probe0001", "content": PROBE_RESULT},
    ]


def _probed(render: Render, arguments: Any) -> str | None:
    """Render a conversation with one call. Return None if the template refuses it."""
    call = probe_call(arguments)
    for conversation in (call, call[:-1]):
        try:
            return render(conversation)
        except InvalidRequestError:
            continue
    return None

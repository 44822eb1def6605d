"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]`.

Since 2025 `[TOOL_CALLS]f[ARGS]{"a": 1}`, perhaps with an id: `[TOOL_CALLS]f[CALL_ID]b[ARGS]{}`.
"""

import re

from sgl_jax.text.reader import Reading, Unread
from sgl_jax.text.tool_calls.call_grammar import CallForm, CallGrammar
from sgl_jax.text.tool_calls.json_object import headed_call, json_call
from sgl_jax.text.tool_calls.tool_format import ToolFormat, Tools, calls_amid_content

_BEGIN = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*")


def _read(unread: Unread, tools: Tools) -> Reading[None]:
    def calls(lead: str) -> Reading[bool]:
        if not (yield from unread.skip("[")):
            return (yield from headed_call(unread, lead, _HEAD))
        if not (yield from json_call(unread, lead + "[")):
            return False
        while (yield from unread.skip(",")):
            if not (yield from json_call(unread, ",")):
                return False
        yield from unread.close("]")
        return True

    yield from calls_amid_content(unread, _BEGIN, calls)


_LIST = CallForm(
    head='{"name": "',
    after_name='", "arguments": ',
    tail="}",
    between=", ",
    begin=f"{_BEGIN}[",
    end="]",
    mark=_BEGIN,
    names=None,
)
_HEADED = CallForm(head=_BEGIN, after_name="[ARGS]", tail="", between="", mark=_BEGIN)
MISTRAL = ToolFormat(_read, (_BEGIN, "[ARGS]", "[CALL_ID]"), CallGrammar((_LIST, _HEADED)))

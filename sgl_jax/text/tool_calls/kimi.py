"""Kimi K2: `functions.f:0<|tool_call_argument_begin|>{"a": 1}`, in a section.

What stands before the arguments is the call's id.
"""

import re

from sgl_jax.text.reader import Reading, Unread
from sgl_jax.text.tool_calls.call_grammar import CallForm, CallGrammar
from sgl_jax.text.tool_calls.json_object import headed_call
from sgl_jax.text.tool_calls.lark import NUMBER
from sgl_jax.text.tool_calls.tool_format import ToolFormat, Tools, sections_amid_content

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_HEAD = re.compile(
    rf"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*{re.escape(_ARGUMENTS)}\s*"
)


def _read(unread: Unread, tools: Tools) -> Reading[None]:
    def call(lead: str) -> Reading[bool]:
        return (yield from headed_call(unread, lead, _HEAD))

    yield from sections_amid_content(unread, _SECTION, _CALL, call)


_FORM = CallForm(
    head=f"{_CALL[0]}functions.",
    after_name=f":{NUMBER}{_ARGUMENTS}",
    tail=_CALL[1],
    between="",
    begin=_SECTION[0],
    end=_SECTION[1],
    mark=_SECTION[0],
)
KIMI_K2 = ToolFormat(_read, (*_SECTION, *_CALL, _ARGUMENTS), CallGrammar((_FORM,)))

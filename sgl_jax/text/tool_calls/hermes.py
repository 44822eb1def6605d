"""Hermes, Qwen 2.5 and 3: `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`."""

from sgl_jax.text.reader import Reading, Unread
from sgl_jax.text.tool_calls.call_grammar import CallForm, CallGrammar
from sgl_jax.text.tool_calls.json_object import json_call
from sgl_jax.text.tool_calls.tool_format import ToolFormat, Tools, calls_amid_content

_BEGIN, _END = "<tool_call>", "</tool_call>"


def _read(unread: Unread, tools: Tools) -> Reading[None]:
    def call(lead: str) -> Reading[bool]:
        if not (yield from json_call(unread, lead)):
            return False
        yield from unread.close(_END)
        return True

    yield from calls_amid_content(unread, _BEGIN, call)


_FORM = CallForm(
    head=f'{_BEGIN}\n{{"name": "',
    after_name='", "arguments": ',
    tail=f"}}\n{_END}",
    between="\n",
    mark=_BEGIN,
    names=None,
)
HERMES = ToolFormat(_read, (_BEGIN, _END), CallGrammar((_FORM,)))

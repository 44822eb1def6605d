"""Llama 3.1 to 3.3: `{"name": "f", "parameters": {"a": 1}}`, perhaps after `<|python_tag|>`.

Several calls are separated by semicolons. Without the mark, only an object that an answer begins
with, and that names a tool of the request, is a call.
"""

from sgl_jax.text.reader import Reading, Unread
from sgl_jax.text.tool_calls.call_grammar import CallForm, CallGrammar
from sgl_jax.text.tool_calls.json_object import json_call
from sgl_jax.text.tool_calls.tool_format import ToolFormat, Tools, calls_amid_content

_BEGIN = "<|python_tag|>"


def _read(unread: Unread, tools: Tools) -> Reading[None]:
    def calls(lead: str) -> Reading[bool]:
        known = None if lead else frozenset(tools)
        if not (yield from json_call(unread, lead, known)):
            return False
        while (yield from unread.skip(";")):
            if not (yield from json_call(unread, ";")):
                break
        return True

    if (yield from calls("")):
        yield from unread.skip_space()
    yield from calls_amid_content(unread, _BEGIN, calls)


_FORM = CallForm(
    head='{"name": "',
    after_name='", "parameters": ',
    tail="}",
    between=";",
    mark=_BEGIN,
    names=None,
)
LLAMA3 = ToolFormat(_read, (_BEGIN,), CallGrammar((_FORM,), first_of_calls="{;"))

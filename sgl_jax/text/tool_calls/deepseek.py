"""DeepSeek V3 and R1: `function<｜tool▁sep｜>f`, a line end, and the arguments in a block of JSON.

V3.1 writes `f<｜tool▁sep｜>{"a": 1}`. Calls stand in a section.
"""

import re

from sgl_jax.text.reader import Reading, Unread
from sgl_jax.text.tool_calls.call_grammar import CallForm, CallGrammar
from sgl_jax.text.tool_calls.json_object import headed_call
from sgl_jax.text.tool_calls.tool_format import ToolFormat, Tools, sections_amid_content

_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_HEAD = re.compile(
    rf"\s*(?:function{_SEPARATOR}(?=[^<]*\n))?(?P<name>[\w.-]+)\s*(?:{_SEPARATOR}|```json)\s*"
)


def _read(unread: Unread, tools: Tools) -> Reading[None]:
    def call(lead: str) -> Reading[bool]:
        if not (yield from headed_call(unread, lead, _HEAD)):
            return False
        yield from unread.close("```")
        return True

    yield from sections_amid_content(unread, _SECTION, _CALL, call)


_V3_1 = CallForm(
    head=_CALL[0],
    after_name=_SEPARATOR,
    tail=_CALL[1],
    between="",
    begin=_SECTION[0],
    end=_SECTION[1],
    mark=_SECTION[0],
)
_V3 = _V3_1._replace(
    head=f"{_CALL[0]}function{_SEPARATOR}",
    after_name="\n```json\n",
    tail=f"\n```{_CALL[1]}",
    between="\n",
)
DEEPSEEK_V3 = ToolFormat(_read, (*_SECTION, *_CALL, _SEPARATOR), CallGrammar((_V3, _V3_1)))

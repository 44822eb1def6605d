"""Qwen3-Coder, Qwen3.5: a call is `<function=f>` with a `<parameter=a>` for each argument.

All of it stands in `<tool_call>`, and each value has lines of its own.
"""

from sgl_jax.text.output_events import CallBegun, Content
from sgl_jax.text.reader import Reading, Unread
from sgl_jax.text.tool_calls.call_grammar import CallForm, CallGrammar
from sgl_jax.text.tool_calls.tagged_grammar import Tags
from sgl_jax.text.tool_calls.tagged_values import TaggedArguments
from sgl_jax.text.tool_calls.tool_format import ToolFormat, Tools, calls_amid_content

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def _read(unread: Unread, tools: Tools) -> Reading[None]:
    def call(lead: str) -> Reading[bool]:
        if not (yield from unread.skip(_FUNCTION)):
            yield Content(lead)
            return False
        size = yield from unread.find(">")
        name = unread.held[:size].strip() if size >= 0 else ""
        if len(name.split()) != 1:
            yield Content(lead + _FUNCTION)
            return False
        unread.take(size + 1)
        yield CallBegun(name)
        values = TaggedArguments(unread, tools.get(name, {}), has_lines=True)
        while (yield from unread.skip(_PARAMETER)):
            size = yield from unread.find(">")
            if size < 0:
                return False
            parameter = unread.take(size).strip()
            unread.take(1)
            if not (yield from values.value(parameter, _PARAMETER_END)):
                return False
        if not (yield from unread.close(_FUNCTION_END)):
            return False
        yield from values.close()
        yield from unread.close(_END)
        return True

    yield from calls_amid_content(unread, _BEGIN, call)


_FORM = CallForm(
    head=f"{_BEGIN}\n{_FUNCTION}",
    after_name=">\n",
    tail=f"{_FUNCTION_END}\n{_END}",
    between="\n",
    mark=_BEGIN,
    arguments=Tags(_PARAMETER, ">\n", f"\n{_PARAMETER_END}\n").arguments,
)
QWEN3_CODER = ToolFormat(
    _read,
    (_BEGIN, _END, _FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END),
    CallGrammar((_FORM,)),
)

"""GLM 4.5 to 4.7: `<tool_call>f`, then `<arg_key>a</arg_key><arg_value>1</arg_value>` each."""

from sgl_jax.text.output_events import CallBegun, Content
from sgl_jax.text.reader import Reading, Unread
from sgl_jax.text.tool_calls.call_grammar import CallForm, CallGrammar
from sgl_jax.text.tool_calls.tagged_grammar import Tags
from sgl_jax.text.tool_calls.tagged_values import TaggedArguments
from sgl_jax.text.tool_calls.tool_format import ToolFormat, Tools, calls_amid_content

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


def _read(unread: Unread, tools: Tools) -> Reading[None]:
    def call(lead: str) -> Reading[bool]:
        size = yield from unread.find(_KEY, _END)
        name = unread.held[:size].strip() if size >= 0 else ""
        if len(name.split()) != 1:
            yield Content(lead)
            return False
        unread.take(size)
        yield CallBegun(name)
        values = TaggedArguments(unread, tools.get(name, {}), has_lines=False)
        while (yield from unread.skip(_KEY)):
            size = yield from unread.find(_KEY_END)
            if size < 0:
                return False
            key = unread.take(size).strip()
            unread.take(len(_KEY_END))
            if not (yield from unread.skip(_VALUE)):
                yield Content(key)
                return False
            if not (yield from values.value(key, _VALUE_END)):
                return False
        if not (yield from unread.close(_END)):
            return False
        yield from values.close()
        return True

    yield from calls_amid_content(unread, _BEGIN, call)


_FORM = CallForm(
    head=_BEGIN,
    after_name="\n",
    tail=_END,
    between="\n",
    mark=_BEGIN,
    arguments=Tags(_KEY, f"{_KEY_END}\n{_VALUE}", f"{_VALUE_END}\n").arguments,
)
GLM45 = ToolFormat(
    _read,
    (_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END),
    CallGrammar((_FORM,)),
)

"""Tool calls of FunctionGemma and Gemma 4: `call:f{a:1,b:<escape>text<escape>}` between two marks.

Arguments are JSON, except that keys have no quotes and strings are between marks. They are reported
only when the call is complete.
"""

import json
import re
from collections.abc import Iterator

from sgl_jax.core.grammar import SpecialIds
from sgl_jax.text.formats.call_form import CallForm, ToolFormat, Tools
from sgl_jax.text.formats.lark import free_text, literal
from sgl_jax.text.formats.value_grammar import Notation
from sgl_jax.text.reader import Arguments, CallBegun, CallEnded, Content, Reading, Unread, as_json

# Begin of a call -> its end and the mark around strings.
_MARKS = {
    "<start_function_call>": ("<end_function_call>", "<escape>"),
    "<|tool_call>": ("<tool_call|>", '<|"|>'),
}
_NAME = r"[\w.-]+"
_CALL = re.compile(rf"\s*call:({_NAME})(\{{.*\}})\s*", re.DOTALL)
_KEY = re.compile(rf"([{{,]\s*)({_NAME})\s*:")


def _read(unread: Unread, tools: Tools) -> Reading[None]:
    while lead := (yield from unread.pass_on(Content, list(_MARKS))):
        end, quote = _MARKS[lead.lstrip()]
        size = yield from unread.find(end)
        call = _CALL.fullmatch(unread.held[:size]) if size >= 0 else None
        arguments = _as_json(call[2], quote) if call is not None else None
        if call is None or arguments is None:
            yield Content(lead)
            continue
        unread.take(size + len(end))
        yield CallBegun(call[1])
        yield Arguments(arguments)
        yield CallEnded()
        yield from unread.skip_space()


def _as_json(text: str, quote: str) -> str | None:
    outside, inside = text.split(quote)[::2], text.split(quote)[1::2]
    if len(outside) == len(inside):
        return None
    quoted = [_KEY.sub(r'\1"\2":', part) for part in outside]
    strings = [*map(as_json, inside), ""]
    written = "".join(part + string for part, string in zip(quoted, strings, strict=True))
    try:
        return as_json(json.loads(written))
    except (ValueError, RecursionError):
        return None


def _form(begin: str, end: str, quote: str) -> CallForm:
    def strings(rule: str, special: SpecialIds) -> Iterator[str]:
        yield f"{rule}: {literal(quote, special)} {rule}_quoted"
        yield from free_text(f"{rule}_quoted", quote, special)

    notation = Notation(
        string=lambda text: quote + text + quote,
        strings=strings,
        true="true",
        false="false",
        null="null",
        separator=",",
        argument=_key,
        key=_key,
        keys="/[A-Za-z0-9_.-]+:/",
        begin="{",
        end="}",
    )
    return CallForm(
        head=f"{begin}call:",
        after_name="",
        tail=end,
        between="",
        mark=begin,
        arguments=notation,
        names=_NAME,
    )


def _key(name: str) -> str:
    if not re.fullmatch(_NAME, name):
        raise ValueError(f"{name!r}: arguments are {_NAME} in calls of this model's format")
    return f"{name}:"


GEMMA = ToolFormat(
    tuple(_form(begin, end, quote) for begin, (end, quote) in _MARKS.items()), reader=_read
)

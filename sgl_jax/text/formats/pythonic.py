"""Llama 4 and similar: an answer in the form of a list of Python calls, `[f(a=1), g()]`.

Only a list at the beginning of an answer counts, and only if it calls tools of the request. It is
yielded when it is complete.
"""

import ast
import keyword
from collections.abc import Iterator

from sgl_jax.core.grammar import SpecialIds
from sgl_jax.text.formats.call_form import CallForm, ToolFormat, Tools
from sgl_jax.text.formats.json_object import ObjectEnd, find_end
from sgl_jax.text.formats.value_grammar import Notation
from sgl_jax.text.reader import Arguments, CallBegun, CallEnded, Content, Reading, Unread, as_json

_BEGIN, _END = "<|python_start|>", "<|python_end|>"


def _read(unread: Unread, tools: Tools) -> Reading[None]:
    lead = _BEGIN if (yield from unread.skip(_BEGIN)) else ""
    calls: list[tuple[str, str]] = []
    if (yield from unread.comes("[")):
        size = yield from find_end(unread, ObjectEnd(quotes="\"'"))
        calls = _parsed(unread.held[:size], tools) if size >= 0 else []
    if not calls:
        if lead:
            yield Content(lead)
    else:
        unread.take(size)
        for name, arguments in calls:
            yield CallBegun(name)
            yield Arguments(arguments)
            yield CallEnded()
        yield from unread.close(_END)
        yield from unread.skip_space()
    yield from unread.pass_on(Content, [])


def _parsed(text: str, tools: Tools) -> list[tuple[str, str]]:
    """Return name and arguments of each call; empty if `text` is not a list of calls of `tools`."""
    try:
        written = ast.parse(text, mode="eval").body
        nodes = written.elts if isinstance(written, ast.List) else []
        calls = [_call(node) for node in nodes]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return []
    return calls if all(name in tools for name, _ in calls) else []


def _call(node: ast.expr) -> tuple[str, str]:
    """Return name and JSON arguments of a call. Raises ValueError or TypeError for other nodes."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    values = {}
    for argument in node.keywords:
        if argument.arg is None:
            raise ValueError("arguments must have names")
        values[argument.arg] = ast.literal_eval(argument.value)
    return ast.unparse(node.func), as_json(values)


_IDENTIFIER = r"[^\W\d]\w*"


def _argument(name: str) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r}: arguments are Python's names in calls of this model's format")
    return f"{name}="


def _strings(rule: str, special: SpecialIds) -> Iterator[str]:
    """Yield a rule for strings without numeric escapes, which differ between JSON and Python."""
    quotes = (rf"/{q}([^{q}\\\x00-\x1f]|\\[{q}\\nrt])*{q}/" for q in "\"'")
    yield f"{rule}: {' | '.join(quotes)}"


_NOTATION = Notation(
    string=as_json,
    strings=_strings,
    true="True",
    false="False",
    null="None",
    separator=", ",
    argument=_argument,
    key=lambda name: f"{as_json(name)}: ",
    keys=r'/"[^"\\\x00-\x1f]*": /',
)
_LIST = CallForm(
    head="",
    after_name="(",
    tail=")",
    between=", ",
    begin="[",
    end="]",
    arguments=_NOTATION,
    names=rf"{_IDENTIFIER}(\.{_IDENTIFIER})*",
)
_MARKED = _LIST._replace(begin=f"{_BEGIN}[", end=f"]{_END}")
PYTHONIC = ToolFormat((_LIST, _MARKED), first_of_calls="[", reader=_read)

"""gpt-oss's answers: messages on channels; a message to a function is a call.

    <|channel|>analysis<|message|>I need the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>

The channel `analysis` is reasoning; other messages without a recipient are content. The prompt ends
with `<|start|>assistant`, so the first message begins after it.
"""

import re

from sgl_jax.text.formats.call_form import CallForm, Messages, ToolFormat
from sgl_jax.text.formats.json_object import ObjectEnd
from sgl_jax.text.reader import Arguments, CallBegun, CallEnded, Content, Reading, Reasoning, Unread

_START, _MESSAGE, _CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKS = (_START, _MESSAGE, _CHANNEL, *_ENDS, "<|constrain|>")
_FUNCTIONS = "functions."
# An answer ends with its call. Reasoning and a text for the user may come before it.
HARMONY_CALLS = ToolFormat(
    (
        CallForm(
            head=f"{_CHANNEL}commentary to={_FUNCTIONS}",
            after_name=f" <|constrain|>json{_MESSAGE}",
            tail="",
            between=None,
        ),
    ),
    messages=Messages(
        texts=(f"{_CHANNEL}analysis{_MESSAGE}", f"{_CHANNEL}commentary{_MESSAGE}"),
        text_end=f"<|end|>{_START}assistant",
        last=f"{_CHANNEL}final{_MESSAGE}",
    ),
)
_BEGINS = ("assistant", "to=", _CHANNEL)
_HEAD = re.compile(
    r"\s*(?:assistant)?\s*(?:to=(?P<to>[^\s<]+))?\s*<\|channel\|>\s*(?P<channel>\w+)"
    r"(?:\s+to=(?P<also_to>[^\s<]+))?\s*(?:<\|constrain\|>)?\s*\w*\s*"
)


def read_harmony(unread: Unread, *, has_tools: bool, has_reasoning: bool) -> Reading[None]:
    """Read an answer. `has_tools` and `has_reasoning` separate calls and reasoning from content."""
    lead = ""
    while unread.held or not unread.has_ended:
        size = -1
        if (yield from _begins_message(unread)):
            size = yield from unread.find(_MESSAGE)
        head = _HEAD.fullmatch(unread.held[:size]) if size >= 0 else None
        if head is None:
            if lead:
                yield Content(lead)
            lead = yield from unread.pass_on(Content, [_START])
            continue
        unread.take(size + len(_MESSAGE))
        end = yield from _body(unread, head, has_tools=has_tools, has_reasoning=has_reasoning)
        if end != _START and (yield from unread.skip(_START)):
            end = _START
        lead = end if end == _START else ""
        yield from unread.skip_space()


def _body(
    unread: Unread, head: re.Match[str], *, has_tools: bool, has_reasoning: bool
) -> Reading[str]:
    """Yield the text of the message with this `head`, and return the mark that ended it."""
    ends = (*_ENDS, _START)
    to = head["to"] or head["also_to"] or ""
    if has_tools and to.startswith(_FUNCTIONS):
        arguments = ""

        def piece(text: str) -> Arguments:
            nonlocal arguments
            arguments += text
            return Arguments(text)

        yield CallBegun(to.removeprefix(_FUNCTIONS))
        end = yield from unread.pass_on(piece, ends)
        if not arguments.strip():  # the call has no arguments
            yield piece("{}")
        # The mark after the last call of an answer is a stop token, which is not in the text.
        if end or ObjectEnd().feed(arguments) >= 0:
            yield CallEnded()
    else:
        is_reasoning = has_reasoning and head["channel"] == "analysis"
        kind = Reasoning if is_reasoning else Content
        end = yield from unread.pass_on(kind, ends)
    return end.lstrip()


def _begins_message(unread: Unread) -> Reading[bool]:
    for begin in _BEGINS:
        if (yield from unread.comes(begin)):
            return True
    return False

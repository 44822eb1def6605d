"""Reads the calls in an answer by the table of its format."""

import re
from collections.abc import Sequence
from itertools import groupby

from sgl_jax.text.formats.call_form import CallForm, ToolFormat, Tools
from sgl_jax.text.formats.json_object import arguments, json_call
from sgl_jax.text.formats.tags import TaggedArguments, Tags
from sgl_jax.text.reader import CallBegun, Content, Reading, Unread


def read_calls(unread: Unread, tool_format: ToolFormat, tools: Tools) -> Reading[None]:
    """Yield content and calls. Spaces around calls are not content."""
    if tool_format.reader is not None:
        yield from tool_format.reader(unread, tools)
        return
    by_mark = tool_format.by_mark
    if tool_format.first_of_calls:
        forms = [form for alike in by_mark.values() for form in alike]
        if (yield from _calls(unread, forms, tools, "")):
            yield from unread.skip_space()
    while lead := (yield from unread.pass_on(Content, [*by_mark])):
        if (yield from _calls(unread, by_mark[lead.lstrip()], tools, lead)):
            yield from unread.skip_space()


def _calls(unread: Unread, forms: Sequence[CallForm], tools: Tools, lead: str) -> Reading[bool]:
    """Read the calls after a mark. Return whether all text was calls. If no call follows, yield the
    text `lead` read so far as content."""
    for begin, alike in groupby(forms, key=lambda form: form.begin):
        if begin and not (yield from unread.skip(begin)):
            continue
        group = [*alike]
        separator = (group[0].between or "").strip()
        lead += begin
        while (yield from _call(unread, group, tools, lead)):
            if not separator or not (yield from unread.skip(separator)):
                if group[0].end:
                    yield from unread.close(group[0].end)
                return True
            lead = separator
        return False
    yield Content(lead)
    return False


def _call(unread: Unread, forms: Sequence[CallForm], tools: Tools, lead: str) -> Reading[bool]:
    form = forms[0]
    if isinstance(form.arguments, Tags):
        return (yield from _tagged_call(unread, form, form.arguments, tools, lead))
    if form.names is not None:
        return (yield from _headed_call(unread, forms, lead))
    # Without a mark, only an object with a tool's name is a call.
    if not (yield from json_call(unread, lead, None if lead else frozenset(tools))):
        return False
    yield from _close(unread, form.closing_marks)
    return True


def _headed_call(unread: Unread, forms: Sequence[CallForm], lead: str) -> Reading[bool]:
    """Read a call written as a head and the JSON object of its arguments."""
    size = yield from unread.find("{")
    for form in forms if size >= 0 else ():
        head = re.fullmatch(form.head_pattern, unread.held[:size])
        if head is not None:
            unread.take(size)
            yield CallBegun(head["name"], head.groupdict().get("id"))
            yield from arguments(unread)
            yield from _close(unread, form.closing_marks)
            return True
    yield Content(lead)
    return False


def _tagged_call(
    unread: Unread, form: CallForm, tags: Tags, tools: Tools, lead: str
) -> Reading[bool]:
    """Read a call written as a name and its arguments one by one."""
    before, after, (end, *more_ends) = (
        form.head.strip(),
        form.after_name.strip(),
        form.closing_marks,
    )
    if before and not (yield from unread.skip(before)):
        yield Content(lead)
        return False
    size = yield from unread.find(*([after] if after else [tags.begin, end]))
    name = unread.held[:size].strip() if size >= 0 else ""
    if len(name.split()) != 1 or (form.needs_known_name and name not in tools):
        yield Content(lead + before)
        return False
    unread.take(size + len(after))
    yield CallBegun(name)
    values = TaggedArguments(unread, tools.get(name, {}), tags, form.ends)
    if not (yield from values.read()):
        return False
    is_closed = yield from unread.close(end)
    if not is_closed and not (more_ends and (yield from unread.comes(more_ends[0]))):
        return False
    yield from values.close()
    yield from _close(unread, more_ends)
    return True


def _close(unread: Unread, marks: Sequence[str]) -> Reading[None]:
    for mark in marks:
        yield from unread.close(mark)

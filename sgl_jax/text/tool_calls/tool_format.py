"""What a format of tool calls is, and the loops that formats share."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sgl_jax.text.output_events import Content
from sgl_jax.text.reader import Reading, Unread
from sgl_jax.text.tool_calls.call_grammar import CallGrammar

# The name of each tool that the model was told of -> the JSON schema of its arguments.
Tools = Mapping[str, Mapping[str, Any]]


class ToolFormat(NamedTuple):
    """How a model writes calls.

    read: the generator that reads an answer, from after its reasoning.
    marks: texts of the tokens that it reads, special ones among them.
    grammar: of its calls.
    """

    read: Callable[[Unread, Tools], Reading[None]]
    marks: tuple[str, ...]
    grammar: CallGrammar


def calls_amid_content(
    unread: Unread, mark: str, read_call: Callable[[str], Reading[bool]]
) -> Reading[None]:
    """Content up to each `mark`, and what `read_call` makes of what follows.

    `read_call` gets what was read of the mark, which it hands out as content if no call follows,
    and returns whether one did. Spaces around calls are no content.
    """
    while lead := (yield from unread.pass_on(Content, [mark])):
        if (yield from read_call(lead)):
            yield from unread.skip_space()


def sections_amid_content(
    unread: Unread,
    section: tuple[str, str],
    call: tuple[str, str],
    read_call: Callable[[str], Reading[bool]],
) -> Reading[None]:
    """As `calls_amid_content`, where calls stand in sections.

    Args:
        section, call: the marks before and after each.
    """

    def read_section(lead: str) -> Reading[bool]:
        if not (yield from unread.skip(call[0])):
            yield Content(lead)
            return False
        lead += call[0]
        while (yield from read_call(lead)):
            yield from unread.close(call[1])
            if not (yield from unread.skip(call[0])):
                yield from unread.close(section[1])
                return True
            lead = call[0]
        return False

    yield from calls_amid_content(unread, section[0], read_section)

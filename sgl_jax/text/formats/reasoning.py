"""Formats of reasoning: text between two marks at the beginning of an answer."""

from collections.abc import Sequence
from typing import NamedTuple

from sgl_jax.text.reader import Reading, Reasoning, Unread


class ReasoningFormat(NamedTuple):
    """The opening and closing marks of reasoning: `pairs` has a pair for each way to write it."""

    pairs: tuple[tuple[str, str], ...]

    def marks_after(self, prompt_tail: str) -> tuple[str, str] | None:
        """Return the marks of the reasoning at the beginning of an answer to this prompt.

        The opening mark is "" if the prompt ends with it. None: the prompt closed the reasoning.
        """
        tail = prompt_tail.rstrip()
        for opening, closing in self.pairs:
            if tail.endswith(closing):
                return None
            if tail.endswith(opening):
                return "", closing
        return self.pairs[0]

    def read(self, unread: Unread, prompt_tail: str, call_marks: Sequence[str]) -> Reading[bool]:
        """Read reasoning, if any, and leave the rest of the answer unread.

        Args:
            prompt_tail: the last characters of the prompt. Many chat templates open the reasoning,
                or close an empty one, before the answer begins.
            call_marks: the marks before calls, which are part of the reasoning if its end comes
                later.

        Returns:
            True if all of the answer has arrived and the reasoning has no end. Then the rest, from
            the first of `call_marks`, is reasoning up to the first call.
        """
        tail = prompt_tail.rstrip()
        for opening, closing in self.pairs:
            if tail.endswith(closing):
                return False
            if tail.endswith(opening) or (yield from unread.comes(opening)):
                yield from unread.skip(opening)  # may repeat the end of the prompt
                yield from unread.skip_space()
                lead = yield from unread.pass_on(Reasoning, [closing, *call_marks])
                if lead.lstrip() != closing:
                    unread.held = lead + unread.held
                    if (yield from unread.find(closing)) < 0:
                        return True
                    yield from unread.pass_on(Reasoning, [closing])
                yield from unread.skip_space()
                return False
        return False


_THINK = ("<think>", "</think>")

REASONING_FORMATS = {
    "qwen3": ReasoningFormat((_THINK,)),
    "deepseek-r1": ReasoningFormat((_THINK,)),
    "kimi": ReasoningFormat((("◁think▷", "◁/think▷"), _THINK)),
    "glm45": ReasoningFormat((_THINK,)),
}

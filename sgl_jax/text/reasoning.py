"""Formats of reasoning: text between two marks at the beginning of an answer."""

from typing import NamedTuple

from sgl_jax.text.output_events import Reasoning
from sgl_jax.text.reader import Reading, Unread


class ReasoningFormat(NamedTuple):
    """Reasoning stands between an opening and a closing mark, of which there may be several kinds.

    is_always_there: the answer begins amid the reasoning even if nothing opened it.
    """

    marks: tuple[tuple[str, str], ...]
    is_always_there: bool = False

    def read(self, unread: Unread, prompt_tail: str) -> Reading[None]:
        """Read reasoning if there is any, and leave the rest of the answer unread.

        Args:
            prompt_tail: the last characters of the prompt: chat templates may open the reasoning,
                or close an empty one, before the answer begins.
        """
        tail = prompt_tail.rstrip()
        for opening, closing in self.marks:
            if tail.endswith(closing):
                return
            if tail.endswith(opening) or (yield from unread.comes(opening)):
                yield from self._reasoning(unread, opening, closing)
                return
        if self.is_always_there:
            yield from self._reasoning(unread, *self.marks[0])

    def _reasoning(self, unread: Unread, opening: str, closing: str) -> Reading[None]:
        yield from unread.skip(opening)  # it may repeat what the prompt ends with
        yield from unread.skip_space()
        yield from unread.pass_on(Reasoning, [closing])
        yield from unread.skip_space()


_THINK = ("<think>", "</think>")

REASONING_FORMATS = {
    "qwen3": ReasoningFormat((_THINK,)),
    "deepseek-r1": ReasoningFormat((_THINK,), is_always_there=True),
    "kimi": ReasoningFormat((("◁think▷", "◁/think▷"), _THINK)),
    "glm45": ReasoningFormat((_THINK,)),
}

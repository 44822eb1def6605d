"""Chooses the formats of a model's answers, and creates a reader for each answer.

Flags name the formats; "auto" detects them by characteristic texts in the chat template.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sgl_jax.text.formats.call_form import Tools
from sgl_jax.text.formats.call_grammar import CallGrammar
from sgl_jax.text.formats.call_reader import read_calls
from sgl_jax.text.formats.harmony import HARMONY_CALLS, HARMONY_MARKS, read_harmony
from sgl_jax.text.formats.tool_formats import TOOL_FORMATS
from sgl_jax.text.reader import AnswerReader, CallBegun, Content, Reading, Reasoning, Unread


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
HARMONY = "gpt-oss"  # a format of both: it reads reasoning and calls

# A template with all of these texts writes calls, or reasoning, in this format. The first match
# counts.
_TOOL_SIGNS = (
    (HARMONY, ("<|start|>", "<|channel|>", "<|message|>")),
    ("deepseekv3", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("glm45", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("gemma", ("<start_function_call>",)),
    ("gemma", ("<|tool_call>", "<tool_call|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ("<|python_tag|>", "parameters", "<|start_header_id|>")),
    ("hermes", ("<tool_call>", "</tool_call>", "name", "arguments")),
)
_REASONING_SIGNS = (
    (HARMONY, ("<|start|>", "<|channel|>", "<|message|>")),
    ("kimi", ("◁think▷",)),
    ("kimi", ("<think>", "<|im_middle|>")),
    ("deepseek-r1", ("<｜Assistant｜>", "<think>")),
    ("glm45", ("<think>", "[gMASK]")),
    ("qwen3", ("<think>", "</think>", "<|im_start|>")),
)


class AnswerParser(NamedTuple):
    """The formats of one model's answers; None if that kind of text stays content."""

    tool_format: str | None = None
    reasoning_format: str | None = None

    @property
    def is_harmony(self) -> bool:
        return HARMONY in self

    def marks(self, *, has_tools: bool, has_reasoning: bool) -> frozenset[str]:
        """Return texts of tokens that must stay in the text for a `reader`, even if special."""
        marks: list[str] = [*HARMONY_MARKS] if self.is_harmony else []
        if has_tools and self.tool_format in TOOL_FORMATS:
            marks += TOOL_FORMATS[self.tool_format].marks
        if has_reasoning and self.reasoning_format in REASONING_FORMATS:
            pairs = REASONING_FORMATS[self.reasoning_format].pairs
            marks += [mark for pair in pairs for mark in pair]
        return frozenset(marks)

    @property
    def reads_calls(self) -> bool:
        return self.tool_format is not None or self.is_harmony

    @property
    def call_grammar(self) -> CallGrammar | None:
        """Return the grammar of tool calls; None if their format is unknown."""
        if self.is_harmony:
            return CallGrammar(HARMONY_CALLS)
        return CallGrammar(TOOL_FORMATS[self.tool_format]) if self.tool_format else None

    def reasoning_after(self, prompt_tail: str) -> tuple[str, str] | None:
        """Return the marks of reasoning at the beginning of an answer to this prompt, or None."""
        if self.reasoning_format not in REASONING_FORMATS:
            return None
        return REASONING_FORMATS[self.reasoning_format].marks_after(prompt_tail)

    def call_id(self, digits: str) -> str:
        """Return a call's id from hexadecimal `digits`, in the chat template's form."""
        form = TOOL_FORMATS.get(self.tool_format or "")
        return digits[:9] if form and form.has_short_ids else f"call_{digits[:24]}"

    def reader(self, tools: Tools | None, prompt_tail: str, *, has_reasoning: bool) -> AnswerReader:
        """Return the reader of one answer.

        Args:
            tools: the tools in the prompt; None: calls are content.
            prompt_tail: the last characters of the prompt, including special tokens.
            has_reasoning: separate reasoning from content.
        """

        def read(unread: Unread) -> Reading[None]:
            if self.is_harmony:
                yield from read_harmony(
                    unread, has_tools=tools is not None, has_reasoning=has_reasoning
                )
                return
            has_calls = tools is not None and self.tool_format is not None
            calls = TOOL_FORMATS[self.tool_format or ""] if has_calls else None
            is_open = False
            if has_reasoning and self.reasoning_format is not None:
                marks = [] if calls is None else [mark for mark in calls.by_mark if mark]
                reasoning = REASONING_FORMATS[self.reasoning_format]
                is_open = yield from reasoning.read(unread, prompt_tail, marks)
            if calls is not None and tools is not None:
                events = read_calls(unread, calls, tools)
                yield from _reasoning_before_calls(events) if is_open else events
            yield from unread.pass_on(Content, [])

        return AnswerReader(read)


def _reasoning_before_calls(events: Reading[None]) -> Reading[None]:
    has_begun = False
    for event in events:
        has_begun = has_begun or isinstance(event, CallBegun)
        if isinstance(event, Content) and not has_begun:
            yield Reasoning(event.text)
        else:
            yield event


def choose_parser(tool_format: str, reasoning_format: str, template: str) -> AnswerParser:
    """Return the formats of these names; "none" means no format, "auto" the format in `template`.

    Raises:
        ValueError: gpt-oss's format, which covers both kinds, is combined with another format.
    """
    tool = _chosen(tool_format, _TOOL_SIGNS, template)
    reasoning = _chosen(reasoning_format, _REASONING_SIGNS, template)
    if HARMONY in (tool, reasoning):
        other = {tool, reasoning} - {HARMONY, None}
        if other:
            raise ValueError(
                f"the format {HARMONY} is one of tool calls and reasoning, and cannot be used "
                f"beside {other.pop()}: name it for both"
            )
    return AnswerParser(tool, reasoning)


def _chosen(name: str, signs: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str | None:
    if name != "auto":
        return None if name == "none" else name
    return next((name for name, texts in signs if all(text in template for text in texts)), None)

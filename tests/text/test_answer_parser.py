"""Reasoning and tool calls are found in every format, however the text is cut."""

import dataclasses
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.text.answer_parser import HARMONY, REASONING_FORMATS, AnswerParser, choose_parser
from sgl_jax.text.formats.tool_formats import TOOL_FORMATS
from sgl_jax.text.reader import (
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
)
from tests.text.recorded_answers import ANSWERS, PARIS, TOOLS, Answer, joined

PARSERS = [AnswerParser(tool, None) for tool in TOOL_FORMATS]
PARSERS += [AnswerParser(None, reasoning) for reasoning in REASONING_FORMATS]
PARSERS += [AnswerParser("qwen25", "qwen3"), AnswerParser(HARMONY, HARMONY)]
EVERYTHING = {"has_tools": True, "has_reasoning": True}
MARKS = sorted({mark for parser in PARSERS for mark in parser.marks(**EVERYTHING)})
# What calls are made of beside marks.
SHREDS = [
    *("call:now{", "functions.now:0", "function", "get_weather", "[now()", "to=functions.now "),
    *('{"name": "now", "arguments": ', PARIS, "{", "}", "]", "[", '"', "\\", "'", "{}", ";", ","),
    *("analysis", "assistant", "final", "<function=now>", "<parameter=city>", "x", "é", " ", "\n"),
]


def read(parser: AnswerParser, pieces: list[str], tail: str = "") -> list[Event]:
    reader = parser.reader(TOOLS, tail, has_reasoning=True)
    events = [event for piece in pieces for event in reader.feed(piece)]
    return joined([*events, *reader.feed("", is_last=True)])


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def shown(events: list[Event]) -> str:
    """All text that is in the events."""
    return "".join(
        event.name if isinstance(event, CallBegun) else event.text
        for event in events
        if not isinstance(event, CallEnded)
    )


def content(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_recorded_answer_is_understood(answer: Answer) -> None:
    parser = AnswerParser(answer.tool, answer.reasoning)
    assert read(parser, [answer.text], answer.prompt_tail) == answer.events
    assert read(parser, list(answer.text), answer.prompt_tail) == answer.events


@pytest.mark.parametrize("parser", PARSERS, ids=str)
@given(
    shreds=st.lists(st.sampled_from([*MARKS, *SHREDS]), max_size=14),
    places=st.lists(st.integers(0, 400), max_size=8),
)
def test_events_do_not_depend_on_cuts(
    parser: AnswerParser, shreds: list[str], places: list[int]
) -> None:
    text = "".join(shreds)
    events = read(parser, [text])
    assert read(parser, cut(text, places)) == events
    assert read(parser, list(text)) == events


@pytest.mark.parametrize("parser", PARSERS, ids=str)
@example(marks=["<tool_call>", "<arg_key>", "</arg_key>"])
@example(marks=["<tool_call>", "<arg_key>", "</arg_key><arg_value>"])
@example(marks=["<tool_call><function=", "><parameter=", ">"])
@given(marks=st.lists(st.sampled_from(MARKS), max_size=14))
def test_nothing_between_marks_is_lost(parser: AnswerParser, marks: list[str]) -> None:
    words = [f"{{w{number}}}" for number in range(len(marks))]
    text = "".join(mark + word for mark, word in zip(marks, words, strict=True))
    events = read(parser, [text])
    assert [word for word in words if word not in shown(events)] == []
    if not parser.is_harmony and all(isinstance(event, Content) for event in events):
        assert shown(events) == text


@given(
    parser=st.sampled_from(PARSERS),
    answer=st.sampled_from(list(ANSWERS.values())),
    places=st.lists(st.integers(0, 400), min_size=1, max_size=8),
)
def test_any_answer_cut_off_anywhere_is_read_by_any_parser(
    parser: AnswerParser, answer: Answer, places: list[int]
) -> None:
    pieces = cut(answer.text, places)[:-1]
    events = read(parser, pieces, answer.prompt_tail)
    assert events == read(parser, ["".join(pieces)], answer.prompt_tail)
    begun = [event for event in events if isinstance(event, CallBegun)]
    assert len(begun) - events.count(CallEnded()) in (0, 1)


@pytest.mark.parametrize("name", [name for name in ANSWERS if CallEnded() in ANSWERS[name].events])
def test_what_ends_a_call_is_no_content_even_if_it_is_cut_off(name: str) -> None:
    answer = ANSWERS[name]
    parser, tail = AnswerParser(answer.tool, answer.reasoning), answer.prompt_tail
    reader = parser.reader(TOOLS, tail, has_reasoning=True)
    num_chars, num_open = 0, answer.events.count(CallEnded())
    while num_open and num_chars < len(answer.text):
        num_open -= reader.feed(answer.text[num_chars]).count(CallEnded())
        num_chars += 1
    for end in range(num_chars, len(answer.text)):
        assert content(answer.events).startswith(content(read(parser, [answer.text[:end]], tail)))


@pytest.mark.parametrize(
    ("tool", "tag"), [("qwen3_coder", "</function>"), ("glm45", "</tool_call>")]
)
def test_a_tag_that_would_end_a_call_is_no_content_if_it_is_cut_off(tool: str, tag: str) -> None:
    text, reasoning = ANSWERS[tool].text, ANSWERS[tool].reasoning
    events = read(AnswerParser(tool, reasoning), [text[: text.index(tag) + 4]])
    assert "</" not in content(events)


def test_a_call_of_gpt_oss_has_ended_when_its_arguments_have() -> None:
    head = "<|channel|>commentary to=functions.now<|message|>"
    for arguments, has_ended in {'{"a": ': False, '{"a": 1}': True, "": True}.items():
        events = read(AnswerParser(HARMONY, HARMONY), [head + arguments])
        assert (CallEnded() in events) == has_ended, arguments


@given(
    parser=st.sampled_from(PARSERS),
    text=st.text(st.characters(exclude_characters="<[{◁"), max_size=40),
)
def test_plain_text_is_content(parser: AnswerParser, text: str) -> None:
    plain = f"I say {text}"
    assert read(parser, list(plain)) == [Content(plain)]


def test_arguments_are_handed_out_as_they_arrive() -> None:
    for name in ("hermes", "qwen3_coder", "mistral since 2025", "kimi_k2", "glm45", "gpt-oss"):
        answer = ANSWERS[name]
        reader = AnswerParser(answer.tool, answer.reasoning).reader(TOOLS, "", has_reasoning=True)
        until = answer.text.index("Par") + 2
        events = joined(reader.feed(answer.text[:until]))
        assert isinstance(events[-1], Arguments), name
        assert events[-1].text.endswith("Pa"), name


def test_content_comes_at_once_unless_it_may_be_a_mark() -> None:
    reader = AnswerParser("hermes").reader(TOOLS, "", has_reasoning=True)
    assert reader.feed("one ") == [Content("one")]
    assert reader.feed("two <tool") == [Content(" two")]
    assert reader.feed("box>") == [Content(" <toolbox>")]


def test_untyped_values_are_json_where_they_can_be() -> None:
    text = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in {"a": "True", "b": "[1, {}]", "c": "NaN", "d": "it is", "e": "7"}.items()
    )
    events = read(AnswerParser("glm45"), [f"<tool_call>f{text}</tool_call>"])
    assert isinstance(events[1], Arguments)
    values = json.loads(events[1].text)
    assert values == {"a": True, "b": [1, {}], "c": "NaN", "d": "it is", "e": 7}


def test_without_tools_calls_are_content_and_without_reasoning_thoughts_are() -> None:
    answer = ANSWERS["hermes, arguments first"]
    reader = AnswerParser("hermes", "qwen3").reader(None, "", has_reasoning=False)
    assert joined(reader.feed(answer.text, is_last=True)) == [Content(answer.text)]


def test_formats_are_chosen_by_the_template_only_where_it_says_them() -> None:
    chatml = "<|im_start|>{{ message.role }}"
    hermes = chatml + '<tool_call>\n{\\"name\\": {{ name }}, \\"arguments\\": }\n</tool_call>'
    thinking = "<think>\n\n</think>\n\n"
    coder = chatml + "<tool_call>\n<function=f>\n<parameter=arguments>\n</tool_call>"
    deepseek = "<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>"
    kimi = "<|im_middle|><think></think><|tool_calls_section_begin|><|tool_call_argument_begin|>"
    assert choose_parser("auto", "auto", chatml) == AnswerParser(None, None)
    assert choose_parser("auto", "auto", hermes) == AnswerParser("hermes", None)
    assert choose_parser("auto", "auto", hermes + thinking) == AnswerParser("hermes", "qwen3")
    assert choose_parser("none", "glm45", hermes) == AnswerParser(None, "glm45")
    assert choose_parser("auto", "auto", coder) == AnswerParser("qwen3_coder", None)
    assert choose_parser("auto", "auto", deepseek) == AnswerParser("deepseekv3", None)
    found = choose_parser("auto", "auto", deepseek + "<think>")
    assert found == AnswerParser("deepseekv3", "deepseek-r1")
    assert choose_parser("auto", "auto", kimi) == AnswerParser("kimi_k2", "kimi")
    harmony = "<|start|>assistant<|channel|>final<|message|>"
    assert choose_parser("auto", "auto", harmony) == AnswerParser(HARMONY, HARMONY)


def test_each_flag_offers_every_format() -> None:
    fields = {field.name: field for field in dataclasses.fields(ServerArgs)}
    general = {"auto", "none", HARMONY}
    offered = set(fields["tool_call_parser"].metadata["choices"])
    assert offered == {*TOOL_FORMATS, *general}
    offered = set(fields["reasoning_parser"].metadata["choices"])
    assert offered == {*REASONING_FORMATS, *general}


def test_gpt_oss_is_a_format_of_both_kinds() -> None:
    assert choose_parser(HARMONY, "none", "").is_harmony
    with pytest.raises(ValueError, match="cannot be used beside qwen3"):
        choose_parser(HARMONY, "qwen3", "")

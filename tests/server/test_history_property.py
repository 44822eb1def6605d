"""Any answer, cut off anywhere, is history for every API, and is written again up to the cut.

Each tool format has a template that writes messages as the model does. So the answer that is drawn
is written by the template, and must be read from it and written again. Where prompts are plain
text, the answer is the beginning of a prompt with the same tokens.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.surrogates import REPLACEMENT
from sgl_jax.text.formats.json_object import ObjectEnd
from sgl_jax.text.formats.tags import TaggedArguments
from sgl_jax.text.reader import Unread
from sgl_jax.text.stop_strings import StopStringChecker
from tests.server.conftest import Rig, prompt_of, save_tools_model, served, text_workers
from tests.server.test_histories import (
    CHAT,
    FORMS,
    MESSAGES,
    QUESTION,
    RESPONSES,
    as_chat,
    body_of,
    own_part,
    post,
)
from tests.support.long import long, long_but

ROOM = 100_000  # tokens of a request
COMPLETIONS, GENERATE = "/v1/completions", "/generate"
THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
VALUES = "{{ value if value is string else value | tojson }}"


class Form(NamedTuple):
    tool: str
    reasoning: str
    message: str  # as the model writes it


FORMATS = {
    "hermes": Form(
        "hermes",
        "qwen3",
        THINK + "{{ m.content }}" + CALLS + '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": '
        "{{ f.arguments | tojson }}}\n</tool_call>{% endfor %}",
    ),
    "qwen3_coder": Form(
        "qwen3_coder",
        "qwen3",
        THINK + "{{ m.content }}" + CALLS + "\n<tool_call>\n<function={{ f.name }}>\n"
        "{% for key, value in f.arguments | items %}<parameter={{ key }}>\n"
        + VALUES
        + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    ),
    "glm45": Form(
        "glm45",
        "glm45",
        THINK + "{{ m.content }}" + CALLS + "\n<tool_call>{{ f.name }}\n"
        "{% for key, value in f.arguments.items() %}<arg_key>{{ key }}</arg_key>\n<arg_value>"
        + VALUES
        + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    ),
    "llama3": Form(
        "llama3",
        "none",
        "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
        + CALLS
        + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
        "{{ '; ' if not loop.last }}{% endfor %}",
    ),
    "mistral": Form(
        "mistral",
        "none",
        "{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS]["
        + CALLS
        + '{"name": "{{ f.name }}", "arguments": {{ f.arguments if f.arguments is string else '
        "f.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]{% endif %}",
    ),
    "deepseekv3": Form(
        "deepseekv3",
        "deepseek-r1",
        THINK
        + "{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        + CALLS
        + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
        "{{ '' + f.arguments }}\n"
        "```<｜tool▁call▁end｜>{{ '\n' if not loop.last }}{% endfor %}"
        "<｜tool▁calls▁end｜>{% endif %}",
    ),
    "kimi_k2": Form(
        "kimi_k2",
        "kimi",
        THINK
        + "{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>"
        + CALLS
        + "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ f.arguments if f.arguments is string else f.arguments | tojson }}<|tool_call_end|>"
        "{% endfor %}<|tool_calls_section_end|>{% endif %}",
    ),
    "pythonic": Form(
        "pythonic",
        "none",
        "{% if not m.tool_calls %}{{ m.content }}{% else %}[" + CALLS + "{{ f.name }}("
        "{% for key, value in f.arguments.items() %}{{ key }}={{ value | tojson }}"
        "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
        "{% endif %}",
    ),
    "gemma": Form(
        "gemma",
        "none",
        "{{ m.content }}" + CALLS + "<start_function_call>call:{{ f.name }}{{ '{' }}"
        "{% for key, value in f.arguments.items() %}{{ key }}:"
        "{{ '<escape>' ~ value ~ '<escape>' if value is string else value | tojson }}"
        "{{ ',' if not loop.last }}{% endfor %}}<end_function_call>{% endfor %}",
    ),
    "gpt-oss": Form(
        "gpt-oss",
        "gpt-oss",
        "{% if m.reasoning_content %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>"
        "<|start|>assistant{% endif %}{% if m.tool_calls %}" + CALLS + "<|channel|>commentary "
        "to=functions.{{ f.name }} <|constrain|>json<|message|>{{ f.arguments | tojson }}<|call|>"
        "{{ '<|start|>assistant' if not loop.last }}{% endfor %}{% else %}"
        "<|channel|>final<|message|>{{ m.content }}{% endif %}",
    ),
}
# Their answers have heads of messages, which are read as content if they are cut off.
WITHOUT_PREFIX = ("gpt-oss",)
KEYS = [f"<arg_key>{key}</arg_key><arg_value>" for key in ("city", "days")]
# Their answers are either calls or text.
EITHER = ("llama3", "pythonic", "gpt-oss")
SHELL = (
    "{{ messages[0].content }}</s>{% for m in messages[1:] %}{% if m.role == 'assistant' %}"
    "MESSAGE</s>{% else %}<|{{ m.role }}|>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if tools %}{% endif %}"
)

WORDS = st.text(st.characters(codec="utf-8", categories=("L", "N")) | st.sampled_from("é, .\n!'"))
TEXTS = st.builds(lambda first, text: f"{first}{text}".strip(), st.sampled_from("Iaé"), WORDS)
STRINGS = TEXTS | st.sampled_from(
    ["", "12", "null", 'a "b" \\ {c}', "</function> x", "<parameter=x>", "}", "[1]", "'", "```"]
)
ARGUMENTS = st.fixed_dictionaries({"city": STRINGS}, optional={"days": st.integers(-9, 999)})
DRAWN_CALLS = st.lists(
    st.tuples(st.just("get_weather"), ARGUMENTS) | st.just(("now", {})), max_size=3
)
MESSAGES_DRAWN = st.tuples(TEXTS | st.just(""), TEXTS, DRAWN_CALLS)


class Case(NamedTuple):
    """The parts of a message: reasoning, content, calls; and how it is cut off.

    cut: the limit of tokens, as a share of the message and its end.
    stop: the place of a stop string in the message, as a share of it, and its size.
    """

    parts: tuple[str, str, list[tuple[str, dict[str, Any]]]]
    cut: float
    stop: tuple[float, int] | None
    route: str

    def message(self, name: str) -> dict[str, Any]:
        thought, said, drawn = self.parts
        calls = [
            {"id": "x", "type": "function", "function": {"name": tool, "arguments": arguments}}
            for tool, arguments in drawn
        ]
        thought = thought if FORMATS[name].reasoning != "none" else ""
        said = "" if name in EITHER and calls else said
        return {"content": said, "reasoning_content": thought, "tool_calls": calls}

    def limit(self, num_tokens: int) -> int:
        return max(1, min(num_tokens + 1, round(self.cut * (num_tokens + 1))))

    def stop_in(self, text: str) -> str | None:
        if self.stop is None or self.route == RESPONSES:  # which has none
            return None
        start = int(self.stop[0] * (len(text) - 1))
        return text[start : start + self.stop[1]]


CASES = st.builds(
    Case,
    MESSAGES_DRAWN,
    st.just(1.0) | st.floats(0, 1),
    st.none() | st.tuples(st.floats(0, 1), st.integers(1, 8)),
    st.sampled_from([CHAT, RESPONSES, MESSAGES, COMPLETIONS, GENERATE]),
)


def written(name: str, message: dict[str, Any]) -> str:
    """The message as the model writes it."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    calls = message["tool_calls"]
    if name == "deepseekv3":
        calls = [
            {"function": f | {"arguments": json.dumps(f["arguments"], ensure_ascii=False)}}
            for f in (call["function"] for call in calls)
        ]
    text = environment.from_string(FORMATS[name].message).render(m={**message, "tool_calls": calls})
    return str(text)


@contextmanager
def formatted(name: str, folder: Path) -> Iterator[tuple[Rig, Callable[..., Any]]]:
    """A server of a model that writes this format, and a way to run its coroutines."""
    save_tools_model(folder, SHELL.replace("MESSAGE", FORMATS[name].message))
    with start_blocking_portal() as portal:
        tool, reasoning = FORMATS[name].tool, FORMATS[name].reasoning
        server = served(folder, tool, reasoning, max_request_tokens=ROOM)
        with portal.wrap_async_context_manager(server) as (rig, _):
            yield rig, portal.call
    text_workers(folder).close()


async def check(rig: Rig, name: str, case: Case) -> None:
    message = case.message(name)
    text = written(name, message)
    tokenizer = rig.front.tokenizer
    tokens = tokenizer.encode(text)
    limit, stop = case.limit(len(tokens)), case.stop_in(text)
    cut = tokenizer.decode(tokens[:limit], skip_special_tokens=False)
    is_stopped = stop is not None and stop in cut
    cut = cut.partition(stop)[0] if is_stopped else cut.rstrip(REPLACEMENT)
    if case.route in (COMPLETIONS, GENERATE):
        await check_text(rig, case.route, text, tokens, cut, limit, stop)
        return
    asked = {"role": "user", "content": text}
    stops = {} if stop is None else {"stop_sequences" if case.route == MESSAGES else "stop": [stop]}
    answer = await post(rig, case.route, [asked], limit, **stops)
    own = own_part(case.route, answer)
    streamed = await streamed_part(rig, case.route, [asked], limit, **stops)
    assert without_ids(streamed) == without_ids(own)
    if limit > len(tokens) and not is_stopped:
        assert_same(as_chat(case.route, answer), message)
    for route, form in FORMS.items():
        if route != case.route:
            await post(rig, route, [asked, *form(as_chat(case.route, answer)), QUESTION])
    rig.engine.seen.clear()
    await post(rig, case.route, [asked, *own, QUESTION])
    if case.route != MESSAGES and name not in WITHOUT_PREFIX:
        assert_written_up_to(cut, prompt_of(rig), as_chat(case.route, answer), message)


async def check_text(
    rig: Rig,
    route: str,
    text: str,
    tokens: list[int],
    cut: str,
    limit: int,
    stop: str | None,
) -> None:
    """The answer is the text up to the cut, and a prompt of the same tokens but for a cut word."""
    sampling = {"stop": [stop] if stop is not None else [], "skip_special_tokens": False}
    if route == COMPLETIONS:
        body = {"prompt": text + "</s>", "max_tokens": limit, **sampling}
    else:
        body = {"text": text + "</s>", "sampling_params": {"max_new_tokens": limit, **sampling}}
    whole = await rig.http.post(route, json=body)
    streamed = await rig.http.post(route, json=body | {"stream": True})
    assert (whole.status_code, streamed.status_code) == (200, 200), (whole.text, streamed.text)
    events = [json.loads(line[6:]) for line in streamed.text.split("\n") if line[6:7] == "{"]
    if route == COMPLETIONS:
        answer = whole.json()["choices"][0]["text"]
        assert "".join(event["choices"][0]["text"] for event in events) == answer
    else:
        answer = whole.json()["text"]
        assert events[-1]["text"] == answer
    assert answer.rstrip(REPLACEMENT) == cut
    if not cut:
        return
    rig.engine.seen.clear()
    prompt = {"prompt": cut} if route == COMPLETIONS else {"text": cut}
    assert (await rig.http.post(route, json=body | prompt)).status_code == 200
    (request,) = (m for m in rig.engine.seen if isinstance(m, GenerateRequest))
    again, decode = request.input_ids, rig.front.tokenizer.decode
    assert decode(again, skip_special_tokens=False) == cut
    word = re.search(r"\s*\S*\s*$", cut)
    assert word is not None
    pairs = enumerate(zip(again, tokens, strict=False))
    same = next((number for number, (new, old) in pairs if new != old), len(again))
    assert len(decode(tokens[:same], skip_special_tokens=False)) >= word.start()


def assert_written_up_to(
    cut: str, prompt: str, read: dict[str, Any], message: dict[str, Any]
) -> None:
    """The prompt begins with the answer up to the cut, except for a head that was cut off itself:
    that of a call is content, before the calls or after them; that of an argument is not there."""
    said, cut, prompt = squashed(message["content"]), squashed(cut), squashed(prompt)
    shown = squashed(read["content"] or "")
    head = shown.removeprefix(said) if read.get("tool_calls") else ""
    assert cut.endswith(head.rstrip(REPLACEMENT))
    cut = cut.removesuffix(head.rstrip(REPLACEMENT))
    for argument in ("<parameter=city>", "<parameter=days>", *KEYS):
        ends = (argument[:size] for size in range(len(argument), 0, -1))
        cut = cut.removesuffix(next((end for end in ends if cut.endswith(end)), ""))
    if shown or read.get("reasoning_content") or read.get("tool_calls"):
        both = (prompt, prompt.replace(said + head, said, 1))
        assert any(each.startswith(cut) for each in both), (cut, prompt)


def squashed(text: str) -> str:
    return "".join(text.split())


def assert_same(read: dict[str, Any], message: dict[str, Any]) -> None:
    assert (read["content"] or "") == message["content"]
    assert (read.get("reasoning_content") or "") == message["reasoning_content"]
    calls = [call["function"] for call in read.get("tool_calls") or ()]
    found = [(call["name"], json.loads(call["arguments"])) for call in calls]
    drawn = [call["function"] for call in message["tool_calls"]]
    assert found == [(call["name"], call["arguments"]) for call in drawn]


def without_ids(parts: Any) -> Any:
    """The parts of an answer without the names that differ from one answer to the next."""
    if isinstance(parts, list):
        return [without_ids(part) for part in parts]
    if isinstance(parts, dict):
        ids = ("id", "call_id", "index")
        return {key: without_ids(value) for key, value in parts.items() if key not in ids}
    return parts


async def streamed_part(
    rig: Rig, route: str, told: list[Any], limit: int, **more: Any
) -> list[Any]:
    """The answer as history, put together from a stream as clients do."""
    sent = await rig.http.post(route, json=body_of(route, told, limit) | more | {"stream": True})
    lines = [line[6:] for line in sent.text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if route == RESPONSES:
        return list(events[-1]["response"]["output"])
    if route == MESSAGES:
        return [{"role": "assistant", "content": _blocks(events)}]
    return [_message(event["choices"][0]["delta"] for event in events)]


def _blocks(events: list[Any]) -> list[Any]:
    blocks: list[Any] = []
    inputs: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            inputs.append("")
        if event["type"] == "content_block_delta":
            for key in ("text", "thinking"):
                if key in event["delta"]:
                    blocks[-1][key] += event["delta"][key]
            inputs[-1] += event["delta"].get("partial_json", "")
    for block, given_input in zip(blocks, inputs, strict=True):
        if given_input:
            block["input"] = from_json(given_input, allow_partial=True)
    return blocks


def _message(deltas: Iterator[Any]) -> dict[str, Any]:
    content, thought, calls = "", "", []
    for delta in deltas:
        content += delta.get("content") or ""
        thought += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            if call.get("id"):
                calls.append(call)
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls and not content:
        message["content"] = None
    if thought:
        message["reasoning_content"] = thought
    return message | ({"tool_calls": calls} if calls else {})


def try_cases(name: str, folder: Path, num_cases: int, *, shrinks: bool = True) -> None:
    """Try the same cases in each run, unless they are many."""
    with formatted(name, folder) as (rig, call):

        @settings(
            max_examples=num_cases,
            derandomize=num_cases <= 200,
            database=None,
            phases=[*Phase] if shrinks else [Phase.generate],
            suppress_health_check=[*HealthCheck],
            deadline=None,
        )
        @given(case=CASES)
        def holds(case: Case) -> None:
            note(repr(case))
            call(check, rig, name, case)

        holds()


@pytest.mark.parametrize("num_cases", [10, *long(500)])
@pytest.mark.parametrize(
    "name", long_but(FORMATS, "hermes", "qwen3_coder", "deepseekv3", "pythonic", "gpt-oss")
)
def test_answers_are_histories(name: str, num_cases: int, tmp_path: Path) -> None:
    try_cases(name, tmp_path / "tokenizer", num_cases)


def _always(value: Any) -> Callable[..., Any]:
    def read(*_: Any) -> Iterator[Any]:
        yield from ()
        return value

    return read


def _takes_one_more(self: Unread, num_chars: int) -> str:
    taken, self.held = self.held[:num_chars], self.held[num_chars + 1 :]
    return taken


def _without_quotes(self: ObjectEnd, piece: str) -> int:
    return piece.find("}") + 1 or -1


def _nothing(*_: Any) -> None:
    return None


def _no_text(*_: Any) -> str:
    return ""


# Defects of the readers: the format that shows each, and what takes the place of what.
DEFECTS: dict[str, tuple[str, Any, str, Any]] = {
    "any mark ends a value": ("qwen3_coder", TaggedArguments, "_ends_value", _always(True)),
    "no mark ends a value": ("glm45", TaggedArguments, "_ends_value", _always(False)),
    "an object ends at the first brace": ("hermes", ObjectEnd, "feed", _without_quotes),
    "a character is lost": ("kimi_k2", Unread, "take", _takes_one_more),
    "spaces stay": ("hermes", Unread, "skip_space", _always(None)),
    "ends of calls stay": ("deepseekv3", Unread, "close", _always(False)),
    "lines of a value stay": (
        "qwen3_coder",
        TaggedArguments,
        "_string",
        TaggedArguments._find_end,
    ),
    "a stop string is not found": ("gemma", StopStringChecker, "_first_match", _nothing),
    "text held back for a stop is lost": ("llama3", StopStringChecker, "flush", _no_text),
}


# By default one of each kind of reader: of objects, of calls, of stop strings.
BY_DEFAULT = (
    *("an object ends at the first brace", "ends of calls stay"),
    "a stop string is not found",
)


@pytest.mark.parametrize("defect", long_but(DEFECTS, *BY_DEFAULT))
def test_a_defect_of_a_reader_is_found(
    defect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, owner, attribute, defective = DEFECTS[defect]
    monkeypatch.setattr(owner, attribute, defective)
    with pytest.raises((AssertionError, ValueError, ExceptionGroup)):
        try_cases(name, tmp_path / "tokenizer", 200, shrinks=False)

"""Answers as models write them, in every format, and what is in them."""

from typing import NamedTuple

from sgl_jax.text.reader import (
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
)

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "now": {"type": "object", "properties": {}},
}


class Answer(NamedTuple):
    """`tool` and `reasoning` name the formats."""

    tool: str | None
    reasoning: str | None
    text: str
    events: list[Event]
    prompt_tail: str = ""


def joined(events: list[Event]) -> list[Event]:
    """The events, with adjacent texts of one kind joined."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        texts = (Content, Reasoning, Arguments)
        if isinstance(event, texts) and isinstance(last, texts) and type(last) is type(event):
            merged[-1] = last._replace(text=last.text + event.text)
        else:
            merged.append(event)
    return merged


def call(name: str, arguments: str, id: str | None = None) -> list[Event]:
    return [CallBegun(name, id), Arguments(arguments), CallEnded()]


PARIS = '{"city": "Paris", "days": 2}'
WEATHER = call("get_weather", PARIS)
NOW = call("now", "{}")

ANSWERS = {
    "hermes": Answer(
        "hermes",
        None,
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": ' + PARIS + "}\n"
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        [Content("Let me see."), *WEATHER, *NOW],
    ),
    "hermes, arguments first": Answer(
        "qwen25",
        "qwen3",
        '<think>\nHm <tool_call>.\n</think>\n\n<tool_call>{"arguments": '
        + PARIS
        + ', "name": "get_weather"}</tool_call> done',
        [Reasoning("Hm <tool_call>."), *WEATHER, Content("done")],
    ),
    "hermes, strings with marks and escapes": Answer(
        "hermes",
        None,
        '<tool_call>{"name": "now", "arguments": {"a": "</tool_call> \\" }{{"}}</tool_call>',
        call("now", '{"a": "</tool_call> \\" }{{"}'),
    ),
    "hermes, cut amid its arguments": Answer(
        "hermes",
        None,
        '<tool_call>{"name": "now", "arguments": {"a": [1, 2',
        [CallBegun("now"), Arguments('{"a": [1, 2')],
    ),
    "hermes, no JSON": Answer(
        "hermes",
        None,
        "a <tool_call>\nnot json\n</tool_call> b",
        [Content("a <tool_call>\nnot json\n</tool_call> b")],
    ),
    "hermes, half a character as a name": Answer(
        "hermes",
        None,
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        [Content('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>')],
    ),
    "hermes, half a character as an argument, arguments first": Answer(
        "hermes",
        None,
        '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "now"}',
        [Content('<tool_call>{"arguments": {"a": "\\ud800"}, "name": "now"}')],
    ),
    "qwen3_coder": Answer(
        "qwen3_coder",
        None,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [*WEATHER, *NOW],
    ),
    "qwen3_coder, lines and quotes": Answer(
        "qwen3_coder",
        "qwen3",
        'The clock.</think>\n\n<tool_call><function=get_weather><parameter=city>\n a "b"\n\n\n'
        "</parameter></function></tool_call>",
        [Reasoning("The clock."), *call("get_weather", '{"city": " a \\"b\\"\\n\\n"}')],
        prompt_tail="<|im_start|>assistant\n<think>\n",
    ),
    "qwen3_coder, cut amid a value": Answer(
        "qwen3_coder",
        None,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        [CallBegun("get_weather"), Arguments('{"city": "Par')],
    ),
    "qwen3_coder, bare": Answer(
        "qwen3_coder",
        None,
        "I look.\n\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<function=now>\n</function>",
        [Content("I look."), *WEATHER, *NOW],
    ),
    "qwen3_coder, bare without such a tool": Answer(
        "qwen3_coder",
        None,
        "Write <function=name> and </function>.",
        [Content("Write <function=name> and </function>.")],
    ),
    "qwen3_coder, ends of values missing": Answer(
        "qwen3_coder",
        None,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n2\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=days>\n2\n"
        "<parameter=city>\nParis\n</function>",
        [*WEATHER, *call("get_weather", '{"days": 2, "city": "Paris"}')],
    ),
    "qwen3_coder, end of the function missing": Answer(
        "qwen3_coder",
        None,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</tool_call>\nDone.",
        [*WEATHER, Content("Done.")],
    ),
    "qwen3_coder, marks in a value": Answer(
        "qwen3_coder",
        None,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n<parameter=x>\n</function> a\n"
        "<parameter=city>\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
        "</tool_call>",
        call(
            "get_weather",
            '{"city": "<parameter=x>\\n</function> a\\n<parameter=city>", "days": 2}',
        ),
    ),
    "qwen3_coder, reasoning without its end": Answer(
        "qwen3_coder",
        "qwen3",
        "I need <tool_call>, so:\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [Reasoning("I need <tool_call>, so:"), *NOW],
        prompt_tail="<|im_start|>assistant\n<think>\n",
    ),
    "hermes, reasoning without its end": Answer(
        "qwen25",
        "qwen3",
        '<think>\nHm.\n<tool_call>\n{"name": "get_weather", "arguments": ' + PARIS + "}\n"
        '</tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>',
        [Reasoning("Hm."), *WEATHER, *NOW],
    ),
    "hermes, a call amid reasoning": Answer(
        "hermes",
        "qwen3",
        '<think>\nMaybe <tool_call>{"name": "now"}</tool_call>.\n</think>\n\nNo.',
        [Reasoning('Maybe <tool_call>{"name": "now"}</tool_call>.'), Content("No.")],
    ),
    "hermes, reasoning cut off after a mark": Answer(
        "hermes",
        "qwen3",
        "<think>\nMaybe <tool_call>, but",
        [Reasoning("Maybe <tool_call>, but")],
    ),
    "hermes, without arguments": Answer(
        "hermes",
        None,
        '<tool_call>\n{"name": "now"}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": null}\n</tool_call>',
        [*NOW, *NOW],
    ),
    "llama3": Answer(
        "llama3",
        None,
        '{"name": "get_weather", "parameters": ' + PARIS + '}; {"name": "now", "parameters": {}}',
        [*WEATHER, *NOW],
    ),
    "llama3 with its tag": Answer(
        "llama3",
        None,
        'Well. <|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
        [Content("Well."), *NOW],
    ),
    "llama3, an object that is no call": Answer(
        "llama3",
        None,
        '{"name": "Ann", "arguments": {"a": 1}} and {more}',
        [Content('{"name": "Ann", "arguments": {"a": 1}} and {more}')],
    ),
    "llama3, a semicolon before text": Answer(
        "llama3",
        None,
        '{"name": "now", "parameters": {}}; {no}',
        [*NOW, Content("; {no}")],
    ),
    "mistral": Answer(
        "mistral",
        None,
        '[TOOL_CALLS][{"name": "get_weather", "arguments": ' + PARIS + ', "id": "abc"}, '
        '{"name": "now", "arguments": {}}]',
        [*WEATHER, *NOW],
    ),
    "mistral since 2025": Answer(
        "mistral",
        None,
        "Yes.[TOOL_CALLS]get_weather[ARGS]" + PARIS + "[TOOL_CALLS]now[CALL_ID]Xy1[ARGS]{}",
        [Content("Yes."), *WEATHER, *call("now", "{}", "Xy1")],
    ),
    "mistral, no mark before the arguments": Answer(
        "mistral",
        None,
        "[TOOL_CALLS]now{}[TOOL_CALLS]now[CALL_ID]Xy1{}",
        [*NOW, *call("now", "{}", "Xy1")],
    ),
    "deepseekv3": Answer(
        "deepseekv3",
        "deepseek-r1",
        "Weather.\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
        "function<｜tool▁sep｜>get_weather\n```json\n"
        + PARIS
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function"
        "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Reasoning("Weather."), Content("I look."), *WEATHER, *NOW],
        prompt_tail="<｜Assistant｜><think>\n",
    ),
    "deepseek 3.1": Answer(
        "deepseekv3",
        "deepseek-r1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        + PARIS
        + "<｜tool▁call"
        "▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [*WEATHER, *NOW],
        prompt_tail="<｜Assistant｜></think>",
    ),
    "kimi_k2": Answer(
        "kimi_k2",
        "kimi",
        "◁think▷Rain?◁/think▷I look. <|tool_calls_section_begin|><|tool_call_begin|>functions."
        "get_weather:0<|tool_call_argument_begin|>" + PARIS + "<|tool_call_end|><|tool_call_begin|>"
        "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [
            Reasoning("Rain?"),
            Content("I look."),
            *call("get_weather", PARIS, "functions.get_weather:0"),
            *call("now", "{}", "functions.now:1"),
        ],
    ),
    "kimi_k2, a name alone": Answer(
        "kimi_k2",
        None,
        "<|tool_calls_section_begin|> <|tool_call_begin|> now:0 <|tool_call_argument_begin|> {}",
        call("now", "{}", "now:0"),
    ),
    "glm45, ends of values missing": Answer(
        "glm45",
        None,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris<arg_key>days</arg_key>"
        "<arg_value>2</tool_call>",
        WEATHER,
    ),
    "glm45": Answer(
        "glm45",
        "glm45",
        "\n<think>Rain?</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call>\n<tool_call>now</tool_call>",
        [Reasoning("Rain?"), Content("I look."), *WEATHER, *NOW],
    ),
    "functiongemma": Answer(
        "gemma",
        None,
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
        [*WEATHER, *NOW],
    ),
    "gemma 4": Answer(
        "gemma",
        None,
        '<|tool_call>call:f{a:[{b:<|"|>x:{"y"},z:1<|"|>}],c:true}<tool_call|>',
        call("f", '{"a": [{"b": "x:{\\"y\\"},z:1"}], "c": true}'),
    ),
    "gemma, malformed": Answer(
        "gemma",
        None,
        "<start_function_call>call:f{a:oops}<end_function_call>",
        [Content("<start_function_call>call:f{a:oops}<end_function_call>")],
    ),
    "pythonic": Answer(
        "pythonic", None, "[get_weather(city='Paris', days=2), now()]\n", [*WEATHER, *NOW]
    ),
    "pythonic with marks": Answer(
        "pythonic", None, "<|python_start|>[now()]<|python_end|> Done.", [*NOW, Content("Done.")]
    ),
    "pythonic, a list that is no call": Answer(
        "pythonic", None, " [see(1), ']']: links", [Content(" [see(1), ']']: links")]
    ),
    "pythonic, half a character": Answer(
        "pythonic", None, "[now(a='\\ud800')]", [Content("[now(a='\\ud800')]")]
    ),
    "gpt-oss": Answer(
        "gpt-oss",
        "gpt-oss",
        "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        "<|constrain|>json<|message|>" + PARIS + "<|call|><|start|>assistant to=functions.now"
        "<|channel|>commentary json<|message|>{}",
        [Reasoning("Rain?"), Content("I look."), *WEATHER, *NOW],
    ),
    "gpt-oss, calls without arguments": Answer(
        "gpt-oss",
        "gpt-oss",
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|><|start|>"
        "assistant<|channel|>commentary to=functions.now<|message|>",
        [*NOW, *NOW],
    ),
    "gpt-oss, final": Answer(
        "gpt-oss",
        "gpt-oss",
        "<|channel|>analysis<|message|>2 + 2<|end|><|start|>assistant<|channel|>final<|message|>4",
        [Reasoning("2 + 2"), Content("4")],
    ),
    "gpt-oss without channels": Answer(
        "gpt-oss",
        "gpt-oss",
        "plain <|start|>user<|message|>x",
        [Content("plain <|start|>user<|message|>x")],
    ),
    "reasoning without an end": Answer(
        None, "qwen3", "<think>\nand so on", [Reasoning("and so on")]
    ),
    "reasoning closed by the prompt": Answer(
        None, "qwen3", "4, <think>", [Content("4, <think>")], prompt_tail="<think>\n\n</think>\n\n"
    ),
}

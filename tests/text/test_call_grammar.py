"""What is drawn by the grammar of a format's calls is read by its reader, as valid calls."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.grammar import Grammar, lenient
from sgl_jax.core.step_plan import mask_words
from sgl_jax.grammar.compiler import GrammarCompiler, RowGrammar
from sgl_jax.text.answer_parser import AnswerParser
from sgl_jax.text.formats.call_grammar import CallGrammar
from sgl_jax.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level, save
from tests.text.recorded_answers import ANSWERS, PARIS
from tests.text.recorded_answers import TOOLS as WEATHER_TOOLS

# Of the marks of formats some are special tokens, and some only text.
SPECIALS = ["[TOOL_CALLS]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>"]
SPECIALS += ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<arg_value>", "</arg_value>"]
SPECIALS += ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"]
FORMATS = ("hermes", "llama3", "mistral", "deepseekv3", "kimi_k2", "qwen3_coder", "glm45")
FORMATS += ("gpt-oss", "pythonic", "gemma")
TOOLS: dict[str, dict[str, Any]] = {
    "find_it": {
        "type": "object",
        "properties": {"where": {"$ref": "#/$defs/place"}, "most": {"enum": [1, 2]}},
        "required": ["where"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": ["here", "zuhause ü"]}},
    },
    "now": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rust = byte_level()
    rust.add_special_tokens(SPECIALS)
    folder = save(rust, tmp_path_factory.mktemp("calls") / "tokenizer")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["extra_special_tokens"] += SPECIALS
    file.write_text(json.dumps(config))
    return folder


def follow(folder: Path, grammar: Grammar) -> tuple[Tokenizer, RowGrammar]:
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer.eos_token_id is not None
    ends = (tokenizer.eos_token_id,)
    compiler = GrammarCompiler(str(folder), tokenizer.vocab_size, ends)
    return tokenizer, compiler.follow(compiler.compile(grammar))


def allowed(tokenizer: Tokenizer, row: RowGrammar) -> list[int]:
    mask = np.zeros((1, mask_words(tokenizer.vocab_size)), np.int32)
    row.masks([], mask)
    ids: list[int] = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return ids


def drawn(folder: Path, grammar: Grammar, seed: int) -> str:
    tokenizer, row = follow(folder, grammar)
    eos, rng, output = tokenizer.eos_token_id, random.Random(seed), list[int]()
    for _ in range(2000):
        row.read(np.array(output, np.int32))
        ids = allowed(tokenizer, row)
        token = eos if eos in ids and (rng.random() < 0.5 or len(ids) == 1) else rng.choice(ids)
        if token == eos:
            return tokenizer.decode(output, skip_special_tokens=False)
        assert token is not None
        output.append(token)
    raise AssertionError(tokenizer.decode(output))


def grammar_of(
    folder: Path, tool_format: str, tools: dict[str, Any], *, is_single: bool = False
) -> Grammar:
    grammar, special = written_by(folder, tool_format)
    return Grammar("ebnf", grammar.calls(tools, special, is_single=is_single))


def amid_content(folder: Path, tool_format: str, tools: dict[str, Any]) -> Grammar:
    grammar, special = written_by(folder, tool_format)
    return Grammar("ebnf", grammar.calls_amid_content(tools, special))


def written_by(folder: Path, tool_format: str) -> tuple[CallGrammar, Mapping[str, int]]:
    parser = AnswerParser(tool_format)
    assert parser.call_grammar is not None
    marks = parser.marks(has_tools=True, has_reasoning=False)
    return parser.call_grammar, Tokenizer.load(str(folder)).special_ids_of(marks)


def calls_in(tool_format: str, text: str, tools: dict[str, Any] = TOOLS) -> list[tuple[str, Any]]:
    reader = AnswerParser(tool_format).reader(tools, "", has_reasoning=False)
    calls: list[list[str]] = []
    for event in reader.feed(text, is_last=True):
        name = type(event).__name__
        if name == "CallBegun":
            calls.append([event.name, ""])
        elif name == "Arguments":
            calls[-1][1] += event.text
        else:
            assert not getattr(event, "text", "").strip(), event
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_single", [True, False])
@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_that_are_drawn_are_read_and_valid(
    folder: Path, tool_format: str, is_single: bool, seed: int
) -> None:
    grammar = grammar_of(folder, tool_format, TOOLS, is_single=is_single)
    calls = calls_in(tool_format, drawn(folder, without_thought(grammar), seed))
    assert calls
    assert len(calls) == 1 or not is_single
    for name, arguments in calls:
        assert jsonschema_rs.is_valid(TOOLS[name], arguments)
        assert TOOLS[name] or arguments == {}


def without_thought(grammar: Grammar) -> Grammar:
    """Free text that is drawn at random would hardly end."""
    return Grammar(grammar.kind, grammar.text.replace("start: message* ", "start: "))


THOUGHT = "<|channel|>analysis<|message|>Rain < sun?<|end|><|start|>assistant"
TO_FUNCTION = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
# Of recorded answers the calls.
WRITTEN = [
    ("hermes", ANSWERS["hermes"].text.removeprefix("Let me see.\n").rstrip()),
    ("qwen3_coder", ANSWERS["qwen3_coder"].text),
    ("glm45", ANSWERS["glm45"].text.partition("look.\n")[2].replace("now<", "now\n<")),
    ("mistral", ANSWERS["mistral"].text.replace(', "id": "abc"', "")),
    ("mistral", ANSWERS["mistral since 2025"].text[4:].replace("[CALL_ID]Xy1", "")),
    ("deepseekv3", ANSWERS["deepseekv3"].text.partition("look.")[2]),
    ("deepseekv3", ANSWERS["deepseek 3.1"].text),
    ("kimi_k2", ANSWERS["kimi_k2"].text.partition("look. ")[2]),
    ("gpt-oss", TO_FUNCTION + PARIS),
    ("gpt-oss", THOUGHT + TO_FUNCTION + PARIS),
    ("gemma", ANSWERS["functiongemma"].text),
    ("pythonic", ANSWERS["pythonic"].text.strip()),
    ("pythonic", '<|python_start|>[get_weather(city="Paris", days=2)]<|python_end|>'),
]


@pytest.mark.parametrize(("tool_format", "text"), WRITTEN, ids=str)
def test_calls_as_models_write_them_are_let_through(
    folder: Path, tool_format: str, text: str
) -> None:
    tools: dict[str, Any] = WEATHER_TOOLS | {"now": {}}
    tokenizer, row = follow(folder, grammar_of(folder, tool_format, tools))
    row.read(np.array(tokenizer.encode(text), np.int32))
    assert not row.error
    assert tokenizer.eos_token_id in allowed(tokenizer, row)
    for wrong in (text.replace("get_weather", "get_money"), text.replace("days", "dags")):
        tokenizer, row = follow(folder, grammar_of(folder, tool_format, closed(tools)))
        row.read(np.array(tokenizer.encode(wrong), np.int32))
        assert row.error


@pytest.mark.parametrize(("tool_format", "text"), WRITTEN, ids=str)
def test_calls_or_json_of_a_schema_are_let_through(
    folder: Path, tool_format: str, text: str
) -> None:
    tools: dict[str, Any] = closed(WEATHER_TOOLS | {"now": {}})
    writer, special = written_by(folder, tool_format)
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"]}
    schema |= {"$defs": {"b": {"type": "boolean"}}}
    grammar = Grammar("ebnf", writer.calls(tools, special, is_single=False, or_json=schema))
    last = f"{THOUGHT}<|channel|>final<|message|>" if tool_format == "gpt-oss" else ""
    for valid in (text, f'{last}{{"a": true}}'):
        tokenizer, row = follow(folder, grammar)
        row.read(np.array(tokenizer.encode(valid), np.int32))
        assert not row.error
        assert tokenizer.eos_token_id in allowed(tokenizer, row)
    wrongs = (f'{last}{{"a": 1}}', f"{last}It rains.", text.replace("get_weather", "get_money"))
    for wrong in (*wrongs, f'{text}{{"a": true}}'):
        tokenizer, row = follow(folder, grammar)
        row.read(np.array(tokenizer.encode(wrong), np.int32))
        assert row.error


AFTER_REASONING = {
    name: ANSWERS[name].text.partition("</think>")[2] or ANSWERS[name].text
    for name in FORMATS
    if name in ANSWERS and name not in ("kimi_k2", "gpt-oss")
}
TOLD = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
AMID_CONTENT = [
    *AFTER_REASONING.items(),
    ("hermes", "No < call"),
    ("hermes", ANSWERS["hermes"].text + "{done}"),
    ("llama3", ANSWERS["llama3 with its tag"].text.replace('"type": "function", ', "")),
    ("qwen3_coder", ANSWERS["qwen3_coder, bare"].text + "\n</tool_call>"),
    ("llama3", " \n"),
    ("llama3", "No {call};"),
    ("mistral", ANSWERS["mistral since 2025"].text.replace("[CALL_ID]Xy1", "")),
    ("kimi_k2", "look" + ANSWERS["kimi_k2"].text.partition("look")[2]),
    ("gpt-oss", THOUGHT + TOLD + TO_FUNCTION + PARIS),
    ("gpt-oss", THOUGHT + "<|channel|>final<|message|>It rains."),
    ("gemma", "I look. " + ANSWERS["functiongemma"].text + "It rains."),
    ("gemma", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'),
    ("pythonic", ANSWERS["pythonic with marks"].text),
    ("pythonic", "It is [sunny]."),
]


@pytest.mark.parametrize(("tool_format", "text"), AMID_CONTENT, ids=str)
def test_strict_calls_are_held_amid_content(folder: Path, tool_format: str, text: str) -> None:
    tools: dict[str, Any] = WEATHER_TOOLS | {"now": {}}
    text = text.replace(', "id": "abc"', "").replace("now<", "now\n<").rstrip("\n")
    if tool_format == "llama3":
        text = text.replace("}; {", "};{")
    tokenizer, row = follow(folder, amid_content(folder, tool_format, tools))
    row.read(np.array(tokenizer.encode(text), np.int32))
    assert not row.error
    assert tokenizer.eos_token_id in allowed(tokenizer, row)
    for wrong in (text.replace("get_weather", "get_money"), text.replace("days", "dags")):
        if wrong != text:
            tokenizer, row = follow(folder, amid_content(folder, tool_format, closed(tools)))
            row.read(np.array(tokenizer.encode(wrong), np.int32))
            assert row.error


def closed(tools: dict[str, Any]) -> dict[str, Any]:
    return {name: schema | {"additionalProperties": False} for name, schema in tools.items()}


@pytest.mark.parametrize("tool_format", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ("red", {"type": "string", "enum": ["red", "dark blue"]}),
        ("dark blue", {"type": "string", "const": "dark blue"}),
        ('two\nlines <b>, "quoted" ü', {"type": "string"}),
        ("", {"type": "string"}),
        ([1, {"a": None}], {"type": "array"}),
        ("a string", {"type": ["string", "null"]}),
        ("12", {"type": ["integer", "string"]}),
        ("12", {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}),
        (None, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ("nullify", {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ("null", {"type": "string"}),
        ("[1]", {"oneOf": [{"type": "array", "items": {}}, {"$ref": "#/$defs/text"}]}),
        ("true", {"$ref": "#/$defs/text"}),
        ("7", {"allOf": [{"$ref": "#/$defs/text"}, {"minLength": 0}]}),
        ("1", {"enum": ["1", "2", 3]}),
        (3, {"enum": ["1", "2", 3]}),
        ("2", {"anyOf": [{"enum": ["1", "2"]}, {"type": "null"}]}),
        (None, {"anyOf": [{"enum": ["1", "2"]}, {"type": "null"}]}),
        ({"a": 1}, {"anyOf": [{"const": "all"}, {"$ref": "#/$defs/map"}]}),
        ("all", {"anyOf": [{"const": "all"}, {"$ref": "#/$defs/map"}]}),
        ("x", {"$ref": "#/$defs/deep"}),
        (-1.5, {"type": "number"}),
        (True, {"$ref": "#/$defs/flag"}),
    ],
    ids=str,
)
def test_values_between_tags_are_what_the_schema_says(
    folder: Path, tool_format: str, value: Any, schema: dict[str, Any]
) -> None:
    whole = {
        "type": "object",
        "properties": {"it": schema, "more": {"type": "integer"}},
        "required": ["it"],
        "$defs": {
            "flag": {"type": "boolean"},
            "text": {"type": "string"},
            "map": {"type": "object", "additionalProperties": {"type": "integer"}},
            "deep": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/text"}]},
        },
    }
    written = value if isinstance(value, str) else json.dumps(value)
    texts = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=it>\n{}\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>it</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    }
    text = texts[tool_format].replace("{}", written)
    tokenizer, row = follow(folder, grammar_of(folder, tool_format, {"f": whole}))
    row.read(np.array(tokenizer.encode(text), np.int32))
    assert not row.error
    assert tokenizer.eos_token_id in allowed(tokenizer, row)
    assert calls_in(tool_format, text, {"f": whole}) == [("f", {"it": value})]


@pytest.mark.parametrize(
    ("tool_format", "tools"),
    [
        ("kimi_k2", {'find "it"': {}}),
        ("glm45", {"f": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}}),
        ("qwen3_coder", {"f": {"type": "object", "required": ["a"]}}),
        ("pythonic", {"get-it": {}}),
        ("pythonic", {"f": {"type": "object", "properties": {"class": {"type": "null"}}}}),
        ("pythonic", {"f": {"type": "object", "properties": {"a": {"not": {}}}}}),
        ("gemma", {"f": {"type": "object", "properties": {"a b": {"type": "null"}}}}),
        ("gemma", {"f": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}}),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    folder: Path, tool_format: str, tools: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"format|parameters"):
        grammar_of(folder, tool_format, tools)


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"enum": [True, None, 1.5, "x y", [0], {"b": "c"}]}},
        "two": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        "maybe": {"anyOf": [{"const": "yes"}, {"type": "null"}]},
        "deep": {"$ref": "#/$defs/node"},
        "limit": {"type": ["integer", "boolean"], "minimum": 3, "maximum": 12},
        "empty": {"type": "object", "additionalProperties": False},
        "counts": {"type": "object", "additionalProperties": {"const": 1}},
    },
    "required": ["two", "deep"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                "kind": {"enum": ["leaf", "twig"]},
                "last": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["kind"],
        }
    },
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("tool_format", ["pythonic", "gemma"])
def test_nested_values_are_drawn_valid(folder: Path, tool_format: str, seed: int) -> None:
    tools = {"f": NESTED}
    text = drawn(folder, grammar_of(folder, tool_format, tools, is_single=True), seed)
    ((name, arguments),) = calls_in(tool_format, text, tools)
    assert name == "f"
    assert jsonschema_rs.is_valid(NESTED, arguments)


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('two=[True, False], deep={"kind": "leaf"}', True),
        ('a=["x y", None, {"b": "c"}], two=[True, True], deep={"kind": "twig"}', True),
        ('two=[True, False], maybe=None, deep={"kind": "leaf", "last": 3}, limit=5', True),
        ('two=[True, False], deep={"kind": "leaf"}, counts={"k": 1, "l m": 1}', True),
        ("two=[True, False]", False),
        ('two=[True], deep={"kind": "leaf"}', False),
        ('two=[true, false], deep={"kind": "leaf"}', False),
        ('two=[True, False], deep={"kind": "stem"}', False),
        ('two=[True, False], deep={"kind": "leaf"}, limit=2', False),
        ('two=[True, False], deep={"kind": "leaf"},', False),
        (', two=[True, False], deep={"kind": "leaf"}', False),
        ('deep={"kind": "leaf"}, two=[True, False]', False),
    ],
)
def test_values_as_python_writes_them(folder: Path, text: str, is_valid: bool) -> None:
    tokenizer, row = follow(folder, grammar_of(folder, "pythonic", {"f": NESTED}))
    row.read(np.array(tokenizer.encode(f"[f({text})]"), np.int32))
    assert (not row.error and tokenizer.eos_token_id in allowed(tokenizer, row)) == is_valid


@pytest.mark.parametrize("tool_format", ["pythonic", "gemma"])
def test_values_of_any_kind(folder: Path, tool_format: str) -> None:
    tools: dict[str, Any] = {"f": {"type": "object", "properties": {"a": {}, "b": True}}}
    text = {
        "pythonic": """[f(a='it\\'s "x"', b={"a": [1, -2e3, {}], "b": False})]""",
        "gemma": '<|tool_call>call:f{a:<|"|>it\'s "x"<|"|>,b:{a:[1,-2e3,{}],b:false}}<tool_call|>',
    }[tool_format]
    tokenizer, row = follow(folder, grammar_of(folder, tool_format, tools))
    row.read(np.array(tokenizer.encode(text), np.int32))
    assert not row.error
    (call,) = calls_in(tool_format, text, tools)
    assert call == ("f", {"a": 'it\'s "x"', "b": {"a": [1, -2000.0, {}], "b": False}})


@pytest.mark.parametrize("tool_format", FORMATS)
def test_what_would_be_too_long_is_refused_at_once(folder: Path, tool_format: str) -> None:
    definitions = {f"d{number}": {"const": number} for number in range(2000)}
    properties: dict[str, Any] = {
        f"p{number}": {"$ref": f"#/$defs/d{number}"} for number in range(2000)
    }
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    with pytest.raises(ValueError, match="longer than"):
        grammar_of(folder, tool_format, {"f": schema})


@pytest.mark.parametrize("tool_format", ["pythonic", "gemma"])
def test_nesting_does_not_multiply(folder: Path, tool_format: str) -> None:
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(30):
        schema = {"type": "array", "items": {"type": "object", "additionalProperties": schema}}
    tools = {"f": {"type": "object", "properties": {"a": schema}}}
    assert len(grammar_of(folder, tool_format, tools).text) < 20_000


# Each of them holds what no grammar can.
BEYOND: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"not": {"const": 1}}}, "required": ["a", "b"]},
    {"type": "object", "properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}},
    {"type": "object", "properties": {"a": {"$ref": "https://elsewhere"}}, "if": {}},
]


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("schema", BEYOND, ids=["not", "oneOf", "$ref"])
def test_what_cannot_be_held_counts_for_nothing_where_that_is_allowed(
    folder: Path, tool_format: str, schema: dict[str, Any]
) -> None:
    def call() -> str:
        return grammar_of(folder, tool_format, {"f": schema}).text

    def compiled(text: str) -> object:
        ends = (Tokenizer.load(str(folder)).eos_token_id or 0,)
        return GrammarCompiler(str(folder), 600, ends).compile(Grammar("ebnf", text))

    with pytest.raises((ValueError, InvalidRequestError)):
        compiled(call())
    if "https" not in str(schema) or tool_format in ("pythonic", "gemma"):
        schema = lenient(schema)
        compiled(call())


words = st.sampled_from(
    ["type", "properties", "required", "items", "anyOf", "enum", "$ref", "$defs", "minItems"]
)
keys = words | st.sampled_from(["additionalProperties", "maxItems", "const", "oneOf", "minimum"])
values = st.sampled_from([None, True, 3, -1, 0.5, "string", "object", "array", "#/$defs/a", "a"])
anything = st.recursive(
    values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4)
)


@given(
    schema=st.dictionaries(keys, anything, max_size=5),
    tool_format=st.sampled_from(FORMATS),
    is_lenient=st.booleans(),
)
def test_any_parameters_make_a_grammar_or_are_refused(
    schema: dict[str, Any], tool_format: str, is_lenient: bool
) -> None:
    grammar = AnswerParser(tool_format).call_grammar
    assert grammar is not None
    try:
        text = grammar.calls({"f": lenient(schema) if is_lenient else schema}, {}, is_single=False)
    except ValueError:
        return
    assert text.startswith("start: ")


def test_a_name_with_quotes_is_one_in_json(folder: Path) -> None:
    tools: dict[str, Any] = {'find "it"': {}}
    text = drawn(folder, grammar_of(folder, "hermes", tools, is_single=True), 0)
    assert calls_in("hermes", text, tools) == [('find "it"', {})]

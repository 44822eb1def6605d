"""Grammars of each kind, what is refused, and the masks that they give."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.grammar import JSON_RULE, Grammar, opened
from sgl_jax.core.step_plan import mask_words
from sgl_jax.grammar.compiler import GrammarCompiler, RowGrammar
from sgl_jax.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level, save

VOCAB_SIZE = 512  # more than the tokenizer has
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Zoë"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {"begin": "<call>", "schema": SCHEMA, "end": "</call>"}
TAGS = {
    "structures": [TAG],
    "triggers": ["<call>"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("grammars") / "tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(str(folder))


@pytest.fixture(scope="module")
def compiler(folder: Path, tokenizer: Tokenizer) -> GrammarCompiler:
    assert tokenizer.eos_token_id is not None
    return GrammarCompiler(str(folder), VOCAB_SIZE, (tokenizer.eos_token_id,))


def follow(compiler: GrammarCompiler, grammar: Grammar) -> RowGrammar:
    """A follower of an output that has not begun."""
    return compiler.follow(compiler.compile(grammar))


def masks_after(row: RowGrammar, output: Sequence[int], drafts: Sequence[int] = ()) -> np.ndarray:
    """int32[1 + len(drafts), mask_words(VOCAB_SIZE)], of which -1 is not written."""
    masks = np.full((1 + len(drafts), mask_words(VOCAB_SIZE)), -1, np.int32)
    row.read(np.array(output, np.int32))
    row.masks(drafts, masks)
    return masks


def allowed(row: RowGrammar, output: Sequence[int]) -> list[int]:
    return tokens_of(masks_after(row, output)[0])


def tokens_of(mask: np.ndarray) -> list[int]:
    ids: list[int] = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return ids


def draw(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, seed: int) -> str:
    """A text that follows the grammar, any allowed token as likely as another."""
    rng, row, output = random.Random(seed), follow(compiler, grammar), []
    for _ in range(2000):
        token = rng.choice(allowed(row, output))
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(output)
        output.append(token)
    raise AssertionError(f"no end: {tokenizer.decode(output)}")


@pytest.mark.parametrize("seed", range(5))
def test_any_text_drawn_by_a_schema_is_valid(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    text = draw(compiler, tokenizer, Grammar("json_schema", json.dumps(SCHEMA)), seed)
    value = json.loads(text)
    assert value.keys() == {"name", "age"}
    assert value["name"] in ("Ada", "Zoë")
    assert isinstance(value["age"], int)
    assert value["age"] <= 99
    assert text == json.dumps(value, ensure_ascii=False)


def keeps_to(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: object, text: str) -> bool:
    """True if each token of `text` is allowed, and the end after it."""
    row, tokens = follow(compiler, Grammar("json_schema", json.dumps(schema))), []
    for token in [*tokenizer.encode(text), tokenizer.eos_token_id]:
        if token not in allowed(row, tokens):
            return False
        tokens.append(token)
    return True


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def test_a_string_is_as_long_as_its_schema_allows(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    assert keeps_to(compiler, tokenizer, PERSON, json.dumps({"name": "a" * 3000}))
    short = PERSON | {"properties": {"name": {"type": "string", "maxLength": 1000}}}
    for length, is_allowed in ((1000, True), (1001, False)):
        text = json.dumps({"name": "a" * length})
        assert keeps_to(compiler, tokenizer, short, text) is is_allowed


@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        (PERSON, False),
        (PERSON | {"additionalProperties": True}, True),
        (PERSON | {"x-guidance": {"open_objects": True}}, True),
        (opened(PERSON), True),
        (PERSON | {"x-guidance": {"open_objects": False}}, False),
        ({"type": "object"}, True),
    ],
)
def test_a_key_is_invented_only_where_the_schema_allows_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: object, is_open: bool
) -> None:
    assert keeps_to(compiler, tokenizer, schema, '{"name": "Ada"}')
    assert keeps_to(compiler, tokenizer, schema, '{"name": "Ada", "Madrid": 1}') is is_open


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_a_server_may_open_all_objects(folder: Path, tokenizer: Tokenizer, kind) -> None:
    text = PERSON if kind == "json_schema" else TAGS | {"structures": [TAG | {"schema": PERSON}]}
    begin, end = ("", "") if kind == "json_schema" else ("<call>", "</call>")
    written = tokenizer.encode(f'{begin}{{"name": "Ada", "Madrid": 1}}{end}')
    for opens_objects in (False, True):
        ids = (tokenizer.eos_token_id,)
        compiler = GrammarCompiler(str(folder), VOCAB_SIZE, ids, opens_objects=opens_objects)
        row = follow(compiler, Grammar(kind, json.dumps(text)))
        steps = [token in allowed(row, written[:i]) for i, token in enumerate(written)]
        assert all(steps) is opens_objects


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"name": "Ada"}', True),
        ('{"name":"Ada"}', True),
        ('{ "name":\n"Ada" }', True),
        ('{  "name": "Ada"}', False),
        ('{"name": \n"Ada"}', False),
    ],
)
def test_free_white_space_is_one_character_at_most(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, is_allowed: bool
) -> None:
    schema = PERSON | {"x-guidance": {"whitespace_flexible": True}}
    assert keeps_to(compiler, tokenizer, schema, text) is is_allowed


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        ("regex", "[0-9]{3}-(x|é)+", "[0-9]{3}-(x|é)+"),
        ("ebnf", 'root ::= "yes" | "no" " "? root', "(no ?)*yes"),
        ("ebnf", 'start: "a" | "b" start', "b*a"),
        ("ebnf", '?start: "a" | "b" start', "b*a"),
        ("ebnf", '%import common.DIGIT\n\n  ?start: "a" | DIGIT start', "[0-9]*a"),
    ],
)
def test_any_text_drawn_by_a_grammar_matches_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer, kind, text: str, wanted: str, seed: int
) -> None:
    assert re.fullmatch(wanted, draw(compiler, tokenizer, Grammar(kind, text), seed))


def test_text_is_free_up_to_a_trigger(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    row = follow(compiler, Grammar("structural_tag", json.dumps(TAGS)))
    free = tokenizer.encode("Any words, then ")
    assert len(allowed(row, free)) > 200
    begun = free + tokenizer.encode("<call>")
    nexts = {tokenizer.decode([token])[:1] for token in allowed(row, begun)}
    assert nexts == {"{"}


SPECIAL_TAGS = [  # trigger, begin, end; <|user|> and <|assistant|> are special tokens
    ("<|user|>", "<|user|>", "<|assistant|>"),
    ("<|user|>", "<|user|>call: ", "</call>"),
    ("<|user|>c", "<|user|>call: ", "</call><|assistant|>."),
    ("<call>", "<call><|user|>", "<|assistant|>"),
    ("<", "<|user|>", "<|assistant|>"),  # a part of the name of the token
    ("to <|user|>", "to <|user|>", "</s>"),
    ('\n"é</.<|user|>', '\n"é</.<|user|>', "<|assistant|>"),
]


@pytest.mark.parametrize(("trigger", "begin", "end"), SPECIAL_TAGS)
def test_tags_may_be_special_tokens(
    compiler: GrammarCompiler, tokenizer: Tokenizer, trigger: str, begin: str, end: str
) -> None:
    structures = [{"begin": begin, "schema": SCHEMA, "end": end}, TAG]
    tags = {"structures": structures, "triggers": [trigger, "<call>"]}
    grammar = Grammar("structural_tag", json.dumps(tags))
    free, value = "Text and to it; to ", '{"name": "Ada", "age": 7}'
    whole = tokenizer.encode(f"{free}{begin}{value}{end}")
    row = follow(compiler, grammar)
    for place, token in enumerate(whole):
        assert token in allowed(row, whole[:place]), tokenizer.decode(whole[:place])
    assert not row.error
    # The contents are held to the schema, and free text may end at any time, but not within.
    row = follow(compiler, grammar)
    begun = tokenizer.encode(f"{free}{begin}")
    assert {tokenizer.decode([token])[:1] for token in allowed(row, begun)} == {"{"}
    assert tokenizer.eos_token_id in allowed(follow(compiler, grammar), tokenizer.encode(free))
    if end != "</s>":
        again = tokenizer.encode(f" and {begin}{value}{end}")
        assert tokenizer.eos_token_id in allowed(follow(compiler, grammar), whole + again)


def test_a_special_token_that_begins_no_tag_is_not_free_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    special = tokenizer.special_ids_of({"<|user|>", "<|assistant|>"})
    tags = {"structures": [{**TAG, "begin": "<|user|>"}], "triggers": ["<|user|>"]}
    row = follow(compiler, Grammar("structural_tag", json.dumps(tags)))
    ids = allowed(row, tokenizer.encode("a"))
    assert special["<|user|>"] in ids
    assert special["<|assistant|>"] not in ids


def test_a_mask_covers_the_vocabulary_and_nothing_past_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    row = follow(compiler, Grammar("regex", "(?s).*"))
    assert max(allowed(row, [])) < tokenizer.vocab_size


def test_where_nothing_may_follow_the_output_ends(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    row = follow(compiler, Grammar("regex", "ab"))
    assert allowed(row, tokenizer.encode("ab")) == [tokenizer.eos_token_id]
    assert row.expected() == []
    assert allowed(row, tokenizer.encode("abx")) == [tokenizer.eos_token_id]
    assert row.expected() == []


def test_outputs_of_one_grammar_do_not_disturb_each_other(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = Grammar("regex", "aaab")
    one, other = follow(compiler, grammar), follow(compiler, grammar)
    allowed(one, tokenizer.encode("aa"))
    assert allowed(other, []) == allowed(follow(compiler, grammar), [])


def test_masks_after_drafts_are_those_after_the_same_output(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = Grammar("regex", "one(two|six)x")
    drafts = tokenizer.encode("onetwox")
    row = follow(compiler, grammar)
    for _ in range(2):  # what was drafted is not read
        masks = masks_after(row, [], drafts)
        for place, mask in enumerate(masks):
            wanted = allowed(follow(compiler, grammar), drafts[:place])
            assert tokens_of(mask) == wanted
    assert tokens_of(masks[-1]) == [tokenizer.eos_token_id]


def test_after_a_draft_that_may_not_be_there_nothing_is_written(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    row = follow(compiler, Grammar("regex", "one"))
    right, wrong = tokenizer.encode("o"), tokenizer.encode("x")
    masks = masks_after(row, [], [*right, *wrong, *wrong])
    assert (masks[2:] == -1).all()
    assert tokens_of(masks[1]) == allowed(row, right)


def test_what_there_is_no_other_way_to_is_expected(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    # The last of the characters there is no other way to may be part of a longer token.
    row = follow(compiler, Grammar("regex", "1234567(two|six)x"))
    for begun in ("", "12", "1234567t"):
        output = tokenizer.encode(begun)
        row.read(np.array(output, np.int32))
        expected = row.expected()
        assert len(expected) > 1
        assert "1234567twox".removeprefix(begun).startswith(tokenizer.decode(expected))
        masks = masks_after(row, output, expected)
        assert [tokens_of(mask) for mask in masks[:-1]] == [[token] for token in expected]
        row = follow(compiler, Grammar("regex", "1234567(two|six)x"))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "(a", "unclosed group"),
        ("json_schema", "{", "line 1 column 2"),
        ("json_schema", "[]", "a schema is a JSON object, got list"),
        ("json_schema", '{"type": "thing"}', "thing"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("ebnf", "root ::= other", "other"),
        ("ebnf", "start: (", "1"),
        ("structural_tag", "{}", "structures"),
        ("structural_tag", '{"structures": [{"begin": "<a>"}], "triggers": ["<"]}', "schema"),
        (
            "structural_tag",
            '{"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["["]}',
            "begins with no trigger",
        ),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_place(
    compiler: GrammarCompiler, kind, text: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(words)) as refusal:
        compiler.compile(Grammar(kind, text))
    assert refusal.value.param == kind


def test_a_fault_in_the_schema_of_the_answer_names_its_field(compiler: GrammarCompiler) -> None:
    wrong, right = '%json {"type": 1}', '%json {"type": "object"}'
    for answer, arguments, field in ((wrong, right, "json_schema"), (right, wrong, "ebnf")):
        text = f'start: "f" arguments | {JSON_RULE}\n{JSON_RULE}: {answer}\narguments: {arguments}'
        with pytest.raises(InvalidRequestError, match=r"^[a-z_]+: .*type must be") as refusal:
            compiler.compile(Grammar("ebnf", text))
        assert refusal.value.param == field


def test_a_fault_in_the_schema_of_the_answer_reads_as_in_a_schema_alone(
    compiler: GrammarCompiler,
) -> None:
    reasons = []
    for grammar in (
        Grammar("json_schema", '{"type": "thing"}'),
        Grammar("ebnf", f'start: {JSON_RULE}\n{JSON_RULE}: %json {{"type": "thing"}}'),
    ):
        with pytest.raises(InvalidRequestError) as refusal:
            compiler.compile(grammar)
        reasons.append(str(refusal.value))
    assert reasons[0] == reasons[1]


@pytest.mark.parametrize("rule", ["json", "response_json"])
def test_a_fault_in_a_rule_of_the_client_names_the_grammar(
    compiler: GrammarCompiler, rule: str
) -> None:
    with pytest.raises(InvalidRequestError, match="type must be") as refusal:
        compiler.compile(Grammar("ebnf", f'start: {rule}\n{rule}: %json {{"type": 1}}'))
    assert refusal.value.param == "ebnf"


@pytest.mark.long
def test_a_grammar_that_costs_too_much_is_given_up_and_says_why(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    row, output = follow(compiler, Grammar("ebnf", 'start: x\nx: x x | "a" | "b"')), []
    for _ in range(400):
        ids = allowed(row, output)
        if row.error:
            break
        output.append(max(ids))
    assert ids == [tokenizer.eos_token_id]
    assert re.search("items", row.error)
    assert "\n" not in row.error


def test_a_model_without_text_or_without_an_end_takes_no_grammar(folder: Path) -> None:
    for path, eos, words in ((folder / "no", (1,), "tokenizer.json"), (folder, (), "end-of-seq")):
        with pytest.raises(InvalidRequestError, match=words):
            GrammarCompiler(str(path), VOCAB_SIZE, eos).compile(Grammar("regex", "a"))


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("regex", "a+b", "aab"),
        ("ebnf", 'root ::= "yes" | "no"', "no"),
        ("json_schema", json.dumps(SCHEMA), '{"name": "Ada", "age": 7}'),
        ("structural_tag", json.dumps(TAGS), 'Well, <call>{"name": "Ada", "age": 7}</call>'),
    ],
)
@pytest.mark.parametrize("opening", ["", "<think>"])
def test_reasoning_may_come_before_what_a_grammar_holds(
    compiler: GrammarCompiler, tokenizer: Tokenizer, kind, text: str, answer: str, opening: str
) -> None:
    grammar = Grammar(kind, text, (opening, "</think>"))
    thought = f"{opening}What about <b> and </thin?</think>\n\n"
    for output in (thought, answer):
        row = follow(compiler, grammar)
        row.read(np.array(tokenizer.encode(output), np.int32))
        assert not row.error
    whole = follow(compiler, grammar)
    whole.read(np.array(tokenizer.encode(thought + answer), np.int32))
    assert not whole.error
    assert tokenizer.eos_token_id in allowed(whole, tokenizer.encode(thought + answer))
    # The answer alone does where the prompt has not opened the reasoning.
    ends = tokenizer.eos_token_id in allowed(follow(compiler, grammar), tokenizer.encode(answer))
    assert ends == (opening != "")
    # What comes after the reasoning is held to the grammar.
    wrong = follow(compiler, grammar)
    wrong.read(np.array(tokenizer.encode(f"{thought}<call>x"), np.int32))
    assert wrong.error


def test_marks_of_reasoning_that_are_special_tokens_are_tokens(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path / "special")
    tokens = json.loads((folder / "tokenizer.json").read_text())
    special = next(token for token in tokens["added_tokens"] if token["special"])
    eos = Tokenizer.load(str(folder)).eos_token_id
    assert eos is not None
    compiler = GrammarCompiler(str(folder), VOCAB_SIZE, (eos,))
    row = follow(compiler, Grammar("regex", "a", ("", special["content"])))
    written = Tokenizer.load(str(folder)).encode("a")
    assert len(allowed(row, written)) > 200
    assert allowed(row, [*written, special["id"], *written]) == [eos]


@pytest.mark.parametrize("opens_objects", [False, True])
@pytest.mark.parametrize("pattern", ["^a$", "^(a|b)$", "^a$|^b$"])
def test_after_all_named_properties_a_pattern_of_them_lets_nothing_begin(
    folder: Path, tokenizer: Tokenizer, pattern: str, opens_objects: bool
) -> None:
    assert tokenizer.eos_token_id is not None
    ends = (tokenizer.eos_token_id,)
    compiler = GrammarCompiler(str(folder), VOCAB_SIZE, ends, opens_objects=opens_objects)
    text = {"type": "string", "enum": ["x"]}
    schema = {
        "type": "object",
        "properties": {"a": text, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "patternProperties": {pattern: {}},
        "additionalProperties": False,
    }
    row = follow(compiler, Grammar("json_schema", json.dumps(schema)))
    after = [tokenizer.decode([i]) for i in allowed(row, tokenizer.encode('{"a": "x", "b": 1'))]
    assert "}" in after
    assert "," not in after

"""What is drawn by the grammar of a format's calls is read by its reader, as valid calls."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from sgl_jax.core.grammar import Grammar
from sgl_jax.core.step_plan import mask_words
from sgl_jax.grammar.compiler import GrammarCompiler
from sgl_jax.text.answer_parser import AnswerParser
from sgl_jax.text.tokenizer import Tokenizer
from tests.tokenizers import byte_level, save

TOOLS: dict[str, dict[str, Any]] = {
    'find "it"': {
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
    return save(byte_level(), tmp_path_factory.mktemp("calls") / "tokenizer")


def drawn(folder: Path, grammar: Grammar, seed: int) -> str:
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer.eos_token_id is not None
    eos = tokenizer.eos_token_id
    row = GrammarCompiler(str(folder), tokenizer.vocab_size, (eos,)).follow(grammar)
    rng, output = random.Random(seed), []
    for _ in range(2000):
        mask = np.zeros((1, mask_words(tokenizer.vocab_size)), np.int32)
        row.read(np.array(output, np.int32))
        row.masks([], mask)
        ids = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        token = eos if eos in ids and (rng.random() < 0.5 or len(ids) == 1) else rng.choice(ids)
        if token == eos:
            return tokenizer.decode(output)
        output.append(token)
    raise AssertionError(tokenizer.decode(output))


def calls_in(tool_format: str, text: str) -> list[tuple[str, Any]]:
    reader = AnswerParser(tool_format).reader(TOOLS, "", has_reasoning=False)
    calls: list[list[str]] = []
    for event in [*reader.feed(text), *reader.finish()]:
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
@pytest.mark.parametrize("tool_format", ["hermes", "llama3"])
def test_calls_that_are_drawn_are_read_and_valid(
    folder: Path, tool_format: str, is_single: bool, seed: int
) -> None:
    grammar = AnswerParser(tool_format).call_grammar
    assert grammar is not None
    text = drawn(folder, Grammar("ebnf", grammar.calls(TOOLS, is_single=is_single)), seed)
    calls = calls_in(tool_format, text)
    assert calls
    assert len(calls) == 1 or not is_single
    for name, arguments in calls:
        assert jsonschema_rs.is_valid(TOOLS[name], arguments)
        assert TOOLS[name] or arguments == {}

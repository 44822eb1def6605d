"""Outputs held to grammars: valid, and the same whatever else the engine does meanwhile."""

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.grammar import Grammar
from sgl_jax.engine.offline import Engine

DEMO = str(Path(__file__).parents[2] / "models" / "demo")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "answer": {"type": "integer", "minimum": 0, "maximum": 99},
            "sure": {"type": "boolean"},
        },
        "required": ["answer", "sure"],
        "additionalProperties": False,
    }
)
PROMPTS = ["What is 17 + 25?", "Name a colour.", "Tell me about rain.", "3, 2, 1"]
SAMPLING: list[dict[str, Any]] = [
    {"json_schema": SCHEMA, "temperature": 0.0},
    {"regex": "(red|green|blue)!{2}", "temperature": 0.9, "seed": 7},
    {"temperature": 0.8, "seed": 3, "ignore_eos": True},
    {"ebnf": 'root ::= "a" | "b" root', "temperature": 1.0, "seed": 1, "ignore_eos": True},
]
SETTINGS = {
    "warmup": "none",
    "check_memory": "busy",
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "chunked_prefill_size": 32,
    "page_size": 4,
}
VARIANTS = {
    "two ranks": {"dp_size": 2},
    "two chips": {"tp_size": 2},
    "no overlap": {"disable_overlap_schedule": True},
    "drafts": {"speculative_algorithm": "NGRAM"},
    "drafts, retract, two ranks": {
        "speculative_algorithm": "NGRAM",
        "dp_size": 2,
        "test_retract": True,
        "test_retract_interval": 3,
    },
    "retract": {"test_retract": True, "test_retract_interval": 3},
}


def outputs(engine: Engine) -> list[list[int]]:
    sampling = [{"max_new_tokens": 40, **each} for each in SAMPLING]
    results = engine.generate(PROMPTS, sampling)
    assert engine.server_info()["counters"]["compiles_after_ready"] == 0
    texts = [result.text for result in results]
    value = json.loads(texts[0])
    assert isinstance(value["answer"], int)
    assert isinstance(value["sure"], bool)
    assert re.fullmatch("(red|green|blue)!!", texts[1])
    assert len(results[2].output_ids) == 40
    assert re.fullmatch("b*a?", texts[3])
    return [result.output_ids for result in results]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(DEMO, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[list[int]]:
    return outputs(engine)


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name == "retract" else pytest.mark.long) for name in VARIANTS],
)
def test_outputs_are_valid_and_the_same(plain: list[list[int]], variant: str) -> None:
    with Engine(DEMO, **(SETTINGS | VARIANTS[variant])) as engine:  # type: ignore[operator]
        assert outputs(engine) == plain
        counters = engine.server_info()["counters"]
    assert (counters["requests_force_retracted"] > 0) == ("retract" in variant)
    assert (counters["accepted_draft_tokens"] > 0) == ("drafts" in variant)


def test_a_row_without_a_grammar_draws_what_it_would_alone(
    engine: Engine, plain: list[list[int]]
) -> None:
    alone = engine.generate(PROMPTS[2], {"max_new_tokens": 40, **SAMPLING[2]})
    assert alone.output_ids == plain[2]


def test_log_probabilities_are_those_of_the_model(engine: Engine) -> None:
    """Also of tokens that the grammar does not allow: the likeliest of all come first. Scaled ones
    are of the allowed tokens."""
    sampling = {"max_new_tokens": 4, "temperature": 0.0}
    options = {"return_logprob": True, "top_logprobs_num": 1, "logprobs_mode": "raw"}
    free = engine.generate(PROMPTS[1], sampling, **options)
    held = engine.generate(PROMPTS[1], {**sampling, "regex": "[0-9]+"}, **options)
    options["logprobs_mode"] = "scaled"
    scaled = engine.generate(PROMPTS[1], {**sampling, "regex": "[0-9]+"}, **options)
    assert scaled.output_ids == held.output_ids
    assert scaled.logprobs[0].top_ids == [scaled.logprobs[0].token_id]
    assert scaled.logprobs[0].logprob > held.logprobs[0].logprob
    assert held.logprobs[0].top_ids == free.logprobs[0].top_ids
    assert held.logprobs[0].token_id != free.logprobs[0].token_id
    assert held.logprobs[0].logprob < free.logprobs[0].logprob


def test_a_grammar_is_compiled_once_and_nothing_waits_for_it_but_its_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = engine._engine.core._grammars.queue
    compile_now, may_compile = grammars._compile, threading.Event()
    compiled: list[Grammar] = []

    def compile_later(grammar: Grammar) -> Any:
        assert may_compile.wait(60)
        compiled.append(grammar)
        return compile_now(grammar)

    monkeypatch.setattr(grammars, "_compile", compile_later)
    sampling = {"regex": "(one|two)!", "max_new_tokens": 9}
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(engine.generate, PROMPTS[1], sampling)
        free = engine.generate(PROMPTS[2], {"max_new_tokens": 40, **SAMPLING[2]})
        assert len(free.output_ids) == 40
        assert not held.done()
        may_compile.set()
        assert held.result(60).text in ("one!", "two!")
    assert engine.generate(PROMPTS[0], sampling).text in ("one!", "two!")
    assert compiled == [Grammar("regex", "(one|two)!")]


def test_a_refused_grammar_ends_the_whole_call(engine: Engine) -> None:
    sampling: list[dict[str, Any]] = [{"max_new_tokens": 4}, {"max_new_tokens": 4, "regex": "(a"}]
    with pytest.raises(InvalidRequestError, match="unclosed group") as refusal:
        engine.generate(PROMPTS[:2], sampling)
    assert refusal.value.param == "regex"
    assert (
        len(engine.generate(PROMPTS[0], {"max_new_tokens": 4, "ignore_eos": True}).output_ids) == 4
    )


def test_what_contradicts_a_grammar_is_refused(engine: Engine) -> None:
    for sampling, param in (
        ({"regex": "a", "ebnf": "root ::= 'a'"}, "ebnf"),
        ({"regex": "a", "min_new_tokens": 2}, "min_new_tokens"),
        ({"regex": ""}, "regex"),
        ({"regex": "a" * 70_000}, "regex"),
        ({"regex": "(a"}, "regex"),
    ):
        with pytest.raises(InvalidRequestError) as refusal:
            engine.generate("x", sampling)
        assert refusal.value.param == param


@pytest.mark.long
def test_a_grammar_that_costs_too_much_ends_its_request_alone(engine: Engine) -> None:
    ambiguous = {
        "ebnf": 'start: x\nx: x x | "a" | "b"',
        "temperature": 0.0,
        "logit_bias": {2: -100},
    }
    sampling = [{"max_new_tokens": 300, **each} for each in (ambiguous, SAMPLING[0])]
    given_up, held = engine.generate(PROMPTS[:2], sampling)
    assert given_up.finish_reason.type == "abort"
    assert "could not be held to its grammar" in given_up.finish_reason.message
    assert set(given_up.text) <= {"a", "b"}
    assert held.finish_reason.type == "stop"
    json.loads(held.text)

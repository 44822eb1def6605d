"""Real models compute what transformers does with the same weights, however they are run.

The golden data, of scripts/make_gguf_golden.py, are of 50 prompts of up to 920 tokens: questions,
and pieces of Python's documentation.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sgl_jax.engine.offline import Engine
from sgl_jax.engine.offline_results import Generation
from tests.support.packaged_models import GEMMA3, SMOLLM2, packaged_file

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

FOLDER = Path(__file__).parents[1] / "golden" / "gguf"
NAMES = {SMOLLM2: "smollm2", GEMMA3: "gemma3_270m"}
NUM_QUESTIONS = 20  # the first prompts; the rest is running text
MAX_DIFFERENCE = 1e-3  # of two log-probabilities
NUM_NEW = 24
GREEDY = {"temperature": 0.0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "context_length": 1024,
    "max_running_requests": 8,
    "chunked_prefill_size": 256,
    "warmup": "none",
    "check_memory": "busy",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {"chunked_prefill_size": 1024, "disable_radix_cache": True},
    "chunked": {"chunked_prefill_size": 64, "disable_radix_cache": True},
    "cached": {},
    "retracted": {"test_retract": True, "test_retract_interval": 5},
    "host memory": {
        "max_total_tokens": 2048,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 6.0,
        "hicache_fetch_policy": "always",
    },
}
ASKED_TWICE = ("cached", "host memory")
# Perplexity of the running text, relative to float32.
MAX_RATIO = {"none": 1.0001, "int8": 1.02, "int4": 2.0}


class Golden(NamedTuple):
    """What transformers computes, by prompt."""

    prompts: list[list[int]]
    prompt_logprobs: list[np.ndarray]
    tokens: list[list[int]]
    logprobs: list[list[float]]


@functools.cache
def golden(package: str) -> Golden:
    with np.load(FOLDER / f"{NAMES[package]}.npz") as found:
        ends = np.cumsum(found["prompt_lens"])[:-1]
        return Golden(
            [prompt.tolist() for prompt in np.split(found["prompts"], ends)],
            np.split(found["prompt_logprobs"], ends),
            found["tokens"].tolist(),
            found["logprobs"].tolist(),
        )


def assert_golden(results: Sequence[Generation], wanted: Golden, skipped: int = 0) -> None:
    """The same tokens, after the first `skipped`; and nearly the same log-probabilities."""
    largest = 0.0
    for result, tokens, logprobs in zip(results, wanted.tokens, wanted.logprobs, strict=True):
        assert result.output_ids == tokens[skipped:]
        for found, logprob in zip(result.logprobs, logprobs[skipped:], strict=True):
            largest = max(largest, abs(found.logprob - logprob))
    print(f"largest difference of log-probabilities: {largest:.1e}")
    assert largest <= MAX_DIFFERENCE


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("package", NAMES)
def test_greedy_tokens_are_those_of_transformers(package: str, variant: str) -> None:
    wanted = golden(package)
    file = str(packaged_file(package))
    with Engine(file, **SETTINGS | VARIANTS[variant]) as engine:
        for _ in range(1 + (variant in ASKED_TWICE)):
            results = engine.generate(
                input_ids=wanted.prompts, sampling_params=GREEDY, return_logprob=True
            )
            assert_golden(results, wanted)
        counters = engine.server_info()["counters"]
    assert (counters["requests_force_retracted"] > 25) == (variant == "retracted")
    assert (counters.get("host_fetched_tokens", 0) > 0) == (variant == "host memory")
    if variant in ASKED_TWICE:
        assert sum(result.cached_tokens for result in results) > 1000


@pytest.mark.parametrize("package", NAMES)
def test_turns_of_sessions_continue_like_one_prompt(package: str) -> None:
    """A prompt in two turns; the second begins with tokens that the model had said next."""
    # Every fifth prompt, because they run one after another.
    wanted = Golden._make(each[4::5] for each in golden(package))
    begun, given = 8, 2
    with Engine(str(packaged_file(package)), **SETTINGS, test_retract=True) as engine:
        results = []
        for prompt, tokens in zip(wanted.prompts, wanted.tokens, strict=True):
            session = {"id": engine.open_session(streaming=True)}
            cuts = [prompt[: len(prompt) // 2], prompt[len(prompt) // 2 :]]
            turn(engine, session, cuts[0], 0)
            assert turn(engine, session, cuts[1], begun).output_ids == tokens[:begun]
            new = tokens[begun : begun + given]
            results.append(turn(engine, session, new, NUM_NEW - begun - given))
            assert results[-1].cached_tokens >= len(prompt)
            engine.close_session(session["id"])
    assert_golden(results, wanted, begun + given)


def turn(engine: Engine, session: dict[str, str], ids: list[int], num_new: int) -> Generation:
    (result,) = engine.generate(
        input_ids=[ids],
        sampling_params=GREEDY | {"max_new_tokens": num_new},
        session_params=session,
        return_logprob=True,
    )
    return result


@pytest.mark.parametrize("scheme", MAX_RATIO)
@pytest.mark.parametrize("package", NAMES)
def test_the_perplexity_of_running_text(package: str, scheme: str) -> None:
    wanted = golden(package)
    file = str(packaged_file(package))
    with Engine(file, **SETTINGS, quantization=scheme, disable_radix_cache=True) as engine:
        results = engine.generate(
            input_ids=wanted.prompts[NUM_QUESTIONS:],
            sampling_params=GREEDY | {"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
    found = [[own.logprob for own in result.prompt_logprobs[1:]] for result in results]
    texts = [list(logprobs[1:]) for logprobs in wanted.prompt_logprobs[NUM_QUESTIONS:]]
    reference, own = perplexity(texts), perplexity(found)
    num_tokens = sum(map(len, texts))
    print(f"{package} {scheme}: perplexity {own:.3f} of {num_tokens} tokens ({reference:.3f})")
    assert own / reference <= MAX_RATIO[scheme]
    if scheme == "none":
        for mine, theirs in zip(found, texts, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=MAX_DIFFERENCE)


def perplexity(logprobs: Sequence[Sequence[float]]) -> float:
    numbers = [logprob for text in logprobs for logprob in text]
    return math.exp(-sum(numbers) / len(numbers))

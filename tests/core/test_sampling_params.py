"""Sampling parameters: each limit holds at its edge and is named when it is broken."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, SamplingParams

VOCAB_SIZE = 100

ALLOWED = [
    {},
    {"temperature": 0.0},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 1},
    {"top_p": 1.0},
    {"top_p": 1e-6},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"repetition_penalty": 0.5},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"max_new_tokens": 0},
    {"max_new_tokens": 1},
    {"max_new_tokens": 5, "min_new_tokens": 5},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"stop": ("a",) * MAX_STOP_STRINGS},
    {"stop_token_ids": (0, 99)},
    {"logit_bias": {0: -100.0, 99: 100.0}},
]

REFUSED = [
    ({"temperature": -0.1}, "temperature", r"\[0.0, 10000.0\], got -0.1"),
    ({"temperature": math.nan}, "temperature", "got nan"),
    ({"temperature": math.inf}, "temperature", "got inf"),
    ({"top_p": 0.0}, "top_p", r"\(0.0, 1.0\], got 0.0"),
    ({"top_p": 1.01}, "top_p", "got 1.01"),
    ({"min_p": -0.01}, "min_p", "got -0.01"),
    ({"min_p": 1.01}, "min_p", "got 1.01"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "got 0.0"),
    ({"repetition_penalty": 1e-44}, "repetition_penalty", "got 1e-44"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "got 2.1"),
    ({"presence_penalty": -2.1}, "presence_penalty", "got -2.1"),
    ({"top_k": -2}, "top_k", "got -2"),
    ({"max_new_tokens": -1}, "max_new_tokens", "got -1"),
    ({"min_new_tokens": -1}, "min_new_tokens", "got -1"),
    ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens", r"\(5\) exceeds .* \(4\)"),
    ({"seed": 2**63}, "seed", "got 9223372036854775808"),
    ({"stop": ("a",) * (MAX_STOP_STRINGS + 1)}, "stop", "at most 16 stop strings, got 17"),
    ({"stop": ("a", "")}, "stop", "must not be empty"),
    ({"stop_token_ids": tuple(range(17))}, "stop_token_ids", "at most 16 stop_token_ids, got 17"),
    (
        {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)},
        "logit_bias",
        "at most 64 entries in logit_bias, got 65",
    ),
    ({"logit_bias": {100: 1.0}}, "logit_bias", "holds 100"),
    ({"logit_bias": {1: 100.5}}, "logit_bias", r"\[-100.0, 100.0\], got 100.5"),
    ({"logit_bias": {1: math.nan}}, "logit_bias", "got nan"),
]


@pytest.mark.parametrize("values", ALLOWED, ids=str)
def test_values_at_the_edge_are_allowed(values: dict[str, Any]) -> None:
    SamplingParams(**values).checked(VOCAB_SIZE)


@pytest.mark.parametrize(("values", "param", "words"), REFUSED, ids=lambda part: str(part)[:40])
def test_values_outside_are_refused_by_name(values: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        SamplingParams(**values).checked(VOCAB_SIZE)
    assert caught.value.param == param


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-44, 2e-38, 9e-7])
def test_a_temperature_that_float32_cannot_divide_by_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).checked(VOCAB_SIZE).temperature == 0.0
    assert SamplingParams(temperature=1e-6).checked(VOCAB_SIZE).temperature == 1e-6


@pytest.mark.parametrize("top_p", [5e-324, 1e-44, 1e-38])
def test_a_tiny_top_p_is_never_rounded_to_none(top_p: float) -> None:
    checked = SamplingParams(top_p=top_p).checked(VOCAB_SIZE)
    assert np.float32(checked.top_p) >= np.finfo(np.float32).tiny


def test_stop_tokens_outside_the_vocabulary_are_left_out() -> None:
    given = SamplingParams(stop_token_ids=(5, -1, 100, 99, 5, 2**40))
    assert given.checked(VOCAB_SIZE).stop_token_ids == (5, 99)


def test_an_unknown_field_is_not_ignored() -> None:
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.convert({"temprature": 1.0}, SamplingParams)


def test_seed_minus_one_draws_a_seed() -> None:
    assert SamplingParams(seed=-1).checked(vocab_size=8).seed is None
    assert SamplingParams(seed=-2).checked(vocab_size=8).seed == -2

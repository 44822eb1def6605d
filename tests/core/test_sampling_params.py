"""Sampling parameters: each limit holds at its edge and is named when it is broken."""

import math

import msgspec
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
    ({"frequency_penalty": 2.1}, "frequency_penalty", "got 2.1"),
    ({"presence_penalty": -2.1}, "presence_penalty", "got -2.1"),
    ({"top_k": -2}, "top_k", "got -2"),
    ({"max_new_tokens": 0}, "max_new_tokens", "at least 1, got 0"),
    ({"min_new_tokens": -1}, "min_new_tokens", "got -1"),
    ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens", r"\(5\) exceeds .* \(4\)"),
    ({"seed": 2**63}, "seed", "64 bits"),
    ({"stop": ("a",) * (MAX_STOP_STRINGS + 1)}, "stop", "at most 16 stop strings, got 17"),
    ({"stop": ("a", "")}, "stop", "must not be empty"),
    ({"stop_token_ids": tuple(range(9))}, "stop_token_ids", "at most 8 stop_token_ids, got 9"),
    ({"stop_token_ids": (100,)}, "stop_token_ids", r"holds 100, outside .*\[0, 100\)"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids", "holds -1"),
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
def test_values_at_the_edge_are_allowed(values: dict[str, object]) -> None:
    SamplingParams(**values).validate(VOCAB_SIZE)


@pytest.mark.parametrize(("values", "param", "words"), REFUSED, ids=lambda part: str(part)[:40])
def test_values_outside_are_refused_by_name(
    values: dict[str, object], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        SamplingParams(**values).validate(VOCAB_SIZE)
    assert caught.value.param == param


def test_an_unknown_field_is_not_ignored() -> None:
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.convert({"temprature": 1.0}, SamplingParams)

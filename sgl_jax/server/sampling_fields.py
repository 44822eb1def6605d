"""Sampling parameters as clients of every protocol send them, with the engine's ranges."""

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.grammar import MAX_GRAMMAR_CHARS
from sgl_jax.core.request_limits import MAX_CHOICES
from sgl_jax.core.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    RANGES,
    SamplingParams,
)
from sgl_jax.server import unserved_fields
from sgl_jax.server.strict_model import StrictModel

_MAX_STOP_IDS_SENT = 256  # each is looked at for every answer, though few may count
_NUM_SEEDS = 2**64


def in_range(name: str, description: str | None = None) -> Any:
    """A field that may be left out, held to the range of `name`."""
    low, high, is_low_open = RANGES[name]
    above, least = (low, None) if is_low_open else (None, low)
    return Field(default=None, gt=above, ge=least, le=high, description=description)


def _few_keys(bias: Any) -> Any:
    """Before millions of entries are looked at one by one."""
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"at most {MAX_LOGIT_BIAS} entries in logit_bias, got {len(bias)}")
    return bias


_Bias = Annotated[float, Field(ge=RANGES["logit_bias"].low, le=RANGES["logit_bias"].high)]
_StopString = Annotated[str, Field(min_length=1)]


_GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
# An object, or its JSON.
_Json = _GrammarText | dict[str, Any]


class SamplingFields(StrictModel):
    """The sampling parameters that all protocols spell alike."""

    unserved = unserved_fields.REQUEST

    temperature: float | None = in_range("temperature", "0: greedy")
    top_p: float | None = in_range("top_p")
    top_k: int | None = in_range("top_k", "-1 or 0: all")
    min_p: float | None = in_range("min_p")
    frequency_penalty: float | None = in_range("frequency_penalty")
    presence_penalty: float | None = in_range("presence_penalty")
    repetition_penalty: float | None = in_range("repetition_penalty")
    logit_bias: Annotated[dict[str, _Bias] | None, BeforeValidator(_few_keys)] = None
    seed: int | None = in_range("seed")
    sampling_seed: int | None = in_range("seed", "same as seed")
    min_new_tokens: int | None = in_range("min_new_tokens")
    stop: (
        str
        | Annotated[list[_StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)]
        | None
    ) = None
    stop_token_ids: (
        Annotated[list[int], Field(fail_fast=True, max_length=_MAX_STOP_IDS_SENT)] | None
    ) = Field(default=None, description="those outside the vocabulary are ignored")
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    json_schema: _Json | None = Field(default=None, description="the output is JSON that it allows")
    regex: _GrammarText | None = Field(default=None, description="of the whole output")
    ebnf: _GrammarText | None = Field(default=None, description="in GBNF, or in Lark's form")
    structural_tag: _Json | None = Field(
        default=None, description="free text with JSON between tags: structures and triggers"
    )
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="answers to each prompt")

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    def to_sampling(self, choice: int) -> SamplingParams:
        """As the engine takes them; a given seed differs from choice to choice."""
        values = [(name, vars(self).get(sent)) for sent, name in _ENGINE_NAMES.items()]
        given = {name: value for name, value in values if value is not None}
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]] if given["stop"] else []
        for name in ("stop", "stop_token_ids"):
            if name in given:
                given[name] = tuple(given[name])
        if "logit_bias" in given:
            given["logit_bias"] = _token_bias(given["logit_bias"])
        for name in ("json_schema", "structural_tag"):
            if isinstance(given.get(name), dict):
                given[name] = json.dumps(given[name])
        if "seed" in given:
            low = int(RANGES["seed"].low)
            given["seed"] = (given["seed"] + choice - low) % _NUM_SEEDS + low
        return SamplingParams(**given)


# What clients of some protocol send -> the engine's name. Where several were sent, the last counts.
_ENGINE_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "sampling_seed": "seed",
    **{name: name for name in SamplingParams.__struct_fields__},
    "min_tokens": "min_new_tokens",
}


def _token_bias(bias: dict[str, float]) -> dict[int, float]:
    """JSON has only string keys: `{"17": -1.0}` -> `{17: -1.0}`."""
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError as error:
        raise InvalidRequestError(
            "the keys of logit_bias must be token ids, as decimal numbers", "logit_bias"
        ) from error

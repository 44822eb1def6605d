"""Body fields shared by several APIs."""

import json
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.grammar import MAX_GRAMMAR_CHARS, lenient
from sgl_jax.core.messages import Namespace, SessionId, SessionTurn
from sgl_jax.core.request_limits import (
    INT32,
    MAX_CHOICES,
    MAX_PRIORITY,
    MAX_REQUESTS_PER_CALL,
    MAX_RID_CHARS,
    MAX_USER_CHARS,
    MIN_PRIORITY,
    check_num_requests,
    for_each,
    one_namespace,
)
from sgl_jax.core.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RANDOM_SEED,
    RANGES,
    LogprobsMode,
    SamplingParams,
    choice_seed,
)
from sgl_jax.server import unserved_fields
from sgl_jax.server.hint_fields import HintFields
from sgl_jax.server.strict_model import Part, StrictModel

T = TypeVar("T")
Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID_CHARS)]
User = Annotated[str, Field(max_length=MAX_USER_CHARS)]
Priority = Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
# Validation of a list ends at its first error.
Items = Annotated[list[T], Field(fail_fast=True)]
# One value per prompt.
ForEach = Annotated[Items[T], Field(max_length=MAX_REQUESTS_PER_CALL)]
TokenIds = Items[Annotated[int, Field(ge=0)]]


def _check_metadata(given: Any) -> Any:
    """Refuse metadata beyond OpenAI's limits, without showing the client's keys in the message."""
    is_within = not isinstance(given, dict) or (
        len(given) <= _MAX_METADATA
        and all(len(key) <= _MAX_METADATA_KEY_CHARS for key in given)
        and all(isinstance(v, str) and len(v) <= _MAX_METADATA_CHARS for v in given.values())
    )
    if not is_within:
        raise ValueError(
            f"at most {_MAX_METADATA} pairs, each of a key of at most {_MAX_METADATA_KEY_CHARS} "
            f"characters and a text of at most {_MAX_METADATA_CHARS}"
        )
    return given


_MAX_METADATA, _MAX_METADATA_KEY_CHARS, _MAX_METADATA_CHARS = 16, 64, 512  # OpenAI's
Metadata = Annotated[
    dict[str, str], Field(max_length=_MAX_METADATA), BeforeValidator(_check_metadata)
]


_RANK_FIELDS = ("dp_rank", "routed_dp_rank", "data_parallel_rank")


class RequestFields(HintFields):
    """The fields shared by all protocols. A list has one entry per prompt."""

    unserved = unserved_fields.REQUEST

    model: str = "default"
    stream: bool | None = None
    rid: Rid | ForEach[Rid] | None = Field(default=None, description="name of the request")
    dp_rank: int | None = Field(default=None, ge=0, description="data-parallel rank to run on")
    routed_dp_rank: int | None = Field(default=None, ge=0, description="same as dp_rank")
    data_parallel_rank: int | None = Field(default=None, ge=0, description="same as dp_rank")
    cache_salt: Namespace | ForEach[Namespace] | None = Field(
        default=None, description="cached prefixes are shared only with requests of the same"
    )
    extra_key: Namespace | ForEach[Namespace] | None = Field(
        default=None, description="same as cache_salt"
    )
    priority: Priority | ForEach[Priority] | None = Field(
        default=None, description="without effect but with --enable-priority-scheduling"
    )
    user: User | None = Field(
        default=None, description='the tenant, unless the API key names one; "": none'
    )

    logprobs_mode: LogprobsMode | None = Field(
        default=None,
        description="raw: log-probabilities are the model's; scaled: after penalties, grammar and "
        "temperature; processed: after top_k, top_p and min_p, too; default: as --logprobs-mode",
    )

    def options_of(self, num_prompts: int) -> list[dict[str, Any]]:
        """Return arguments of `RequestChecks.prepare` for each prompt. Raises `InvalidRequestError`
        for a list of another length, and for several ranks."""
        ranks = [(getattr(self, name), name) for name in _RANK_FIELDS]
        given = [(rank, name) for rank, name in ranks if rank is not None]
        dp_rank = given[0][0] if given else None
        if any(rank != dp_rank for rank, _ in given):
            raise InvalidRequestError(
                f"{', '.join(_RANK_FIELDS)} are names of one field: send one of them", given[-1][1]
            )
        names = ("rid", "priority", "extra_key", "cache_salt")
        columns = [for_each(name, getattr(self, name), num_prompts) for name in names]
        return [
            {
                "rid": rid,
                "priority": priority,
                "dp_rank": dp_rank,
                "namespace": one_namespace(*own),
                "logprobs_mode": self.logprobs_mode,
            }
            for rid, priority, *own in zip(*columns, strict=True)
        ]


class WholeAnswerFields(RequestFields):
    """Fields of routes without streams."""

    @model_validator(mode="after")
    def _no_stream(self) -> "WholeAnswerFields":
        if self.stream:
            raise InvalidRequestError("answers of this route do not come in a stream", "stream")
        return self


_MAX_STOP_IDS_SENT = 256  # each is checked for every answer, although few may count


def in_range(name: str, description: str | None = None) -> Any:
    """Return an optional field, limited to the range of `name`."""
    low, high, is_low_open = RANGES[name]
    above, least = (low, None) if is_low_open else (None, low)
    return Field(default=None, gt=above, ge=least, le=high, description=description)


def _few_keys(bias: Any) -> Any:
    """Refuse millions of entries before each is validated."""
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"at most {MAX_LOGIT_BIAS} entries in logit_bias, got {len(bias)}")
    return bias


_Bias = Annotated[float, Field(ge=RANGES["logit_bias"].low, le=RANGES["logit_bias"].high)]
StopStrings = Annotated[
    Items[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOP_STRINGS)
]
_GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
# An object, or its JSON text.
_Json = _GrammarText | dict[str, Any]


class SamplingFields(StrictModel):
    """The sampling parameters with the same name in all protocols."""

    unserved = unserved_fields.REQUEST

    temperature: float | None = in_range("temperature", "0: greedy")
    top_p: float | None = in_range("top_p")
    top_k: int | None = in_range("top_k", "-1 or 0: all")
    min_p: float | None = in_range("min_p")
    frequency_penalty: float | None = in_range("frequency_penalty")
    presence_penalty: float | None = in_range("presence_penalty")
    repetition_penalty: float | None = in_range("repetition_penalty")
    logit_bias: Annotated[dict[str, _Bias] | None, BeforeValidator(_few_keys)] = None
    seed: int | None = in_range("seed", f"{RANDOM_SEED}: random")
    sampling_seed: int | None = in_range("seed", "same as seed")
    min_new_tokens: int | None = in_range("min_new_tokens")
    stop: str | StopStrings | None = None
    stop_token_ids: Items[int] | None = Field(
        default=None,
        max_length=_MAX_STOP_IDS_SENT,
        description="those outside the vocabulary are ignored; "
        f"at most {MAX_STOP_TOKEN_IDS} others",
    )
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
        return self.n or 1

    def to_sampling(self, choice: int) -> SamplingParams:
        """Return the engine's parameters. Each choice has a different seed."""
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
        if given.get("seed", RANDOM_SEED) != RANDOM_SEED:
            given["seed"] = choice_seed(given["seed"], choice)
        return SamplingParams(**given)


# Name in some API -> the engine's name. If a client sends several, the last in this table counts.
_ENGINE_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "sampling_seed": "seed",
    **{name: name for name in SamplingParams.__struct_fields__},
    "min_tokens": "min_new_tokens",
}


def _token_bias(bias: dict[str, float]) -> dict[int, float]:
    """Convert string keys, the only kind in JSON, to token ids: `{"17": -1.0}` -> `{17: -1.0}`."""
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError as error:
        raise InvalidRequestError(
            "the keys of logit_bias must be token ids, as decimal numbers", "logit_bias"
        ) from error


class SessionParams(StrictModel):
    """`session_params`: the session that a request continues, and how."""

    id: SessionId
    rid: Rid | None = Field(
        default=None, description="the turn to append to; null starts a new conversation"
    )
    offset: int | None = Field(
        default=None, ge=-INT32, lt=INT32, description="tokens of the history to keep; 0: all"
    )
    replace: bool | None = Field(default=None, description="drop all turns after `rid`")
    drop_previous_output: bool | None = Field(
        default=None, description="append to the prompt of `rid`, not to its output"
    )


def session_turn(params: SessionParams | None) -> SessionTurn | None:
    return None if params is None else SessionTurn(**params.model_dump(exclude_none=True))


def prompts_of(given: Any, num_choices: int, field: str) -> list[str | list[int]]:
    """Return the prompts of a field that takes one or a list of them, as text or token ids."""
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts: list[str | list[int]] = [given] if is_one else given
    check_num_requests(len(prompts), num_choices, field)
    return prompts


def refuse_several(count: int, field: str) -> None:
    """Raise `InvalidRequestError` if `field` makes several requests of a session's turn."""
    if count != 1:
        raise InvalidRequestError(
            f"a session takes one request at a time, {field} makes {count}", field
        )


class StreamOptions(Part):
    """`include_usage`: a last event with the usage; `continuous_usage_stats`: in every event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(StrictModel):
    """A schema with a name. Without `strict`, parts unsupported by grammars are dropped."""

    name: str
    description: str | None = None
    json_value: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """Any text, a JSON object, JSON by a schema, or tags (SGLang's)."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = Field(
        default=None, description="of a structural_tag: each with begin, schema and end"
    )
    triggers: list[str] | None = Field(default=None, description="of a structural_tag")

    def grammar(self) -> dict[str, str]:
        """Return the equivalent sampling parameter, by name; empty for text."""
        if self.type == "json_object":
            return {"json_schema": '{"type": "object"}'}
        if self.type == "structural_tag":
            tags = {"structures": self.structures, "triggers": self.triggers}
            return {"structural_tag": json.dumps(tags)}
        if self.type == "json_schema":
            if self.json_schema is None:
                raise InvalidRequestError(
                    "a response_format of type json_schema has a json_schema", "response_format"
                )
            given = self.json_schema
            held = held_schema(given.json_value, is_strict=given.strict)
            return {"json_schema": json.dumps(held)}
        return {}


class GenerationFields(RequestFields, SamplingFields):
    """Fields of chats and completions."""

    stream_options: StreamOptions | None = None
    min_tokens: int | None = in_range("min_new_tokens", "same as min_new_tokens")
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = Field(
        default=None, description="of prompt and output; not in a stream"
    )

    def to_sampling(self, choice: int) -> SamplingParams:
        sampling = super().to_sampling(choice)
        if self.response_format is None:
            return sampling
        return msgspec.structs.replace(sampling, **self.response_format.grammar())

    @model_validator(mode="after")
    def _whole_answers_only(self) -> "GenerationFields":
        for name in ("return_token_ids", "return_prompt_token_ids", "return_meta_info"):
            if self.stream and getattr(self, name, None):
                raise InvalidRequestError(f"{name} is not there in a stream", name)
        return self


def held_schema(schema: dict[str, Any] | None, *, is_strict: bool | None) -> dict[str, Any]:
    return lenient(schema) if schema and not is_strict else schema or {}

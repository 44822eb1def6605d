"""Bodies of the OpenAI routes: what clients may send, with SGLang's additions.

Every field is known: one that is not, or that asks for something this server cannot do, is
refused by name rather than ignored. A null counts as not given.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.sampling_params import MAX_STOP_STRINGS, MAX_TOP_LOGPROBS, SamplingParams
from sgl_jax.server.session_protocol import SessionId, SessionParams, refuse_several
from sgl_jax.server.strict_model import (
    ForEach,
    LogitBias,
    Namespace,
    Priority,
    StrictModel,
    TokenIds,
)

_MAX_MESSAGES = 16_384
_INT64 = 2**63


class StreamOptions(StrictModel):
    """`include_usage`: a last event with the usage; `continuous_usage_stats`: in every event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(StrictModel):
    """Only free text for now."""

    type: Literal["text"]


class GenerationFields(StrictModel):
    """What chat and completions have in common."""

    model: str = "default"
    n: int | None = Field(default=None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: float | None = Field(default=None, ge=0, le=1e4)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, description="-1 or 0: all")
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=1e4)
    logit_bias: LogitBias | None = None
    seed: int | None = Field(default=None, ge=-_INT64, lt=_INT64)
    stop: (
        str
        | Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(fail_fast=True, max_length=MAX_STOP_STRINGS),
        ]
        | None
    ) = None
    stop_token_ids: TokenIds | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    min_new_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    rid: str | None = Field(default=None, min_length=1, max_length=200)
    dp_rank: int | None = Field(default=None, ge=0)
    cache_salt: Namespace | None = Field(
        default=None, description="cached prefixes are shared only with requests of the same"
    )
    priority: Priority | None = Field(
        default=None, description="without effect but with --enable-priority-scheduling"
    )

    response_format: ResponseFormat | None = None

    # Accepted and without effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def sampling(self, max_new_tokens: int | None, choice: int) -> SamplingParams:
        """Sampling parameters of one choice; a given seed differs from choice to choice."""
        given = given_sampling(self, GenerationFields)
        if self.min_tokens is not None:
            given["min_new_tokens"] = self.min_tokens
        if self.seed is not None:
            given["seed"] = (self.seed + choice + _INT64) % (2 * _INT64) - _INT64
        return SamplingParams(max_new_tokens=max_new_tokens, **given)


class TextPart(StrictModel):
    """A piece of a message; images and audio are not supported."""

    type: Literal["text"]
    text: str


class ChatMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    reasoning_content: str | None = None
    # Part of what OpenAI's answers hold, so clients send them back. Refused if they say something.
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it: one string, and no developers."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": content}
        for extra in ("name", "reasoning_content"):
            if getattr(self, extra) is not None:
                message[extra] = getattr(self, extra)
        return message


class ChatRequest(GenerationFields):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(
        min_length=1, max_length=_MAX_MESSAGES
    )
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    session_id: SessionId | None = Field(
        default=None, description="of a streaming session, which finds what is new by itself"
    )

    parallel_tool_calls: bool | None = None  # without effect: there are no tools
    tools: Annotated[list[Any], Field(json_schema_extra={"maxItems": 0})] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None

    @field_validator("tools")
    @classmethod
    def _no_tools(cls, tools: list[Any] | None) -> list[Any] | None:
        if tools:
            raise ValueError("tools are not supported")
        return tools

    @model_validator(mode="after")
    def _logprobs_for_top_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _one_turn(self) -> "ChatRequest":
        if self.session_id is not None:
            refuse_several(self.num_choices, "n")
        return self

    @property
    def template_args(self) -> dict[str, Any]:
        """Variables for the chat template."""
        effort = (
            {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        )
        return effort | (self.chat_template_kwargs or {})


class CompletionRequest(GenerationFields):
    """Body of `/v1/completions`."""

    prompt: str | TokenIds | ForEach[str] | ForEach[TokenIds]
    max_tokens: int | None = Field(default=None, ge=0, description="0 only with echo")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, le=128, description="must equal n")
    suffix: Annotated[str, Field(max_length=0)] | None = None
    session_params: SessionParams | None = None

    @model_validator(mode="after")
    def _supported_combination(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.num_choices:
            raise InvalidRequestError(
                f"best_of must equal n ({self.num_choices}), got {self.best_of}", "best_of"
            )
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens 0 is allowed only with echo", "max_tokens")
        return self

    @model_validator(mode="after")
    def _one_turn(self) -> "CompletionRequest":
        if self.session_params is not None:
            refuse_several(self.num_choices, "n")
            refuse_several(len(self.prompts), "prompt")
            if self.echo:
                raise InvalidRequestError("a session's turn cannot be echoed", "echo")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if is_one else prompt


def given_sampling(body: BaseModel, fields: type[BaseModel]) -> dict[str, Any]:
    """The sampling parameters that `body` sets among `fields`, in the forms the engine takes."""
    names = set(SamplingParams.__struct_fields__) & set(fields.model_fields)
    given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]] if given["stop"] else []
    for name in ("stop", "stop_token_ids"):
        if name in given:
            given[name] = tuple(given[name])
    if "logit_bias" in given:
        given["logit_bias"] = _token_bias(given["logit_bias"])
    return given


def _token_bias(bias: dict[str, float]) -> dict[int, float]:
    """JSON has only string keys: `{"17": -1.0}` -> `{17: -1.0}`."""
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError as error:
        raise InvalidRequestError(
            "the keys of logit_bias must be token ids, as decimal numbers", "logit_bias"
        ) from error

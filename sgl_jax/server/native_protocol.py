"""Body and answers of `/generate` and of the routes that manage the server, as in SGLang."""

from typing import Annotated, Any, TypeVar

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.sampling_params import MAX_STOP_STRINGS, MAX_TOP_LOGPROBS, SamplingParams
from sgl_jax.server.logprobs import NativeLogprob
from sgl_jax.server.openai_protocol import given_sampling
from sgl_jax.server.session_protocol import SessionParams, refuse_several
from sgl_jax.server.strict_model import (
    ForEach,
    LogitBias,
    Namespace,
    Priority,
    Rid,
    StrictModel,
    TokenIds,
)

T = TypeVar("T")


class NativeSampling(StrictModel):
    """`sampling_params`: SGLang's names; ranges as in `SamplingParams`."""

    max_new_tokens: int | None = Field(default=None, ge=1)
    min_new_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=1e4)
    top_k: int | None = Field(default=None, ge=-1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=1e4)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    sampling_seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="same as seed"
    )
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None = (
        None
    )
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = Field(
        default=None, ge=1, le=1, description="send the prompt several times instead"
    )

    def to_sampling(self) -> SamplingParams:
        """As the engine takes it."""
        given = given_sampling(self, NativeSampling)
        if self.seed is None and self.sampling_seed is not None:
            given["seed"] = self.sampling_seed
        return SamplingParams(**given)


class GenerateBody(StrictModel):
    """Body of `/generate`: `text` or `input_ids`, one prompt or a list."""

    text: str | ForEach[str] | None = None
    input_ids: TokenIds | ForEach[TokenIds] | None = None
    sampling_params: NativeSampling | ForEach[NativeSampling] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(default=None, ge=-1)
    top_logprobs_num: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    rid: Rid | ForEach[Rid] | None = None
    dp_rank: int | None = Field(default=None, ge=0)
    session_params: SessionParams | None = None
    extra_key: Namespace | ForEach[Namespace] | None = Field(
        default=None, description="cached prefixes are shared only with requests of the same"
    )
    priority: Priority | ForEach[Priority] | None = Field(
        default=None, description="without effect but with --enable-priority-scheduling"
    )

    @property
    def is_list(self) -> bool:
        """Whether several prompts were sent, so that the answer is a list."""
        ids = self.input_ids
        return isinstance(self.text, list) or (isinstance(ids, list) and _is_nested(ids))

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequestError("send either text or input_ids", "text")
        given: Any = self.input_ids if self.text is None else self.text
        prompts: list[str | list[int]] = given if self.is_list else [given]
        if not prompts:
            raise InvalidRequestError("the list of prompts is empty", self.prompt_field)
        if self.session_params is not None:
            refuse_several(len(prompts), self.prompt_field)
        return prompts

    @property
    def prompt_field(self) -> str:
        return "input_ids" if self.text is None else "text"

    def sampling_of(self, num_prompts: int) -> list[SamplingParams]:
        """One for each prompt."""
        given = self.sampling_params
        if isinstance(given, list):
            _check_length("sampling_params", len(given), num_prompts)
            return [sampling.to_sampling() for sampling in given]
        return [(given or NativeSampling()).to_sampling()] * num_prompts

    def rids_of(self, num_prompts: int) -> list[str | None]:
        """One for each prompt; a single name is shared."""
        return _each("rid", self.rid, num_prompts)

    def namespaces_of(self, num_prompts: int) -> list[str]:
        """One for each prompt; a single `extra_key` is shared."""
        return [key or "" for key in _each("extra_key", self.extra_key, num_prompts)]

    def priorities_of(self, num_prompts: int) -> list[int | None]:
        """One for each prompt; a single priority is shared."""
        return _each("priority", self.priority, num_prompts)


class AbortBody(StrictModel):
    """Body of `/abort_request`: one request by its `rid`, or all."""

    rid: str = ""
    abort_all: bool = False


class ProfileBody(StrictModel):
    """Body of `/start_profile`: where the trace goes; default: a new temporary folder."""

    output_dir: str | None = Field(default=None, min_length=1, max_length=1024)


class MetaInfo(Struct, frozen=True):
    """What is to be known of an answer beside its text. `e2e_latency` in seconds, at the end."""

    id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: dict[str, int | str | None] | None
    dp_rank: int
    e2e_latency: float | UnsetType = UNSET
    output_token_logprobs: list[NativeLogprob] | UnsetType = UNSET
    output_top_logprobs: list[list[NativeLogprob] | None] | UnsetType = UNSET
    input_token_logprobs: list[NativeLogprob] | UnsetType = UNSET
    input_top_logprobs: list[list[NativeLogprob] | None] | UnsetType = UNSET


class Generated(Struct, frozen=True):
    """One answer; in a stream `text` and `output_ids` are all so far, `index` the prompt's."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


def _is_nested(ids: list[Any]) -> bool:
    return bool(ids) and isinstance(ids[0], list)


def _each(name: str, given: T | list[T] | None, num_prompts: int) -> list[T | None]:
    """What field `name` gives for each prompt: an entry of its list, or its one value."""
    if isinstance(given, list):
        _check_length(name, len(given), num_prompts)
        return list(given)
    return [given] * num_prompts


def _check_length(name: str, length: int, num_prompts: int) -> None:
    if length != num_prompts:
        raise InvalidRequestError(f"{name} has {length} entries for {num_prompts} prompts", name)

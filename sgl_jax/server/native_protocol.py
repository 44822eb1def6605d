"""Body and answers of `/generate` and of the routes that manage the server, as in SGLang."""

from typing import Annotated, Any

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.request_limits import check_num_requests, for_each
from sgl_jax.core.sampling_params import MAX_LOGPROB_IDS, MAX_TOP_LOGPROBS
from sgl_jax.server import unserved_fields
from sgl_jax.server.meta_info import MetaInfo
from sgl_jax.server.request_fields import RequestFields
from sgl_jax.server.sampling_fields import SamplingFields, in_range
from sgl_jax.server.session_protocol import SessionParams, refuse_several
from sgl_jax.server.strict_model import ForEach, StrictModel, TokenIds

_StartLen = Annotated[int, Field(ge=-1)]
_TopNum = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class NativeSampling(SamplingFields):
    """`sampling_params`: SGLang's names; ranges as in `SamplingParams`."""

    max_new_tokens: int | None = in_range(
        "max_new_tokens", "0: the prompt is computed, scored if asked for, and nothing generated"
    )


class GenerateBody(RequestFields):
    """Body of `/generate`: `text` or `input_ids`, one prompt or a list."""

    text: str | ForEach[str] | None = None
    input_ids: TokenIds | ForEach[TokenIds] | None = None
    sampling_params: NativeSampling | ForEach[NativeSampling] | None = None
    return_logprob: bool | ForEach[bool] | None = None
    logprob_start_len: _StartLen | ForEach[_StartLen] | None = Field(
        default=None, description="first position of the prompt that is scored; -1: none"
    )
    top_logprobs_num: _TopNum | ForEach[_TopNum] | None = None
    token_ids_logprob: TokenIds | ForEach[TokenIds] | None = Field(
        default=None,
        description=f"at most {MAX_LOGPROB_IDS} tokens whose log-probabilities are told at each "
        "position; a list of lists has one for each prompt",
    )
    return_output_logprob_only: bool | None = Field(
        default=None, description="true: as logprob_start_len -1"
    )
    return_text_in_logprobs: bool | None = None
    return_meta_info: bool | None = Field(default=None, description="without effect: always there")
    stream_output: bool | None = Field(
        default=None,
        description="true: each event of a stream has only what is new; default: what "
        "--incremental-streaming-output says",
    )
    return_prompt_token_ids: bool | None = None
    session_params: SessionParams | None = None

    @property
    def is_list(self) -> bool:
        """Whether the answer is a list: a list of prompts was sent, or several answers wanted."""
        return self._is_batch or self.num_choices > 1

    @property
    def _is_batch(self) -> bool:
        ids = self.input_ids or [0]
        return isinstance(self.text, list) or isinstance(ids[0], list)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequestError("send either text or input_ids", "text")
        given: Any = self.input_ids if self.text is None else self.text
        prompts: list[str | list[int]] = given if self._is_batch else [given]
        if not prompts:
            raise InvalidRequestError("the list of prompts is empty", self.prompt_field)
        check_num_requests(len(prompts), self.num_choices, self.prompt_field)
        if self.session_params is not None:
            refuse_several(len(prompts), self.prompt_field)
            refuse_several(self.num_choices, "sampling_params.n")
        return prompts

    @property
    def prompt_field(self) -> str:
        return "input_ids" if self.text is None else "text"

    @property
    def num_choices(self) -> int:
        """Answers to each prompt: the same for all of them."""
        given = self.sampling_params
        if not isinstance(given, list):
            return 1 if given is None else given.num_choices
        counts = {sampling.num_choices for sampling in given}
        if len(counts) > 1:
            raise InvalidRequestError("n must be the same for all prompts", "sampling_params")
        return counts.pop() if counts else 1

    def sampling_of(self, num_prompts: int) -> list[NativeSampling]:
        """One for each prompt."""
        given = for_each("sampling_params", self.sampling_params, num_prompts)
        return [sampling or NativeSampling() for sampling in given]

    def options_of(self, num_prompts: int) -> list[dict[str, Any]]:
        """As of every protocol, with the log-probabilities that each prompt wants."""
        given: Any = self.token_ids_logprob or []
        ids = given if given and isinstance(given[0], list) else [given] * num_prompts
        each = zip(
            for_each("return_logprob", self.return_logprob, num_prompts),
            for_each("logprob_start_len", self.logprob_start_len, num_prompts),
            for_each("top_logprobs_num", self.top_logprobs_num, num_prompts),
            for_each("token_ids_logprob", ids, num_prompts),
            super().options_of(num_prompts),
            strict=True,
        )
        prompts_too = not self.return_output_logprob_only
        return [
            options
            | {
                "return_logprob": True,
                "logprob_start_len": start if prompts_too and start is not None else -1,
                "top_logprobs_num": top or 0,
                "token_ids_logprob": own_ids,
            }
            if wanted
            else options
            for wanted, start, top, own_ids, options in each
        ]


class AbortBody(StrictModel):
    """Body of `/abort_request`: one request by its `rid`, or all."""

    unserved = unserved_fields.REQUEST

    rid: str = ""
    abort_all: bool = False


class Generated(Struct, frozen=True):
    """One answer; in a stream `text` and `output_ids` are all so far, or only what is new.

    `index` is that of the answer among those of a list.
    """

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET

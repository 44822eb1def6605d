"""SGLang's native API: `/generate` and `/abort_request`."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.request_limits import check_num_requests, for_each
from sgl_jax.core.sampling_params import MAX_LOGPROB_IDS, MAX_TOP_LOGPROBS, SamplingParams
from sgl_jax.engine.front.request_checks import EngineFacts
from sgl_jax.engine.front.request_stream import Chunk, RequestStream
from sgl_jax.server import unserved_fields
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.answer_stream import EVENT, AnswerFormat, StreamGroup, json_response, respond
from sgl_jax.server.apis.native_answers import Generated, NativeAnswer
from sgl_jax.server.chat_request import ImageUrl
from sgl_jax.server.errors import client_names
from sgl_jax.server.fields import (
    ForEach,
    RequestFields,
    SamplingFields,
    SessionParams,
    TokenIds,
    in_range,
    refuse_several,
    session_turn,
)
from sgl_jax.server.guards.bodies import JsonRoute
from sgl_jax.server.guards.keys import caller_of
from sgl_jax.server.images import ids_for_client
from sgl_jax.server.references import References, references_of
from sgl_jax.server.requests import admit, encode_with_images, prompt_requests
from sgl_jax.server.strict_model import StrictModel

_StartLen = Annotated[int, Field(ge=-1)]
_StartPosition = Annotated[int, Field(ge=0)]
_TopNum = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class NativeSampling(SamplingFields):
    """`sampling_params`, with SGLang's names and the ranges of `SamplingParams`."""

    max_new_tokens: int | None = in_range(
        "max_new_tokens", "0: the prompt is computed, scored on request, and nothing generated"
    )


_Images = str | ForEach[str | ForEach[str] | None]


class GenerateBody(RequestFields):
    """Body of `/generate`: `text` or `input_ids`, one prompt or a list."""

    text: str | ForEach[str] | None = None
    input_ids: TokenIds | ForEach[TokenIds] | None = None
    image_data: _Images | None = Field(
        default=None,
        description="images of the prompt: data URIs, base64 or URLs, one for each placeholder of "
        "the model in it; for several prompts a list of each",
    )
    sampling_params: NativeSampling | ForEach[NativeSampling] | None = None
    return_logprob: bool | ForEach[bool] | None = None
    logprob_start_len: _StartLen | ForEach[_StartLen] | None = Field(
        default=None, description="first position of the prompt that is scored; -1: none"
    )
    top_logprobs_num: _TopNum | ForEach[_TopNum] | None = None
    token_ids_logprob: TokenIds | ForEach[TokenIds] | None = Field(
        default=None,
        description=f"at most {MAX_LOGPROB_IDS} tokens whose log-probabilities come at each "
        "position; a list of lists has one for each prompt",
    )
    return_output_logprob_only: bool | None = Field(
        default=None, description="true: as logprob_start_len -1"
    )
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | ForEach[bool] | None = Field(
        default=None, description="with --enable-return-routed-experts: each token's experts"
    )
    routed_experts_start_len: _StartPosition | ForEach[_StartPosition] | None = Field(
        default=None, description="first position whose experts are returned; default: 0"
    )
    return_hidden_states: bool | ForEach[bool] | None = Field(
        default=None,
        description="with --enable-return-hidden-states: each token's last hidden "
        "state, after the final norm",
    )
    return_meta_info: bool | None = Field(default=None, description="without effect: always there")
    stream_output: bool | None = Field(
        default=None,
        description="true: each event of a stream has only the new part; default: "
        "as --incremental-streaming-output",
    )
    return_prompt_token_ids: bool | None = None
    session_params: SessionParams | None = None

    @property
    def is_list(self) -> bool:
        """Return whether the answer is a list: to a list of prompts, or of several choices."""
        return self._is_batch or self.num_choices > 1

    @property
    def _is_batch(self) -> bool:
        ids = self.input_ids or [0]
        return isinstance(self.text, list) or isinstance(ids[0], list)

    @property
    def prompts(self) -> list[str | list[int]]:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequestError("send either text or input_ids", "text")
        given: Any = self.input_ids if self.text is None else self.text
        prompts: list[str | list[int]] = given if self._is_batch else [given]
        check_num_requests(len(prompts), self.num_choices, self.prompt_field)
        if self.session_params is not None:
            refuse_several(len(prompts), self.prompt_field)
            refuse_several(self.num_choices, "sampling_params.n")
        return prompts

    def images(self, num_prompts: int) -> list[list[ImageUrl]]:
        """Return the images of each prompt. Raises `InvalidRequestError` if the lists of
        `image_data` do not fit the prompts."""
        given: Any = self.image_data
        is_nested = self._is_batch or (
            isinstance(given, list) and any(isinstance(each, list) for each in given)
        )
        sources = for_each("image_data", given if is_nested else [given], num_prompts)
        lists = [each if isinstance(each, list) else [each] for each in sources]
        if not all(isinstance(url, str | None) for urls in lists for url in urls):
            raise InvalidRequestError(
                "image_data: one prompt has a list of images, and several prompts a list of each",
                "image_data",
            )
        return [[ImageUrl(url=url) for url in urls if url] for urls in lists]

    @property
    def prompt_field(self) -> str:
        return "input_ids" if self.text is None else "text"

    @property
    def num_choices(self) -> int:
        given = self.sampling_params
        if not isinstance(given, list):
            return 1 if given is None else given.num_choices
        counts = {sampling.num_choices for sampling in given}
        if len(counts) > 1:
            raise InvalidRequestError("n must be the same for all prompts", "sampling_params")
        return counts.pop() if counts else 1

    def samplings(self, num_prompts: int) -> Iterator[Iterator[SamplingParams]]:
        for given in for_each("sampling_params", self.sampling_params, num_prompts):
            sampling = given or NativeSampling()
            yield map(sampling.to_sampling, range(sampling.num_choices))

    def options_of(self, num_prompts: int) -> list[dict[str, Any]]:
        """Return each prompt's options, including the requested log-probabilities and
        values of tokens."""
        given: Any = self.token_ids_logprob or []
        ids = given if given and isinstance(given[0], list) else [given] * num_prompts
        prompts_too = not self.return_output_logprob_only
        all_options = super().options_of(num_prompts)
        names = ["return_logprob", "logprob_start_len", "top_logprobs_num"]
        names += ["return_routed_experts", "routed_experts_start_len", "return_hidden_states"]
        columns = [for_each(name, getattr(self, name), num_prompts) for name in names]
        columns.append(for_each("token_ids_logprob", ids, num_prompts))
        for options, is_scored, start, top, is_routed, first, has_hidden, own_ids in zip(
            all_options, *columns, strict=True
        ):
            if is_scored:
                options["return_logprob"] = True
                options["logprob_start_len"] = start if prompts_too and start is not None else -1
                options["top_logprobs_num"] = top or 0
                options["token_ids_logprob"] = own_ids
            if is_routed:
                options["return_routed_experts"] = True
                options["routed_experts_start_len"] = first or 0
            options["return_hidden_states"] = bool(has_hidden)
        return all_options


class AbortBody(StrictModel):
    """Body of `/abort_request`: one request by its `rid`, or all."""

    unserved = unserved_fields.REQUEST

    rid: str = ""
    abort_all: bool = False


_DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's default
_MOST_HIDDEN_NUMBERS = 1 << 22  # of an answer; writing them blocks the server for half a second
_SAMPLING_NAMES = {name: f"sampling_params.{name}" for name in NativeSampling.model_fields}
router = APIRouter(tags=["native"], route_class=JsonRoute)


@router.post("/generate", responses=answers(Generated, streams=True))
async def generate(body: GenerateBody, request: Request) -> Response:
    """Continue one or several prompts. The answer to a list is a list."""
    prompts = body.prompts
    admit(request, body, len(prompts) * body.num_choices)
    field = body.prompt_field
    names = _SAMPLING_NAMES | {"text": field, "input_ids": field, "messages": "image_data"}
    pictures = None
    if body.image_data is not None:
        with client_names(names):
            placed = await encode_with_images(request, prompts, body.images(len(prompts)))
        prompts, pictures = [each.input_ids for each in placed], [each.images for each in placed]
    requests = await prompt_requests(
        request,
        body,
        prompts,
        body.samplings(len(prompts)),
        names,
        images=pictures,
        turn=session_turn(body.session_params),
        default_max_new_tokens=_DEFAULT_MAX_NEW_TOKENS,
        usual_logprobs_mode="scaled",
    )
    _check_hidden_states(requests, references_of(request).frontend.facts)
    answer_format = NativeFormat(references_of(request), body)
    group = StreamGroup(request, requests, streaming=body.stream, names=names)
    return await respond(group, answer_format)


@router.post("/abort_request", responses=answers())
async def abort_request(body: AbortBody, request: Request) -> Response:
    """Abort the caller's request `rid`, or all of the caller's; an admin may abort any or all.

    Aborted requests end with the text generated so far.
    """
    if bool(body.rid) == body.abort_all:
        raise InvalidRequestError("send either rid or abort_all", "rid")
    caller = caller_of(request)
    sender = None if caller.is_admin else caller.name
    return json_response({"aborted": references_of(request).frontend.abort(body.rid, sender)})


def _check_hidden_states(requests: Sequence[GenerateRequest], facts: EngineFacts) -> None:
    """Raise `InvalidRequestError` if the hidden states of all `requests` may be too long."""
    num_tokens = 0
    for each in requests:
        if each.return_hidden_states and each.session is not None:
            num_tokens += facts.max_request_tokens  # only the engine has its history's length
        elif each.return_hidden_states:
            assert each.sampling.max_new_tokens is not None
            num_tokens += len(each.input_ids) + each.sampling.max_new_tokens
    if (num_numbers := num_tokens * facts.hidden_size) > _MOST_HIDDEN_NUMBERS:
        raise InvalidRequestError(
            f"return_hidden_states: an answer has at most {_MOST_HIDDEN_NUMBERS} numbers, and "
            f"{num_tokens} tokens of prompts and outputs may have {num_numbers}: send fewer or "
            "shorter prompts, or lower max_new_tokens; a turn of a session counts as a request of "
            "the greatest length",
            "return_hidden_states",
        )


class NativeFormat(AnswerFormat):
    """Answers of `/generate`. In a stream every event repeats all so far (SGLang's convention),
    unless the request or the server selects increments."""

    def __init__(self, refs: References, body: GenerateBody) -> None:
        self._refs, self._body = refs, body
        self._tokenizer = refs.frontend.tokenizer if body.return_text_in_logprobs else None
        self._is_incremental = (
            refs.args.incremental_streaming_output
            if body.stream_output is None
            else body.stream_output
        )
        self._answers: dict[int, NativeAnswer] = {}

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        if index not in self._answers:
            tail: dict[str, Any] = {"index": index} if self._body.is_list else {}
            if self._body.return_prompt_token_ids:
                tail["prompt_token_ids"] = ids_for_client(self._refs, stream.request)
            self._answers[index] = NativeAnswer(stream, self._tokenizer, tail)
        answer = self._answers[index]
        written = EVENT % answer.write(chunk)
        if self._is_incremental:
            answer.forget_sent()
        return written

    def whole(self, chunks: Sequence[Chunk], streams: Sequence[RequestStream]) -> Any:
        """Return answers, each of which is the only event of a stream."""
        events = map(self.event, range(len(chunks)), chunks, streams)
        answers = [msgspec.Raw(event.removeprefix(b"data: ").rstrip()) for event in events]
        return answers if self._body.is_list else answers[0]

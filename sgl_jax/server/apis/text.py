"""Routes that generate no text: tokenize, detokenize, and scores of given tokens."""

import asyncio
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, model_validator

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.request_limits import check_num_requests
from sgl_jax.core.sampling_params import MAX_LOGPROB_IDS, SamplingParams
from sgl_jax.engine.front.request_checks import output_scores, scored_prompt
from sgl_jax.server import unserved_fields
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.answer_stream import StreamGroup, json_response
from sgl_jax.server.apis.openai import Usage, token_text, usage_of
from sgl_jax.server.chat_request import ChatMessage, ChatRequest, Tool, ToolList
from sgl_jax.server.fields import ForEach, Items, RequestFields, StrictModel, TokenIds, in_range
from sgl_jax.server.guards.bodies import JsonRoute
from sgl_jax.server.guards.connection import LoopShare, unless_gone
from sgl_jax.server.references import References, references_of
from sgl_jax.server.requests import admit, encode_chat, encode_texts, prompt_requests

router = APIRouter(tags=["text"], route_class=JsonRoute)
_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeBody(StrictModel):
    """Body of `/tokenize`: a text, several texts, or a conversation."""

    unserved = unserved_fields.REQUEST

    model: str = "default"
    prompt: str | ForEach[str] | None = None
    messages: Items[ChatMessage] | None = Field(
        default=None, min_length=1, description="instead of prompt: as the chat template writes it"
    )
    add_special_tokens: bool | None = Field(
        default=None,
        description="of a prompt; default: true. Chat templates write special tokens themselves",
    )
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = Field(
        default=None, description="of messages: must be the opposite of continue_final_message"
    )
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ToolList[Tool] | None = Field(default=None, description="only with messages")

    @model_validator(mode="after")
    def _one_kind(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("send either prompt or messages", "prompt")
        if self.messages is None:
            for name in _CHAT_FIELDS:
                if getattr(self, name) is not None:
                    raise InvalidRequestError(f"{name} is for messages, not for a prompt", name)
        elif self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens is for a prompt: the chat template writes special tokens",
                "add_special_tokens",
            )
        if self.add_generation_prompt is not None and self.add_generation_prompt == bool(
            self.continue_final_message
        ):
            raise InvalidRequestError(
                "add_generation_prompt must be the opposite of continue_final_message",
                "add_generation_prompt",
            )
        return self


class DetokenizeBody(StrictModel):
    """Body of `/detokenize`: the tokens of a text, or of several texts."""

    model: str = "default"
    tokens: TokenIds | ForEach[TokenIds]
    skip_special_tokens: bool | None = Field(default=None, description="default: true")


class Tokenized(Struct, frozen=True):
    """Token ids and their number; for several prompts a list of each. `max_model_len` in tokens."""

    tokens: list[Any]
    count: int | list[int]
    max_model_len: int
    token_strs: list[Any] | UnsetType = UNSET


class Detokenized(Struct, frozen=True):
    """The text (for several, a list), under SGLang's name and under vLLM's."""

    text: str | list[str]
    prompt: str | list[str]


@router.post("/tokenize", responses=answers(Tokenized))
@router.post("/v1/tokenize", responses=answers(Tokenized))
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return token ids of a prompt, of several, or of a conversation in the chat template."""
    refs = references_of(request)
    refs.check_model(body.model)
    if body.messages is not None:
        chat = ChatRequest(
            messages=body.messages,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=body.tools,
        )
        ids = [await encode_chat(request, chat)]
    else:
        texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
        special = body.add_special_tokens is not False
        packed = await encode_texts(request, texts, add_special_tokens=special)
        ids = [each.tolist() for each in packed]

    def shaped(values: list[Any]) -> Any:
        return values if isinstance(body.prompt, list) else values[0]

    strings: Any = UNSET
    if body.return_token_strs:
        strings = shaped([await _strings(refs, each) for each in ids])
    most = refs.frontend.facts.max_context_len
    return json_response(Tokenized(shaped(ids), shaped(list(map(len, ids))), most, strings))


@router.post("/detokenize", responses=answers(Detokenized))
@router.post("/v1/detokenize", responses=answers(Detokenized))
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Return the text of token ids, or of each of several lists."""
    refs = references_of(request)
    refs.check_model(body.model)
    tokens: Any = body.tokens
    is_list = bool(tokens) and isinstance(tokens[0], list)
    each: list[list[int]] = tokens if is_list else [tokens]
    vocab_size = refs.frontend.facts.vocab_size
    largest = max(map(max, filter(None, each)), default=0)
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"tokens holds {largest}, outside the vocabulary [0, {vocab_size})", "tokens"
        )
    skips = body.skip_special_tokens is not False
    decode = refs.frontend.tokenizer.decode
    # In a thread, because the tokens of a whole book take seconds.
    texts = [await asyncio.to_thread(decode, ids, skip_special_tokens=skips) for ids in each]
    text = texts if is_list else texts[0]
    return json_response(Detokenized(text, text))


@router.get("/tokenizer_info", responses=answers())
async def tokenizer_info(request: Request) -> Response:
    """Return class, special tokens and chat template of the tokenizer."""
    refs = references_of(request)
    most = refs.frontend.facts.max_context_len
    return json_response({**refs.frontend.tokenizer.facts, "model_max_length": most})


async def _strings(refs: References, ids: Sequence[int]) -> list[str]:
    token_bytes, share = refs.frontend.tokenizer.token_bytes, LoopShare()
    strings = []
    for token in ids:
        strings.append(token_text(token_bytes(token)))
        await share.pause()
    return strings


class ScoreBody(RequestFields):
    """A query, and items to join with it: either all texts or all token ids."""

    query: str | TokenIds
    items: str | ForEach[str] | ForEach[TokenIds]
    label_token_ids: TokenIds = Field(
        min_length=1,
        max_length=MAX_LOGPROB_IDS,
        description="tokens whose probabilities are returned",
    )
    apply_softmax: bool | None = Field(
        default=None, description="probabilities among these tokens, not among all"
    )
    item_first: bool | None = Field(default=None, description="each item before the query")

    @model_validator(mode="after")
    def _of_one_kind(self) -> "ScoreBody":
        if self.stream:
            raise InvalidRequestError("scores do not come in a stream", "stream")
        if not self.items:
            raise InvalidRequestError("there are no items", "items")
        is_text = isinstance(self.query, str)
        if is_text != (isinstance(self.items, str) or isinstance(self.items[0], str)):
            raise InvalidRequestError(
                "query and items must be both texts or both token ids", "items"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        items = [self.items] if isinstance(self.items, str) else self.items
        return [
            item + self.query if self.item_first else self.query + item  # type: ignore[operator]
            for item in items
        ]


class Scores(Struct, frozen=True):
    """`scores[i][j]`: the probability of label token j right after item i, in the given order."""

    scores: list[list[float]]
    model: str
    usage: Usage
    object: str = "scoring"


_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


@router.post("/v1/score", responses=answers(Scores))
@router.post("/score", responses=answers(Scores))
async def score(body: ScoreBody, request: Request) -> Response:
    """Return the probabilities of `label_token_ids` right after each item."""
    prompts = body.prompts
    admit(request, body, len(prompts))
    names = dict.fromkeys(("text", "input_ids"), "items") | {"token_ids_logprob": "label_token_ids"}
    requests = await prompt_requests(
        request,
        body,
        prompts,
        [[_ONE_TOKEN]] * len(prompts),
        names,
        return_logprob=True,
        token_ids_logprob=body.label_token_ids,
    )
    group = StreamGroup(request, requests, streaming=False, names=names)
    chunks = await unless_gone(request.receive, group.collect())
    logprobs = [chunk.logprobs[0].id_logprobs for chunk in chunks]
    found = [_probabilities(each, among_themselves=body.apply_softmax) for each in logprobs]
    model = references_of(request).model_name
    return json_response(Scores(found, model, usage_of(group.streams)))


def _probabilities(logprobs: Sequence[float], *, among_themselves: bool | None) -> list[float]:
    if not among_themselves:
        return [math.exp(logprob) for logprob in logprobs]
    powers = [math.exp(logprob - max(logprobs)) for logprob in logprobs]
    return [power / sum(powers) for power in powers]


class ScoreTokensBody(RequestFields):
    """Body of `/score_tokens`: the tokens of a prompt and of its output, or a list of each."""

    input_ids: TokenIds | ForEach[TokenIds]
    output_ids: TokenIds | ForEach[TokenIds]
    temperature: float | None = in_range("temperature")
    top_k: int | None = in_range("top_k")
    top_p: float | None = in_range("top_p")
    min_p: float | None = in_range("min_p")

    @property
    def is_list(self) -> bool:
        return bool(self.input_ids) and isinstance(self.input_ids[0], list)

    @cached_property
    def scored(self) -> list[tuple[list[int], dict[str, Any]]]:
        """Return `scored_prompt` of each pair. Raises `InvalidRequestError`."""
        if self.stream:
            raise InvalidRequestError("scores do not come in a stream", "stream")
        prompts: Any = self.input_ids if self.is_list else [self.input_ids]
        outputs: Any = self.output_ids if self.is_list else [self.output_ids]
        if len(prompts) != len(outputs) or not all(isinstance(own, list) for own in outputs):
            raise InvalidRequestError("output_ids must have a list for each prompt", "output_ids")
        return [scored_prompt(*pair) for pair in zip(prompts, outputs, strict=True)]

    @property
    def sampling(self) -> SamplingParams:
        names = ("temperature", "top_k", "top_p", "min_p")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return SamplingParams(max_new_tokens=1, **given)

    def options_of(self, num_prompts: int) -> list[dict[str, Any]]:
        options = super().options_of(num_prompts)
        return [own | more for own, (_, more) in zip(options, self.scored, strict=True)]


class TokenScores(Struct, frozen=True):
    """`logprobs[i][j]`: the log-probability of token j of output i; of one output `logprobs[j]`."""

    logprobs: list[Any]
    weight_version: str
    model: str
    usage: Usage


@router.post("/score_tokens", responses=answers(TokenScores))
async def score_tokens(body: ScoreTokensBody, request: Request) -> Response:
    """Return the log-probabilities of given outputs, as generating them reports."""
    prompts: list[str | list[int]] = [ids for ids, _ in body.scored]
    check_num_requests(len(prompts), 1, "input_ids")
    admit(request, body, len(prompts))
    names = {"token_ids_logprob": "output_ids"}
    samplings = [[body.sampling]] * len(prompts)
    requests = await prompt_requests(request, body, prompts, samplings, names)
    group = StreamGroup(request, requests, streaming=False, names=names)
    chunks = await unless_gone(request.receive, group.collect())
    found = [output_scores(chunk.prompt_logprobs, chunk.logprobs) for chunk in chunks]
    version = group.streams[0].weight_versions[-1][1]
    shown = found if body.is_list else found[0]
    model = references_of(request).model_name
    return json_response(TokenScores(shown, version, model, usage_of(group.streams)))

"""Routes that compare how likely tokens are after prompts: scores, and the order of documents."""

import math
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, model_validator

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.request_limits import check_num_requests
from sgl_jax.core.sampling_params import MAX_LOGPROB_IDS, SamplingParams
from sgl_jax.engine.front.request_checks import output_scores, scored_prompt
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.answer_stream import StreamGroup, json_response, whole_chunks
from sgl_jax.server.apis.openai import Usage, usage_of
from sgl_jax.server.errors import ApiError, client_names
from sgl_jax.server.fields import ForEach, TokenIds, WholeAnswerFields, in_range
from sgl_jax.server.guards.bodies import JsonRoute
from sgl_jax.server.references import References, references_of
from sgl_jax.server.requests import admit, encode_texts, prompt_requests

router = APIRouter(tags=["scores"], route_class=JsonRoute)


class RerankTemplate(NamedTuple):
    """A prompt of a query and a document, which a model that generates text answers by a label."""

    text: str
    default_instruct: str
    labels: tuple[str, str]  # relevant, and not; each is one token

    def prompt(self, query: str, document: str, instruct: str | None = None) -> str:
        """Return the prompt; `instruct` says what makes a document relevant."""
        return self.text.format(
            instruct=instruct or self.default_instruct, query=query, document=document
        )


# By the value of --rerank-template.
RERANK_TEMPLATES = {
    "qwen3": RerankTemplate(  # of Qwen3-Reranker
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "Given a web search query, retrieve relevant passages that answer the query",
        ("yes", "no"),
    )
}


class ScoreBody(WholeAnswerFields):
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


@router.post("/v1/score", responses=answers(Scores))
@router.post("/score", responses=answers(Scores))
async def score(body: ScoreBody, request: Request) -> Response:
    """Return the probabilities of `label_token_ids` right after each item."""
    prompts = body.prompts
    admit(request, body, len(prompts))
    names = dict.fromkeys(("text", "input_ids"), "items") | {"token_ids_logprob": "label_token_ids"}
    logprobs, usage = await _logprobs(request, body, prompts, body.label_token_ids, names)
    found = [_probabilities(each, among_themselves=body.apply_softmax) for each in logprobs]
    return json_response(Scores(found, references_of(request).model_name, usage))


class ScoreTokensBody(WholeAnswerFields):
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
        prompts: Any = self.input_ids if self.is_list else [self.input_ids]
        outputs: Any = self.output_ids if self.is_list else [self.output_ids]
        are_lists = all(isinstance(own, list) for own in outputs)
        if not are_lists or len(prompts) != len(outputs):
            raise InvalidRequestError("output_ids must have a list for each prompt", "output_ids")
        if any(isinstance(token, list) for own in outputs for token in own[:1]):
            raise InvalidRequestError("output_ids must be one list, of one prompt", "output_ids")
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
    """`logprobs[i][j]`: the log-probability of token j of output i, by the weights
    `weight_version[i]`; of one output `logprobs[j]` and `weight_version`."""

    logprobs: list[Any]
    weight_version: str | list[str]
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
    chunks = await whole_chunks(group)
    found = [output_scores(chunk.prompt_logprobs, chunk.logprobs) for chunk in chunks]
    versions = [stream.weight_versions[-1][1] for stream in group.streams]
    model, usage = references_of(request).model_name, usage_of(group.streams)
    if body.is_list:
        return json_response(TokenScores(found, versions, model, usage))
    return json_response(TokenScores(found[0], versions[0], model, usage))


class RerankBody(WholeAnswerFields):
    """A query, and the documents to compare with it."""

    query: str = Field(min_length=1)
    documents: ForEach[str]
    top_n: int | None = Field(default=None, ge=1, description="results to return; default: all")
    return_documents: bool | None = Field(default=None, description="default: true")
    instruct: str | None = Field(
        default=None, description="what makes a document relevant; default: the template's"
    )

    @property
    def texts(self) -> list[str]:
        check_num_requests(len(self.documents), 1, "documents")
        return self.documents


class Document(Struct, frozen=True):
    text: str


class Ranked(Struct, frozen=True):
    """A document by its place in the request, and its probability of being relevant."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(Struct, frozen=True):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage


@router.post("/v1/rerank", responses=answers(Ranking))
@router.post("/v2/rerank", responses=answers(Ranking))
@router.post("/rerank", responses=answers(Ranking))
async def rerank(body: RerankBody, request: Request) -> Response:
    """Order documents by the probability that the model calls them relevant to the query.

    The prompt of each document is that of `--rerank-template`.
    """
    refs, documents = references_of(request), body.texts
    admit(request, body, len(documents))
    template = _rerank_template(refs)
    labels = [_label(refs, label) for label in template.labels]
    texts = [template.prompt(body.query, each, body.instruct) for each in documents]
    names = dict.fromkeys(("text", "input_ids"), "documents")
    with client_names(names):
        encoded = await encode_texts(request, texts, add_special_tokens=False)
    prompts: list[str | list[int]] = [ids.tolist() for ids in encoded]
    logprobs, usage = await _logprobs(request, body, prompts, labels, names)
    scores = [_probabilities(each, among_themselves=True)[0] for each in logprobs]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    shows = body.return_documents is not False
    results = [Ranked(i, scores[i], Document(documents[i]) if shows else UNSET) for i in order]
    return json_response(Ranking(f"rerank-{uuid.uuid4().hex}", refs.model_name, results, usage))


def _rerank_template(refs: References) -> RerankTemplate:
    template = RERANK_TEMPLATES.get(refs.args.rerank_template)
    if template is None:
        raise ApiError(
            400,
            f"the model {refs.model_name!r} ranks no documents: --rerank-template names the prompt "
            "of a model that does, and is not set; /v1/score compares tokens after any prompt",
            param="model",
            code="unsupported_task",
        )
    return template


def _label(refs: References, label: str) -> int:
    ids = refs.frontend.tokenizer.encode(label, add_special_tokens=False)
    if len(ids) != 1:
        raise ApiError(
            400,
            f"the model {refs.model_name!r} ranks no documents: {label!r}, an answer of "
            f"--rerank-template {refs.args.rerank_template}, is not a token of it",
            param="model",
            code="unsupported_task",
        )
    return ids[0]


_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


async def _logprobs(
    request: Request,
    body: WholeAnswerFields,
    prompts: Sequence[str | list[int]],
    tokens: Sequence[int],
    names: Mapping[str, str],
) -> tuple[list[list[float]], Usage]:
    """Return the log-probabilities of `tokens` after each prompt."""
    requests = await prompt_requests(
        request,
        body,
        prompts,
        [[_ONE_TOKEN]] * len(prompts),
        names,
        return_logprob=True,
        token_ids_logprob=tokens,
    )
    group = StreamGroup(request, requests, streaming=False, names=names)
    chunks = await whole_chunks(group)
    return [chunk.logprobs[0].id_logprobs for chunk in chunks], usage_of(group.streams)


def _probabilities(logprobs: Sequence[float], *, among_themselves: bool | None) -> list[float]:
    if not among_themselves:
        return [math.exp(logprob) for logprob in logprobs]
    powers = [math.exp(logprob - max(logprobs)) for logprob in logprobs]
    return [power / sum(powers) for power in powers]

"""Code shared by chats and completions, the list of models, and routes of other kinds of models."""

import time
import uuid
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Struct, UnsetType
from msgspec.json import encode

from sgl_jax.engine.front.request_stream import Chunk, RequestStream
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.answer_stream import DONE, EVENT, AnswerFormat, json_response
from sgl_jax.server.errors import ApiError, refuse_abort
from sgl_jax.server.fields import GenerationFields
from sgl_jax.server.guards.bodies import JsonRoute
from sgl_jax.server.references import References, references_of


class ModelCard(Struct, frozen=True):
    """A model in OpenAI's form, with Anthropic's fields `display_name`, `created_at` and `type`.

    `created` in seconds since 1970.
    """

    id: str
    created: int
    root: str
    max_model_len: int
    display_name: str
    created_at: datetime
    object: str = "model"
    type: str = "model"
    owned_by: str = "sgl_jax"


class ModelList(Struct, frozen=True):
    """All models in one page, in the form of both APIs."""

    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool = False
    object: str = "list"


class PromptTokensDetails(Struct, frozen=True):
    """`cached_tokens`: prompt tokens with KV from the prefix cache."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of a request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerHead(Struct, frozen=True):
    """The first fields of answers and chunks; `created` in seconds since 1970."""

    id: str
    created: int
    model: str


router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)


@router.get("/models", responses=answers(ModelList))
async def list_models(request: Request) -> Response:
    """Return the served model, as a list."""
    card = _card(references_of(request))
    return json_response(ModelList([card], card.id, card.id))


@router.get("/models/{model:path}", responses=answers(ModelCard))
async def get_model(model: str, request: Request) -> Response:
    """Return the served model if it has this name."""
    refs = references_of(request)
    refs.check_model(model)
    return json_response(_card(refs))


def _card(refs: References) -> ModelCard:
    return ModelCard(
        refs.model_name,
        refs.created,
        refs.args.model_path,
        refs.frontend.facts.max_context_len,
        display_name=refs.model_name,
        created_at=datetime.fromtimestamp(refs.created, UTC),
    )


def field_names(body: GenerationFields, limit: str, prompt: str) -> dict[str, str]:
    formats = {} if body.response_format is None else body.response_format.grammar()
    return {
        **dict.fromkeys(formats, "response_format"),
        "max_new_tokens": limit,
        "min_new_tokens": "min_new_tokens" if body.min_tokens is None else "min_tokens",
        "text": prompt,
        "input_ids": prompt,
        "top_logprobs_num": "logprobs",
    }


class OpenAIFormat(AnswerFormat):
    """Base of both kinds of answers: id, time, model and token counts."""

    _kind: str  # prefix of generated ids
    _type: Callable[..., Struct]
    _chunk_object: str  # `object` of a chunk

    def __init__(self, refs: References, body: GenerationFields) -> None:
        rid = body.rid[0] if isinstance(body.rid, list) else body.rid
        self._head = (
            rid or f"{self._kind}-{uuid.uuid4().hex}",
            int(time.time()),
            refs.model_name,
        )
        self._tokenizer = refs.frontend.tokenizer
        self._body = body
        options = body.stream_options
        self._counts_at_end = bool(options and options.include_usage)
        self._always_counts = bool(options and options.continuous_usage_stats)

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        if chunk.finish is not None:
            refuse_abort(chunk.finish)
        usage: Usage | UnsetType | None = None if self._counts_at_end else UNSET
        if self._always_counts:
            usage = _usage(stream.num_prompt_tokens, chunk.num_output_tokens, stream.cached_tokens)
        return b"".join(
            EVENT % encode(self._type(*self._head, [piece], usage, self._chunk_object))
            for piece in self._pieces(index, chunk, stream)
        )

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        if not self._counts_at_end:
            return DONE
        usage = usage_of(streams, self._body.num_choices)
        return EVENT % encode(self._type(*self._head, [], usage, self._chunk_object)) + DONE

    def whole(self, chunks: Sequence[Chunk], streams: Sequence[RequestStream]) -> Any:
        for chunk in chunks:
            refuse_abort(chunk.finish)
        choices = list(map(self._choice, range(len(chunks)), chunks, streams))
        return self._type(*self._head, choices, usage_of(streams, self._body.num_choices))

    def _pieces(self, index: int, chunk: Chunk, stream: RequestStream) -> Sequence[Any]:
        return [self._choice(index, chunk, stream)]

    @abstractmethod
    def _choice(self, index: int, chunk: Chunk, stream: RequestStream) -> Any: ...


def usage_of(streams: Sequence[RequestStream], num_choices: int = 1) -> Usage:
    """Return the sum over all streams. A prompt counts once, also with several choices."""
    prompts = streams[::num_choices]
    return _usage(
        sum(stream.num_prompt_tokens for stream in prompts),
        sum(stream.num_output_tokens for stream in streams),
        sum(stream.cached_tokens for stream in prompts),
    )


def _usage(num_prompt: int, num_output: int, num_cached: int) -> Usage:
    return Usage(num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(num_cached))


LOWEST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI sends this


def token_text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


# Routes of other kinds of models. Unlike a 404, which could mean a typo, these give the reason.
_TASKS = {
    "pools nothing; /v1/embeddings is for models that make embeddings": "/encode /pooling",
    "classifies nothing": "/classify /v1/classify",
    "moderates nothing": "/v1/moderations",
    "speaks no text": "/v1/audio/speech",
    "hears no audio": "/v1/audio/transcriptions /v1/audio/translations",
    "makes no images": "/v1/images/generations /v1/images/edits /v1/images/variations",
    "makes no videos": "/v1/videos",
}
other_models = APIRouter(tags=["other models"])


def _refusal(task: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        """Refuse a request for a task that the served model does not support."""
        name = references_of(request).model_name
        message = f"the model {name!r} generates text: it {task}"
        raise ApiError(400, message, param="model", code="unsupported_task")

    return refuse


for _task, _routes in _TASKS.items():
    for _route in _routes.split():
        other_models.add_api_route(
            _route, _refusal(_task), methods=["POST"], responses=answers(), name=_route.strip("/")
        )

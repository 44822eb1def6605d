"""Routes of models of other kinds: a clear refusal, where a 404 could mean a typing error."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response

from sgl_jax.server.context import context_of
from sgl_jax.server.errors import ApiError
from sgl_jax.server.openapi import answers

router = APIRouter(tags=["other models"])

# Route -> what a model would have to do.
_TASKS = {
    "/v1/embeddings": "makes no embeddings",
    "/embeddings": "makes no embeddings",
    "/encode": "makes no embeddings",
    "/pooling": "makes no embeddings",
    "/v1/rerank": "ranks no documents; /v1/score compares tokens after each of them",
    "/v2/rerank": "ranks no documents; /v1/score compares tokens after each of them",
    "/rerank": "ranks no documents; /v1/score compares tokens after each of them",
    "/classify": "classifies nothing",
    "/v1/classify": "classifies nothing",
    "/v1/moderations": "moderates nothing",
    "/v1/audio/speech": "speaks no text",
    "/v1/audio/transcriptions": "hears no audio",
    "/v1/audio/translations": "hears no audio",
    "/v1/images/generations": "makes no images",
    "/v1/images/edits": "makes no images",
    "/v1/images/variations": "makes no images",
    "/v1/videos": "makes no videos",
}


def _refusal(task: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        """The model that is served does not do this."""
        name = context_of(request).model_name
        message = f"the model {name!r} generates text: it {task}"
        raise ApiError(400, message, param="model", code="unsupported_task")

    return refuse


for _route, _task in _TASKS.items():
    router.add_api_route(
        _route, _refusal(_task), methods=["POST"], responses=answers(), name=_route.strip("/")
    )

"""Health, facts, and metrics.

`/health` at each point of a server's life:

    starting   503   the engine loads and compiles
    ready      200
    paused     200   requests are taken, and wait until generation is continued
    stuck      503   the engine's process is silent: stopped, or swapped out
    draining   503   the server finishes running requests, and ends
    dead       503   the engine has ended; the server ends, too

Programs can read the same from the code of the error.
"""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Receive, Scope, Send

from sgl_jax.core.errors import EngineStuckError, QueueFullError
from sgl_jax.core.messages import GetState
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.health import EngineHealth
from sgl_jax.server.admin.calls import call_engine
from sgl_jax.server.admin.loads import internal_state
from sgl_jax.server.answer_stream import StreamGroup, json_response
from sgl_jax.server.errors import ApiError, ErrorBody, error_body, error_response, to_api_error
from sgl_jax.server.guards.json_body import JsonRoute
from sgl_jax.server.openapi import answers, text_answer
from sgl_jax.server.references import references_of

_HEALTH_TIMEOUT_S = 20.0
_SCRAPE_TIMEOUT_S = 2.0
router = APIRouter(tags=["management"], route_class=JsonRoute)


@router.get("/health", responses=answers())
@router.get("/ping", responses=answers())
async def health(request: Request) -> Response:
    """200 while the server takes requests; else 503 and why. It calls no engine and needs no
    key. Hosting platforms call it `/ping`."""
    refs = references_of(request)
    return health_answer(refs.check_open, refs.health, is_paused=refs.is_paused)


@router.get("/health_generate", responses=answers())
async def health_generate(request: Request) -> Response:
    """200 if the engine generates a token within 20 s, or an operator has paused generation."""
    refs = references_of(request)
    refs.check_open()
    if refs.is_paused:
        return await health(request)
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    probe = refs.frontend.checks.prepare([0], sampling)
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            await StreamGroup(request, [probe], streaming=False, names={}).collect()
    except TimeoutError as error:
        if not refs.is_paused:
            raise ApiError(503, f"no token within {_HEALTH_TIMEOUT_S:g} s") from error
    return await health(request)


@router.get("/version", responses=answers())
async def version(request: Request) -> Response:
    """The version of this server."""
    return json_response({"version": request.app.version})


@router.get("/model_info", responses=answers())
@router.get("/get_model_info", responses=answers())
async def get_model_info(request: Request) -> Response:
    """Paths and name of the served model, and its limits."""
    refs = references_of(request)
    facts = refs.frontend.facts
    return json_response(
        {
            "model_path": refs.model_path,
            "tokenizer_path": refs.args.tokenizer_folder,
            "served_model_name": refs.model_name,
            "is_generation": True,
            **facts._asdict(),
        }
    )


@router.get("/server_info", responses=answers())
@router.get("/get_server_info", responses=answers())
async def get_server_info(request: Request) -> Response:
    """Settings, the engine's facts, and the memory and load of every rank."""
    refs = references_of(request)
    # Settings that were left open have the values chosen since.
    settings = refs.args.public() | refs.engine_info.get("settings", {})
    state = (await call_engine(refs, GetState())).data
    return json_response(
        {
            **settings,
            "model_path": refs.model_path,
            "served_model_name": refs.model_name,
            "version": request.app.version,
            "dp_size": refs.frontend.facts.dp_size,
            "engine": refs.engine_info,
            "internal_states": [internal_state(rank, state["counters"]) for rank in state["ranks"]],
            **state,
        }
    )


@router.get("/metrics", responses=text_answer("counters in Prometheus' text format"))
async def metrics(request: Request) -> Response:
    """Requests and latencies; memory and load of every rank, as the engine last reported."""
    refs = references_of(request)
    # A busy or dead engine is no reason to hide the other figures.
    with contextlib.suppress(ApiError, EngineStuckError, QueueFullError):
        if not refs.frontend.has_ended:
            reply = await call_engine(refs, GetState(), _SCRAPE_TIMEOUT_S)
            if reply.ok:
                refs.engine_metrics.update(reply.data)
    text = refs.frontend.metrics.exposition()
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


_JSON = "application/json"
_STATUS_OF_CODE = {
    "starting": "starting",
    "engine_stuck": "stuck",
    "shutting_down": "draining",
    "engine_dead": "dead",
}


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """`since`: when a stuck engine fell silent, ISO 8601 in UTC."""

    status: str
    since: str | None = None
    error: ErrorBody | None = None


def health_answer(
    check: Callable[[], None], health: EngineHealth, *, is_paused: bool = False
) -> Response:
    """200 if `check` passes; else the error that it raises, and since when."""
    try:
        check()
    except Exception as raised:
        error = to_api_error(raised)
        if error.code not in _STATUS_OF_CODE:
            raise
        since = health.stuck_since
        body = Health(
            _STATUS_OF_CODE[error.code],
            None if since is None else since.isoformat(timespec="seconds"),
            error_body(error),
        )
        headers = dict(error.headers or {})
        return Response(msgspec.json.encode(body), error.status_code, headers, _JSON)
    status = "paused" if is_paused else "ready"
    return Response(msgspec.json.encode(Health(status)), media_type=_JSON)


class Gate:
    """The application in front of uvicorn: refuses everything until `open`.

    So a client reads that the server is starting, rather than waiting.
    """

    def __init__(self, health: EngineHealth) -> None:
        self._health = health
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/health":
            await health_answer(self._refuse, self._health)(scope, receive, send)
        elif scope["type"] == "http":
            await error_response(_starting(), scope["path"])(scope, receive, send)

    def _refuse(self) -> None:
        self._health.check()
        raise _starting()


def _starting() -> ApiError:
    return ApiError(503, "the server is starting: the engine loads and compiles", code="starting")

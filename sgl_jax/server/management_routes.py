"""Health, facts, and metrics."""

import asyncio
import contextlib

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from sgl_jax.core.errors import EngineStuckError, QueueFullError
from sgl_jax.core.messages import GetState
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.server.context import context_of
from sgl_jax.server.errors import ApiError
from sgl_jax.server.generation import StreamGroup, json_response
from sgl_jax.server.health import health_answer
from sgl_jax.server.json_route import JsonRoute
from sgl_jax.server.loads import internal_state
from sgl_jax.server.openapi import answers, text_answer

_HEALTH_TIMEOUT_S = 20.0
_SCRAPE_TIMEOUT_S = 2.0

router = APIRouter(tags=["management"], route_class=JsonRoute)


@router.get("/health", responses=answers())
async def health(request: Request) -> Response:
    """200 while the server takes requests; else 503 and why. Asks nothing of the engine, needs no
    key."""
    context = context_of(request)
    return health_answer(context.check_open, context.health, is_paused=context.is_paused)


@router.get("/health_generate", responses=answers())
async def health_generate(request: Request) -> Response:
    """200 if the engine generates a token within 20 s, or an operator has paused generation."""
    context = context_of(request)
    context.check_open()
    if context.is_paused:
        return health_answer(context.check_open, context.health, is_paused=True)
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    probe = context.frontend.checks.prepare([0], sampling)
    try:
        async with (
            asyncio.timeout(_HEALTH_TIMEOUT_S),
            StreamGroup(request, [probe], streaming=False, names={}) as group,
        ):
            while group.num_open:
                await group.next_batch()
    except TimeoutError as error:
        if not context.is_paused:
            raise ApiError(503, f"no token within {_HEALTH_TIMEOUT_S:g} s") from error
    return health_answer(context.check_open, context.health, is_paused=context.is_paused)


@router.get("/ping", responses=answers())
async def ping(request: Request) -> Response:
    """As `/health`, under the name that hosting platforms ask for; needs no key either."""
    return await health(request)


@router.get("/version", responses=answers())
async def version(request: Request) -> Response:
    """The version of this server."""
    return json_response({"version": request.app.version})


@router.get("/model_info", responses=answers())
@router.get("/get_model_info", responses=answers())
async def get_model_info(request: Request) -> Response:
    """What is served."""
    context = context_of(request)
    facts = context.frontend.facts
    return json_response(
        {
            "model_path": context.model_path,
            "tokenizer_path": context.args.tokenizer_folder,
            "served_model_name": context.model_name,
            "is_generation": True,
            **facts._asdict(),
        }
    )


@router.get("/server_info", responses=answers())
@router.get("/get_server_info", responses=answers())
async def get_server_info(request: Request) -> Response:
    """Settings, the engine's facts, and the memory and load of every rank."""
    context = context_of(request)
    # What was left to decide is told as it was decided.
    settings = context.args.public() | context.engine_info.get("settings", {})
    state = (await context.ask(GetState())).data
    return json_response(
        {
            **settings,
            "model_path": context.model_path,
            "served_model_name": context.model_name,
            "version": request.app.version,
            "dp_size": context.frontend.facts.dp_size,
            "engine": context.engine_info,
            "internal_states": [internal_state(rank, state["counters"]) for rank in state["ranks"]],
            **state,
        }
    )


@router.get("/metrics", responses=text_answer("counters in Prometheus' text format"))
async def metrics(request: Request) -> Response:
    """Requests and latencies; memory and load of every rank, as of the engine's last word."""
    context = context_of(request)
    # A busy or dead engine is no reason to hide the other figures.
    with contextlib.suppress(ApiError, EngineStuckError, QueueFullError):
        if not context.frontend.has_ended:
            reply = await context.ask(GetState(), _SCRAPE_TIMEOUT_S)
            if reply.ok:
                context.engine_metrics.update(reply.data)
    text = context.frontend.metrics.exposition()
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

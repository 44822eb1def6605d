"""Health, facts, metrics, and the load of each rank from the engine's state (`EngineCore.state`).

`/health` at each point of a server's life:

    starting   503   the engine loads and compiles
    ready      200
    paused     200   requests are taken, and wait until generation is continued
    stuck      503   the engine's process is silent: stopped, or swapped out
    failing    503   three steps in a row have failed, until one succeeds; requests are still taken
    draining   503   the server finishes running requests, and ends
    dead       503   the engine has ended; the server ends, too

The `code` of the error distinguishes the states for programs. `/liveness` is 503 only if the engine
is stuck or dead, so that a process is restarted only then.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Receive, Scope, Send

from sgl_jax.core.errors import (
    EngineDeadError,
    EngineStuckError,
    InvalidRequestError,
    QueueFullError,
    ShuttingDownError,
)
from sgl_jax.core.messages import GetState
from sgl_jax.core.request_limits import check_between
from sgl_jax.engine.front.health import EngineHealth
from sgl_jax.metrics.rank_state import max_tokens, share, token_usage, used_tokens
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.answer_stream import json_response
from sgl_jax.server.errors import ApiError, error_body, error_response, to_api_error
from sgl_jax.server.guards.bodies import JsonRoute
from sgl_jax.server.guards.connection import unless_gone
from sgl_jax.server.guards.keys import visible_tenant
from sgl_jax.server.health_probe import HealthProbe
from sgl_jax.server.references import References, references_of
from sgl_jax.server.shared_reads import Snapshot, reads_of

_HEALTH_TIMEOUT_S = 20.0
_SCRAPE_TIMEOUT_S = 2.0
_PROMETHEUS = {
    "description": "counters in Prometheus' text format",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}
router = APIRouter(tags=["management"], route_class=JsonRoute)


@router.get("/health", responses=answers())
@router.get("/ping", responses=answers())
async def health(request: Request) -> Response:
    """Return 200 while the server takes requests and its steps succeed, else 503 and the reason. It
    makes no call to the engine and needs no key. Hosting platforms call it `/ping`."""
    refs = references_of(request)
    return health_answer(refs.check_ready, refs.health, _status(refs))


@router.get("/liveness", responses=answers())
async def liveness(request: Request) -> Response:
    """Return 503 if the server should be restarted, since the engine has ended or its process is
    silent, else 200. Load, draining and failing steps do not count: a draining or
    failing engine ends by itself."""
    refs = references_of(request)
    return health_answer(refs.check_live, refs.health, _status(refs))


def _status(refs: References) -> str:
    return "paused" if refs.is_paused else "ready"


@router.get("/health_generate", responses=answers())
async def health_generate(request: Request) -> Response:
    """Return 200 if the engine generates a token of any request within 20 s, or is paused."""
    refs = references_of(request)
    refs.check_open()
    if not refs.is_paused:
        probe: HealthProbe = request.app.state.health_probe
        finds_token = await unless_gone(request.receive, probe.finds_token(_HEALTH_TIMEOUT_S))
        if not finds_token and not refs.is_paused:
            raise ApiError(503, f"no token within {_HEALTH_TIMEOUT_S:g} s")
    return await health(request)


@router.get("/version", responses=answers())
async def version(request: Request) -> Response:
    """Return the version of this server."""
    return json_response({"version": request.app.version})


@router.get("/model_info", responses=answers())
@router.get("/get_model_info", responses=answers())
async def get_model_info(request: Request) -> Response:
    """Return paths and name of the served model, and its limits."""
    refs = references_of(request)
    facts = refs.frontend.facts
    return json_response(
        {
            "model_path": refs.model_path,
            "tokenizer_path": refs.args.tokenizer_folder,
            "served_model_name": refs.model_name,
            "weight_version": refs.frontend.weight_version,
            "is_generation": True,
            **facts._asdict(),
        }
    )


@router.get("/get_weight_version", responses=answers())
async def get_weight_version(request: Request) -> Response:
    """Return the label of the served weights."""
    return json_response({"weight_version": references_of(request).frontend.weight_version})


@router.get("/server_info", responses=answers())
@router.get("/get_server_info", responses=answers())
async def get_server_info(request: Request) -> Response:
    """Return settings, the engine's facts, and the memory and load of every rank."""
    refs, own = references_of(request), visible_tenant(request)
    snapshot = await reads_of(request).read(GetState())
    return snapshot.json(
        ("server_info", own),
        lambda state: {
            # Settings without a given value show the chosen value.
            **refs.args.public(),
            **refs.engine_info.get("settings", {}),
            "model_path": refs.model_path,
            "served_model_name": refs.model_name,
            "version": request.app.version,
            "dp_size": refs.frontend.facts.dp_size,
            "template_abilities": refs.texts.abilities,
            "engine": refs.engine_info,
            "internal_states": [_state_of(rank, state["counters"]) for rank in state["ranks"]],
            **state,
            "tenants": {
                name: figures
                for name, figures in state.get("tenants", {}).items()
                if own in (None, name)
            },
        },
    )


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", responses=answers() | {200: _PROMETHEUS})
async def metrics(request: Request) -> Response:
    """Return request counts and latencies, and memory and load of every rank as last reported.

    If keys come from a file, figures of other tenants need the admin key.
    """
    refs, own = references_of(request), visible_tenant(request)
    snapshot: Snapshot | None = None
    # Show the other figures even if the engine is busy or dead.
    with contextlib.suppress(
        ApiError, EngineDeadError, EngineStuckError, QueueFullError, ShuttingDownError
    ):
        snapshot = await reads_of(request).read(GetState(), _SCRAPE_TIMEOUT_S)
    if snapshot is None:
        text = refs.frontend.metrics.exposition(own)
    else:
        text = snapshot.write(("metrics", own), partial(_exposition, refs, snapshot.data, own))
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


def _exposition(refs: References, state: Mapping[str, Any], own: str | None) -> bytes:
    refs.engine_metrics.update(state)
    return refs.frontend.metrics.exposition(own)


# Values of `/v1/loads?include=`; "core" is always included, "all" means all of them. Nothing
# belongs to "lora" and "disagg", which clients of SGLang ask for.
_SECTIONS = ("core", "memory", "spec", "queues", "lora", "disagg", "all")


@router.get("/v1/loads", responses=answers())
async def loads(
    request: Request,
    include: Annotated[str, Query(description=f"of {', '.join(_SECTIONS)}, with commas")] = "all",
    dp_rank: Annotated[int | None, Query(ge=0, description="of this rank only")] = None,
) -> Response:
    """Return requests, tokens and pages of every rank, and over all ranks."""
    sections = [name.strip() for name in include.split(",")]
    for name in sections:
        if name not in _SECTIONS:
            raise InvalidRequestError(
                f"include takes {', '.join(_SECTIONS)}, got {name!r}", "include"
            )
    refs = references_of(request)
    dp_size = refs.frontend.facts.dp_size
    if dp_rank is not None:
        check_between("dp_rank", dp_rank, 0, dp_size - 1)
    shown = frozenset(_SECTIONS if "all" in sections else sections)

    def loads_of(state: Mapping[str, Any]) -> dict[str, Any]:
        found = [
            _load(rank, state["counters"], shown)
            for rank in state["ranks"]
            if dp_rank in (None, rank["dp_rank"])
        ]
        return {
            "version": request.app.version,
            "dp_rank_count": dp_size,
            "loads": found,
            "aggregate": _aggregate(found),
        }

    snapshot = await reads_of(request).read(GetState())
    return snapshot.json(("loads", shown, dp_rank), loads_of)


@router.get("/get_load", responses=answers())
async def get_load(request: Request) -> Response:
    """Return requests and tokens of every rank, with the field names of SGLang's older clients."""
    snapshot = await reads_of(request).read(GetState())
    return snapshot.json(
        "load",
        lambda state: [
            {
                "dp_rank": rank["dp_rank"],
                "num_reqs": rank["num_running"] + rank["num_waiting"],
                "num_waiting_reqs": rank["num_waiting"],
                "num_tokens": used_tokens(rank),
            }
            for rank in state["ranks"]
        ],
    )


def _load(
    rank: Mapping[str, Any], counters: Mapping[str, Any], sections: Collection[str]
) -> dict[str, Any]:
    """Return the load of a rank, with these `_SECTIONS` and SGLang's field names.

    Counts are in requests and tokens. `gen_throughput` is output tokens per second over all ranks,
    from the engine's last line of statistics.
    """
    num_running, num_waiting = rank["num_running"], rank["num_waiting"]
    load = {
        "dp_rank": rank["dp_rank"],
        "timestamp": time.time(),
        "num_running_reqs": num_running,
        "num_waiting_reqs": num_waiting,
        "num_total_reqs": num_running + num_waiting,
        "num_used_tokens": used_tokens(rank),
        "max_total_num_tokens": max_tokens(rank),
        "token_usage": token_usage(rank),
        "gen_throughput": counters.get("gen_throughput", 0.0),
        "cache_hit_rate": share(counters, "cached_tokens", "prompt_tokens"),
        "max_running_requests": rank["total_rows"],
        "utilization": num_running / max(rank["total_rows"], 1),
    }
    if "memory" in sections:
        pages = {name: count for name, count in rank.items() if name.endswith("_pages")}
        load["memory"] = {"token_capacity": max_tokens(rank), **pages}
    if "spec" in sections:
        rate = share(counters, "accepted_draft_tokens", "drafted_tokens")
        load["speculative"] = {"accept_rate": rate}
    if "queues" in sections:
        load["queues"] = {"waiting": num_waiting}
    return load


def _aggregate(loads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    count = max(len(loads), 1)
    return {
        "total_running_reqs": sum(load["num_running_reqs"] for load in loads),
        "total_waiting_reqs": sum(load["num_waiting_reqs"] for load in loads),
        "total_reqs": sum(load["num_total_reqs"] for load in loads),
        "avg_token_usage": sum(load["token_usage"] for load in loads) / count,
        "avg_throughput": sum(load["gen_throughput"] for load in loads) / count,
        "avg_utilization": sum(load["utilization"] for load in loads) / count,
    }


def _state_of(rank: Mapping[str, Any], counters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "dp_rank": rank["dp_rank"],
        "last_gen_throughput": counters.get("gen_throughput", 0.0),
        "effective_max_running_requests_per_dp": rank["total_rows"],
        "load": rank["num_running"] + rank["num_waiting"],
        "memory_usage": {"token_capacity": max_tokens(rank), "token_usage": token_usage(rank)},
    }


_STATUS_OF_CODE = {
    "starting": "starting",
    "engine_stuck": "stuck",
    "shutting_down": "draining",
    "engine_dead": "dead",
    "steps_fail": "failing",
}


def health_answer(check: Callable[[], None], health: EngineHealth, status: str) -> Response:
    """Return 200 and `status` if `check` passes, else its error, and the time since when the engine
    is stuck (ISO 8601 in UTC). Both have the progress of loading or compiling (`core.progress`)."""
    report = health.progress
    progress = {} if report is None else {"progress": report}
    try:
        check()
    except Exception as raised:
        error, stuck_since = to_api_error(raised), health.stuck_since
        if error.code not in _STATUS_OF_CODE:
            raise
        since = {} if stuck_since is None else {"since": stuck_since.isoformat(timespec="seconds")}
        status = _STATUS_OF_CODE[error.code]
        body = {"status": status, **since, **progress, "error": error_body(error)}
        headers = dict(error.headers or {})
        return Response(msgspec.json.encode(body), error.status_code, headers, "application/json")
    return json_response({"status": status, **progress})


class Gate:
    """The application given to uvicorn: it refuses everything except `/liveness` until `open`, so
    that a client sees that the server is starting instead of waiting."""

    def __init__(self, health: EngineHealth) -> None:
        self._health = health
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope["path"])(scope, receive, send)

    def _answer(self, path: str) -> Response:
        if path == "/liveness":
            return health_answer(self._health.check, self._health, "starting")
        if path in ("/health", "/ping"):
            return health_answer(self._refuse, self._health, "starting")
        return error_response(starting_error(), path)

    def _refuse(self) -> None:
        self._health.check()
        raise starting_error()


def starting_error() -> ApiError:
    """Return the answer to all requests until the engine is ready."""
    return ApiError(503, "the server is starting: the engine loads and compiles", code="starting")

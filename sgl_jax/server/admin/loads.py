"""The load of each rank in SGLang's words, made from the engine's state (`EngineCore.state`)."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import GetState
from sgl_jax.metrics.engine_metrics import max_tokens, token_usage, used_tokens
from sgl_jax.server.admin.calls import call_engine
from sgl_jax.server.answer_stream import json_response
from sgl_jax.server.openapi import answers
from sgl_jax.server.references import references_of

# Values of `/v1/loads?include=`; "core" is always there, "all" is every one.
SECTIONS = ("core", "memory", "spec", "queues", "all")
router = APIRouter(tags=["management"])


@router.get("/v1/loads", responses=answers())
async def loads(
    request: Request,
    include: Annotated[str, Query(description=f"of {', '.join(SECTIONS)}, with commas")] = "all",
    dp_rank: Annotated[int | None, Query(ge=0, description="of this rank only")] = None,
) -> Response:
    """Requests, tokens and pages of every rank, and over all of them."""
    sections = [name.strip() for name in include.split(",")]
    for name in sections:
        if name not in SECTIONS:
            raise InvalidRequestError(
                f"include takes {', '.join(SECTIONS)}, got {name!r}", "include"
            )
    refs = references_of(request)
    dp_size = refs.frontend.facts.dp_size
    if dp_rank is not None and dp_rank >= dp_size:
        raise InvalidRequestError(
            f"dp_rank must be in [0, {dp_size - 1}], got {dp_rank}", "dp_rank"
        )
    state = (await call_engine(refs, GetState())).data
    found = loads_of(state, SECTIONS if "all" in sections else sections)
    if dp_rank is not None:
        found = [load for load in found if load["dp_rank"] == dp_rank]
    return json_response(
        {
            "version": request.app.version,
            "dp_rank_count": dp_size,
            "loads": found,
            "aggregate": aggregate(found),
        }
    )


@router.get("/get_load", responses=answers())
async def get_load(request: Request) -> Response:
    """Requests and tokens of every rank, in the words of SGLang's older clients."""
    state = (await call_engine(references_of(request), GetState())).data
    return json_response(
        [
            {
                "dp_rank": rank["dp_rank"],
                "num_reqs": rank["num_running"] + rank["num_waiting"],
                "num_waiting_reqs": rank["num_waiting"],
                "num_tokens": used_tokens(rank),
            }
            for rank in state["ranks"]
        ]
    )


def loads_of(state: Mapping[str, Any], sections: Collection[str]) -> list[dict[str, Any]]:
    """The load of every rank, with these `SECTIONS`.

    Counts are of requests and tokens; `gen_throughput` is output tokens a second of all ranks
    together, as of the engine's last line of statistics.
    """
    counters = state["counters"]
    now = time.time()
    loads = []
    for rank in state["ranks"]:
        num_running, num_waiting = rank["num_running"], rank["num_waiting"]
        load = {
            "dp_rank": rank["dp_rank"],
            "timestamp": now,
            "num_running_reqs": num_running,
            "num_waiting_reqs": num_waiting,
            "num_total_reqs": num_running + num_waiting,
            "num_used_tokens": used_tokens(rank),
            "max_total_num_tokens": max_tokens(rank),
            "token_usage": token_usage(rank),
            "gen_throughput": counters.get("gen_throughput", 0.0),
            "cache_hit_rate": _share(counters, "cached_tokens", "prompt_tokens"),
            "max_running_requests": rank["total_rows"],
            "utilization": num_running / max(rank["total_rows"], 1),
        }
        if "memory" in sections:
            pages = {name: count for name, count in rank.items() if name.endswith("_pages")}
            load["memory"] = {"token_capacity": max_tokens(rank), **pages}
        if "spec" in sections:
            rate = _share(counters, "accepted_draft_tokens", "drafted_tokens")
            load["speculative"] = {"accept_rate": rate}
        if "queues" in sections:
            load["queues"] = {"waiting": num_waiting}
        loads.append(load)
    return loads


def aggregate(loads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums and means over the ranks of `loads`."""
    count = max(len(loads), 1)
    return {
        "total_running_reqs": sum(load["num_running_reqs"] for load in loads),
        "total_waiting_reqs": sum(load["num_waiting_reqs"] for load in loads),
        "total_reqs": sum(load["num_total_reqs"] for load in loads),
        "avg_token_usage": sum(load["token_usage"] for load in loads) / count,
        "avg_throughput": sum(load["gen_throughput"] for load in loads) / count,
        "avg_utilization": sum(load["utilization"] for load in loads) / count,
    }


def internal_state(rank: Mapping[str, Any], counters: Mapping[str, Any]) -> dict[str, Any]:
    """One of `/server_info`'s `internal_states`, as benches and routers read it."""
    return {
        "dp_rank": rank["dp_rank"],
        "last_gen_throughput": counters.get("gen_throughput", 0.0),
        "effective_max_running_requests_per_dp": rank["total_rows"],
        "load": rank["num_running"] + rank["num_waiting"],
        "memory_usage": {"token_capacity": max_tokens(rank), "token_usage": token_usage(rank)},
    }


def _share(counters: Mapping[str, Any], part: str, whole: str) -> float:
    return float(counters.get(part, 0) / max(counters.get(whole, 0), 1))

"""The load of every rank, as routers ask for it."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import GetState
from sgl_jax.server.context import context_of
from sgl_jax.server.generation import json_response
from sgl_jax.server.loads import SECTIONS, aggregate, loads_of, num_used_tokens
from sgl_jax.server.openapi import answers

router = APIRouter(tags=["management"])


@router.get("/v1/loads", responses=answers())
async def loads(
    request: Request,
    include: Annotated[str, Query(description=f"of {', '.join(SECTIONS)}, with commas")] = "all",
    dp_rank: Annotated[int | None, Query(ge=0, description="of this rank only")] = None,
) -> Response:
    """Requests, tokens and pages of every rank, and over all of them."""
    sections = [name.strip() for name in include.split(",")]
    unknown = [name for name in sections if name not in SECTIONS]
    if unknown:
        raise InvalidRequestError(
            f"include takes {', '.join(SECTIONS)}, got {unknown[0]!r}", "include"
        )
    context = context_of(request)
    dp_size = context.frontend.facts.dp_size
    if dp_rank is not None and dp_rank >= dp_size:
        raise InvalidRequestError(
            f"dp_rank must be in [0, {dp_size - 1}], got {dp_rank}", "dp_rank"
        )
    state = (await context.ask(GetState())).data
    found = loads_of(state, sections)
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
    state = (await context_of(request).ask(GetState())).data
    return json_response(
        [
            {
                "dp_rank": rank["dp_rank"],
                "num_reqs": rank["num_running"] + rank["num_waiting"],
                "num_waiting_reqs": rank["num_waiting"],
                "num_tokens": num_used_tokens(rank),
            }
            for rank in state["ranks"]
        ]
    )

"""Sessions: opened, closed, listed, rolled back and forked. Their turns come as requests."""

import contextlib
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from sgl_jax.core.errors import EngineDeadError, ShuttingDownError
from sgl_jax.core.messages import (
    CloseSession,
    ForkSession,
    ListSessions,
    OpenSession,
    Reply,
    RollbackSession,
    SessionMessage,
)
from sgl_jax.engine.request_limits import one_namespace
from sgl_jax.server.context import ServerContext, context_of
from sgl_jax.server.errors import ApiError
from sgl_jax.server.generation import CLIENT_GONE, json_response, while_connected
from sgl_jax.server.json_route import JsonRoute
from sgl_jax.server.openapi import answers
from sgl_jax.server.session_protocol import (
    CloseSessionBody,
    Forked,
    ForkSessionBody,
    OpenSessionBody,
    RollbackSessionBody,
    RolledBack,
    SessionList,
)

router = APIRouter(tags=["sessions"], route_class=JsonRoute)


@router.post("/open_session", responses=answers(str))
async def open_session(body: OpenSessionBody, request: Request) -> Response:
    """Open a session; answers its id, or a 503 while too many are open."""
    context_of(request).check_open()
    session_id = body.session_id or uuid.uuid4().hex
    namespace = one_namespace(body.extra_key, body.cache_salt)
    await _ask(
        request,
        lambda rid: OpenSession(
            rid=rid,
            session_id=session_id,
            streaming=bool(body.streaming),
            capacity_of_str_len=body.capacity_of_str_len,
            timeout_s=body.timeout,
            namespace=namespace,
        ),
        opens=None if body.session_id else session_id,
    )
    return json_response(session_id)


@router.post("/close_session", responses=answers())
async def close_session(body: CloseSessionBody, request: Request) -> Response:
    """Close a session and free its memory; a turn in flight is finished first."""
    await _ask(request, lambda rid: CloseSession(rid=rid, session_id=body.session_id))
    return json_response({})


@router.post("/rollback_session", responses=answers(RolledBack))
async def rollback_session(body: RollbackSessionBody, request: Request) -> Response:
    """Take a streaming session back to the end of an earlier turn."""
    data = await _ask(
        request,
        lambda rid: RollbackSession(rid=rid, session_id=body.session_id, num_turns=body.num_turns),
    )
    return json_response(msgspec.convert(data, RolledBack))


@router.post("/fork_session", responses=answers(Forked))
async def fork_session(body: ForkSessionBody, request: Request) -> Response:
    """Open a streaming session with the history of another; what is cached of it is shared.

    A 503 while too many are open, or sessions hold too many tokens.
    """
    context_of(request).check_open()
    new_id = body.new_session_id or uuid.uuid4().hex
    data = await _ask(
        request,
        lambda rid: ForkSession(rid=rid, session_id=body.session_id, new_session_id=new_id),
        opens=None if body.new_session_id else new_id,
    )
    return json_response(msgspec.convert(data, Forked))


@router.get("/list_sessions", responses=answers(SessionList))
@router.post("/list_sessions", responses=answers(SessionList))
async def list_sessions(request: Request) -> Response:
    """All open sessions."""
    return json_response(
        msgspec.convert(await _ask(request, lambda rid: ListSessions(rid=rid)), SessionList)
    )


async def _ask(
    request: Request, make_message: Callable[[str], SessionMessage], *, opens: str | None = None
) -> dict[str, Any]:
    """The engine's answer. Raises `ApiError` with its reason if it refused.

    `opens` is the generated id of the session that this would open: if nobody hears of it, because
    the answer comes too late or the client has gone, the session is closed. (One that its client
    has named stays: the client can use it or close it.)
    """
    context = context_of(request)
    if opens is None:
        reply = await context.ask(make_message)
    else:
        asking = context.ask(make_message, on_unheard=lambda r: _close_unheard(context, opens, r))
        heard = await while_connected(request.receive, asking)
        if heard is None:
            raise ApiError(CLIENT_GONE, "the client went away")
        reply = heard
    if reply.ok:
        return reply.data
    context.frontend.check_alive()
    status_code = int(reply.data.get("status_code", 400))
    code = {400: "invalid_value", 503: "too_many_sessions"}.get(status_code)
    raise ApiError(status_code, reply.message, param=reply.data.get("param"), code=code)


def _close_unheard(context: ServerContext, session_id: str, reply: Reply) -> None:
    """Close a session whose id nobody has learnt, if it was opened."""
    if not reply.ok:
        return
    # Otherwise it goes with the engine.
    with contextlib.suppress(EngineDeadError, ShuttingDownError):
        context.frontend.ask(
            lambda rid: CloseSession(rid=rid, session_id=session_id), lambda reply: None
        )

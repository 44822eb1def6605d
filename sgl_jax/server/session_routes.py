"""Sessions: opened, closed, listed, rolled back and forked. Their turns come as requests."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
from sgl_jax.server.connection import unless_gone
from sgl_jax.server.context import ServerContext, context_of
from sgl_jax.server.errors import ApiError
from sgl_jax.server.generation import json_response
from sgl_jax.server.json_route import JsonRoute
from sgl_jax.server.openapi import answers
from sgl_jax.server.session_owner import SessionOwner, owner_of
from sgl_jax.server.session_protocol import (
    CloseSessionBody,
    Forked,
    ForkSessionBody,
    ListSessionsBody,
    OpenSessionBody,
    RollbackSessionBody,
    RolledBack,
    SessionBody,
    SessionList,
)

router = APIRouter(tags=["sessions"], route_class=JsonRoute)


class SessionCall(NamedTuple):
    """A call about sessions from route to engine; `SessionService` has its handler by `message`."""

    route: str
    body: type[SessionBody]
    message: type[SessionMessage]
    answer: Callable[[dict[str, Any], SessionOwner], Any]  # of the engine's data
    answers: type | None  # what `answer` makes, for the description
    summary: str
    # The field of body and message that names the session which the call opens.
    opens: str | None = None
    methods: tuple[str, ...] = ("POST",)


def _forked(data: dict[str, Any], owner: SessionOwner) -> Forked:
    return msgspec.convert(data | {"session_id": owner.client_id(data["session_id"])}, Forked)


def _listed(data: dict[str, Any], owner: SessionOwner) -> SessionList:
    """With API keys, the sessions that the caller's key has opened."""
    told = [
        entry | {"session_id": owner.client_id(entry["session_id"])} for entry in data["sessions"]
    ]
    own = [entry for entry in told if entry["session_id"] is not None]
    return msgspec.convert({"sessions": own}, SessionList)


CALLS = (
    SessionCall(
        "/open_session",
        OpenSessionBody,
        OpenSession,
        lambda data, owner: owner.client_id(data["session_id"]),
        str,
        "Open a session; answers its id, or a 503 while too many are open.",
        opens="session_id",
    ),
    SessionCall(
        "/close_session",
        CloseSessionBody,
        CloseSession,
        lambda data, owner: {},
        None,
        "Close a session and free its memory; a turn in flight is finished first.",
    ),
    SessionCall(
        "/rollback_session",
        RollbackSessionBody,
        RollbackSession,
        lambda data, owner: msgspec.convert(data, RolledBack),
        RolledBack,
        "Take a streaming session back to the end of an earlier turn.",
    ),
    SessionCall(
        "/fork_session",
        ForkSessionBody,
        ForkSession,
        _forked,
        Forked,
        "Open a streaming session with the history of another; what is cached of it is shared. "
        "A 503 while too many are open, or sessions hold too many tokens.",
        opens="new_session_id",
    ),
    SessionCall(
        "/list_sessions",
        ListSessionsBody,
        ListSessions,
        _listed,
        SessionList,
        "All open sessions of the caller.",
        methods=("GET", "POST"),
    ),
)


def _add_route(call: SessionCall) -> None:
    async def answer(body: SessionBody, request: Request) -> Response:
        context = context_of(request)
        if call.opens is not None:
            context.check_open()
        owner = owner_of(request)
        message = body.to_message(owner)
        is_named = call.opens is None or getattr(body, call.opens) is not None
        opens = None if is_named else getattr(message, call.opens or "")
        make_message = functools.partial(_with_rid, message)
        return json_response(call.answer(await _ask(request, make_message, opens=opens), owner))

    async def answer_without_body(request: Request) -> Response:
        return await answer(call.body(), request)

    answer.__annotations__["body"] = call.body
    has_body = bool(call.body.model_fields)
    for method in call.methods:
        router.add_api_route(
            call.route,
            answer if has_body else answer_without_body,
            methods=[method],
            responses=answers(call.answers),
            name=call.route.strip("/"),
            description=call.summary,
        )


for _call in CALLS:
    _add_route(_call)


def _with_rid(message: SessionMessage, rid: str) -> SessionMessage:
    return msgspec.structs.replace(message, rid=rid)


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
        reply = await unless_gone(request.receive, asking)
    if reply.ok:
        return reply.data
    context.frontend.check_alive()
    status_code = int(reply.data.get("status_code", 400))
    code = {400: "invalid_value", 503: "too_many_sessions"}.get(status_code)
    text = owner_of(request).as_told(reply.message)
    raise ApiError(status_code, text, param=reply.data.get("param"), code=code)


def _close_unheard(context: ServerContext, session_id: str, reply: Reply) -> None:
    """Close a session whose id nobody has learnt, if it was opened."""
    if not reply.ok:
        return
    # Otherwise it goes with the engine.
    with contextlib.suppress(EngineDeadError, ShuttingDownError):
        context.frontend.ask(
            lambda rid: CloseSession(rid=rid, session_id=session_id), lambda reply: None
        )

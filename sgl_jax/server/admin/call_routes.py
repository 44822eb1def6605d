"""Routes that pass a call to the engine, generated from the rows of the table of calls."""

import inspect
import typing
import uuid
from typing import Any

import msgspec
from annotated_types import DocInfo
from fastapi import APIRouter, Request, Response
from pydantic import Field, create_model

from sgl_jax.core.calls import Call
from sgl_jax.core.messages import CALL_OF, Name, Namespace, NewSessionId, SessionId, SessionMessage
from sgl_jax.core.request_limits import one_namespace
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.answer_stream import json_response
from sgl_jax.server.engine_calls import call_engine, refused
from sgl_jax.server.fields import User
from sgl_jax.server.guards.bodies import JsonRoute
from sgl_jax.server.guards.connection import unless_gone
from sgl_jax.server.guards.keys import SessionOwner, owner_of, tenant_of
from sgl_jax.server.references import references_of
from sgl_jax.server.shared_reads import reads_of
from sgl_jax.server.strict_model import StrictModel

router = APIRouter(route_class=JsonRoute)


def body_of(call: Call) -> type[StrictModel]:
    """Return the model of the body of a call's route (`core/calls.py`), perhaps without fields."""
    fields: dict[str, Any] = {}
    for name, hint, default in _fields(call):
        notes = getattr(hint, "__metadata__", ())
        text = next((note.documentation for note in notes if isinstance(note, DocInfo)), None)
        alias = next((str(note) for note in notes if isinstance(note, Name)), None)
        if hint == Namespace:
            text = "of all its turns: as in /generate; the other name of it is the same"
            for own in ("extra_key", "cache_salt"):
                fields[own] = (hint | None, Field(default=None, description=text))
            continue
        value: Any = None if hint == NewSessionId else default
        is_required = value is msgspec.NODEFAULT
        fields[name] = (
            hint if is_required else hint | None,
            Field(default=... if is_required else value, alias=alias, description=text),
        )
    if call.message in typing.get_args(SessionMessage):
        text = "the tenant that the session belongs to, as in /generate"
        fields["user"] = (User | None, Field(default=None, description=text))
    return create_model(f"{call.message.__name__}Body", __base__=StrictModel, **fields)


def message_of(call: Call, body: StrictModel, owner: SessionOwner) -> tuple[Any, str | None]:
    """Return the message for `body`, and the session's id if it is generated."""
    fields: dict[str, Any] = {}
    new_id = None
    for name, hint, _ in _fields(call):
        given: Any = getattr(body, name, None)
        if hint == Namespace:
            salt = one_namespace(*(getattr(body, own) for own in ("extra_key", "cache_salt")))
            given = owner.namespace(salt)
        elif hint == NewSessionId and given is None:
            given = new_id = owner.engine_id(uuid.uuid4().hex)
        elif hint in (SessionId, NewSessionId):
            given = owner.engine_id(given)
        fields[name] = given
    if "tenant" in call.message.__struct_fields__:
        fields["tenant"] = owner.tenant
    return call.message(**fields), new_id


def _fields(call: Call) -> list[tuple[str, Any, Any]]:
    hints = typing.get_type_hints(call.message, include_extras=True)
    fields = msgspec.structs.fields(call.message)
    set_here = ("rid", "tenant")
    return [(f.name, hints[f.name], f.default) for f in fields if f.name not in set_here]


def _add_routes(call: Call, route: str) -> None:
    body_type = body_of(call)
    opens = any(hint == NewSessionId for _, hint, _ in _fields(call))

    async def pass_on(request: Request, body: StrictModel | None = None) -> Response:
        owner = owner_of(request, tenant_of(request, getattr(body, "user", None)))
        if opens:
            references_of(request).check_open()
        message, new_id = message_of(call, body or body_type(), owner)
        if call.is_read:
            snapshot = await reads_of(request).read(message)
            key = route, owner.engine_id("")
            return snapshot.json(key, lambda data: _for_client(data, owner))
        data = _for_client(await _ask(request, call, message, owner, new_id), owner)
        return json_response(data["session_id"] if call.answer is str else data)

    parameters = [inspect.Parameter("request", _KEYWORD, annotation=Request)]
    fields = body_type.model_fields.values()
    if any(field.is_required() for field in fields):
        parameters.append(inspect.Parameter("body", _KEYWORD, annotation=body_type))
    elif fields:
        kind: Any = body_type | None
        parameters.append(inspect.Parameter("body", _KEYWORD, annotation=kind, default=None))
    pass_on.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    for method in call.methods:
        router.add_api_route(
            route,
            pass_on,
            methods=[method],
            tags=["management" if call.is_admin else "sessions"],
            responses=answers(call.answer),
            name=route.strip("/"),
            description=" ".join((inspect.getdoc(call.message) or "").partition("\n\n")[0].split()),
        )


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


for _call in CALL_OF.values():
    if _call.route is not None:
        _add_routes(_call, _call.route)


async def _ask(
    request: Request, call: Call, message: Any, owner: SessionOwner, new_id: str | None
) -> dict[str, Any]:
    """Return the engine's reply. Raises `ApiError` with the reason if it refused.

    If the call opens a session with a generated id `new_id`, it is also cancelled when the client
    disconnects, since no one could close the session.
    """
    refs = references_of(request)
    asking = call_engine(refs, message, call.timeout_s, is_patient=True)
    reply = await (asking if new_id is None else unless_gone(request.receive, asking))
    if reply.ok:
        return reply.data
    refs.frontend.check_alive()
    raise refused(reply, owner.for_client(reply.message))


def _for_client(data: Any, owner: SessionOwner) -> Any:
    """Return `data` with client-side session ids and without sessions of other callers."""
    if isinstance(data, list):
        return [_for_client(entry, owner) for entry in data if not _is_foreign(entry, owner)]
    if not isinstance(data, dict):
        return data
    own = {name: _for_client(value, owner) for name, value in data.items()}
    if data.get("session_id") is not None:
        own["session_id"] = owner.client_id(data["session_id"])
    return own


def _is_foreign(entry: Any, owner: SessionOwner) -> bool:
    session_id = entry.get("session_id") if isinstance(entry, dict) else None
    return session_id is not None and owner.client_id(session_id) is None

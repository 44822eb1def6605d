"""The OpenAPI description: bodies from pydantic models, answers from msgspec structs."""

from functools import cache
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from sgl_jax.server.errors import ErrorResponse

_REF = "#/components/schemas/{name}"
_ERRORS: dict[str, dict[str, Any]] = {
    "400": {
        "description": "the request cannot be served as it stands; `param` names the field at fault"
    },
    "401": {"description": "the API key is missing or wrong"},
    "403": {"description": "without a key: a page of another origin, or a foreign Host"},
    "404": {"description": "no such model or route"},
    "405": {
        "description": "the route does not take this method",
        "headers": {
            "Allow": {"description": "the methods of the route", "schema": {"type": "string"}}
        },
    },
    "413": {"description": "the body is too large"},
    # Replaces FastAPI's generated 422; all other client errors are like a 400.
    "4XX": {"description": "any other fault of the request"},
    "500": {"description": "a defect of the server"},
    "503": {
        "description": "too busy, starting or shutting down, or the engine is stuck or dead; see "
        "Retry-After",
        "headers": {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}},
    },
}
Responses = dict[int | str, dict[str, Any]]
_structs = set[type[msgspec.Struct]]()  # of all routes


def answers(
    kind: type[msgspec.Struct] | type[str] | None = None,
    failure: type[msgspec.Struct] = ErrorResponse,
    *,
    streams: bool = False,
) -> Responses:
    """Return the documented answers of a route: `kind` as JSON (None: any object), server-sent
    events if `streams`, and the errors as `failure`."""
    content = _json(kind)
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: Responses = {200: {"description": "done", "content": content}}
    return responses | {
        status: {**error, "content": _json(failure)} for status, error in _ERRORS.items()
    }


def _json(kind: type[msgspec.Struct] | type[str] | None) -> dict[str, Any]:
    schema = {"type": "object" if kind is None else "string"}
    if kind is not None and issubclass(kind, msgspec.Struct):
        _structs.add(kind)
        schema = {"$ref": _REF.format(name=kind.__name__)}
    return {"application/json": {"schema": schema}}


def install_openapi(app: FastAPI, *, needs_key: bool) -> None:
    """Serve the description of the routes of `app` at /openapi.json."""
    _, components = msgspec.json.schema_components(_structs, ref_template=_REF)

    @cache
    def describe() -> dict[str, Any]:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        parts = schema.setdefault("components", {})
        parts.setdefault("schemas", {}).update(components)
        if needs_key:
            parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}]
        return schema

    app.openapi = describe  # type: ignore[method-assign]

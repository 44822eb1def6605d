"""The OpenAPI description: bodies come from pydantic, answers from the msgspec structs."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from sgl_jax.server.errors import ErrorResponse

_REF = "#/components/schemas/{name}"
_ERRORS = {
    "400": "the request cannot be served as it stands; `param` names the field at fault",
    "401": "the API key is missing or wrong",
    "404": "no such model or route",
    "405": "the route does not know this method",
    "413": "the body is too large",
    "500": "a defect of the server",
    "503": "too busy, starting or shutting down, or the engine is stuck or dead; see Retry-After",
}
Responses = dict[int | str, dict[str, Any]]


def answers(
    kind: type[msgspec.Struct] | type[str] | None = None,
    failure: type[msgspec.Struct] = ErrorResponse,
) -> Responses:
    """The answers of a route: `kind` as JSON (None: any object), and the errors as `failure`."""
    responses: Responses = {
        200: {"description": "done", "content": {"application/json": _of(kind)}}
    }
    for status, text in _ERRORS.items():
        content = {"application/json": _of(failure)}
        responses[status] = {"description": text, "content": content}
    responses["405"]["headers"] = {
        "Allow": {"description": "the methods of the route", "schema": {"type": "string"}}
    }
    responses["503"]["headers"] = {
        "Retry-After": {"description": "seconds", "schema": {"type": "integer"}}
    }
    # FastAPI would document a 422 of its own; all other faults of the client are like a 400.
    responses["4XX"] = {
        "description": "any other fault of the request",
        "content": {"application/json": _of(failure)},
    }
    return responses


def streamed_answers(
    kind: type[msgspec.Struct], failure: type[msgspec.Struct] = ErrorResponse
) -> Responses:
    """As `answers`, or a stream of server-sent events."""
    responses = answers(kind, failure)
    responses[200]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return responses


def text_answer(description: str) -> Responses:
    responses = answers()
    content = {"text/plain": {"schema": {"type": "string"}}}
    responses[200] = {"description": description, "content": content}
    return responses


def install_openapi(app: FastAPI, structs: list[type], *, needs_key: bool) -> None:
    """Serve a description at /openapi.json that holds the schemas of `structs`, too."""
    _, components = msgspec.json.schema_components([ErrorResponse, *structs], ref_template=_REF)

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
            )
            parts = schema.setdefault("components", {})
            parts.setdefault("schemas", {}).update(components)
            if needs_key:
                parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"key": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _of(kind: type[msgspec.Struct] | type[str] | None) -> dict[str, Any]:
    if kind is None:
        return {"schema": {"type": "object"}}
    if kind is str:
        return {"schema": {"type": "string"}}
    return {"schema": {"$ref": _REF.format(name=kind.__name__)}}

"""Routes whose bodies are JSON by the letter of RFC 8259, within the server's limits."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect

from sgl_jax.server.connection import CLIENT_GONE
from sgl_jax.server.context import context_of
from sgl_jax.server.errors import ApiError
from sgl_jax.server.json_body import validated


class JsonRoute(APIRoute):
    """Calls an endpoint that takes a body with `body` and `request`, and nothing else.

    FastAPI's own way to an endpoint knows forms, files and dependencies, and is a sixth of what a
    short request costs the server. Here it is left the routes without a body, and the description.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is None:
            return super().get_route_handler()
        field = self.body_field.field_info
        annotation: Any = field.annotation
        kind: TypeAdapter[Any] = TypeAdapter(annotation)
        endpoint = self.endpoint

        async def handle(request: Request) -> Response:
            data = await _whole_body(request)
            if not data and not field.is_required():
                body = None
            elif _is_json(request):
                body = await context_of(request).json_bodies.read(data, kind)
            else:
                body = validated(data or None, kind)
            response: Response = await endpoint(body=body, request=request)
            return response

        return handle


async def _whole_body(request: Request) -> bytearray:
    """The whole body. It grows in place: to join 30 MiB of pieces takes the loop a while."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
    except ClientDisconnect as error:
        raise ApiError(CLIENT_GONE, "the client went away") from error
    return body


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )

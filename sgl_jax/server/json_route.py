"""Routes whose bodies are JSON by the letter of RFC 8259, within the server's limits."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from sgl_jax.server.context import context_of
from sgl_jax.server.json_body import decode_json


class JsonRoute(APIRoute):
    """What JSON does not know (NaN, half surrogates) is a 400."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict_handler(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict_handler


class _StrictRequest(Request):
    async def json(self) -> Any:
        return await decode_json(await self.body(), context_of(self).limits)

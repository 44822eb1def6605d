"""Reads JSON bodies strictly: what JSON does not know (NaN, half surrogates) is a 400."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

from sgl_jax.server.errors import ApiError


class JsonRoute(APIRoute):
    """A route whose body must be JSON by the letter of RFC 8259."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict_handler(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict_handler


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return msgspec.json.decode(await self.body())
        except UnicodeDecodeError as error:
            raise ApiError(
                400, f"the body is not UTF-8: {error.reason}", code="invalid_json"
            ) from error
        except RecursionError as error:
            raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
        except msgspec.MsgspecError as error:
            raise ApiError(
                400, f"the body is not valid JSON: {error}", code="invalid_json"
            ) from error

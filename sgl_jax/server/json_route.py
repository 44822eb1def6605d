"""Routes whose bodies are JSON by the letter of RFC 8259, within the server's limits."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from sgl_jax.server.context import context_of


class JsonRoute(APIRoute):
    """What JSON does not know (NaN, half surrogates) is a 400."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        annotation: Any = None if self.body_field is None else self.body_field.field_info.annotation
        is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        kind = annotation if is_model else None

        async def strict_handler(request: Request) -> Response:
            strict = _StrictRequest(request.scope, request.receive)
            strict.kind = kind
            return await handler(strict)

        return strict_handler


class _StrictRequest(Request):
    _body: bytes
    kind: type[BaseModel] | None = None  # of the body

    async def body(self) -> bytes:
        """The whole body. It grows in place: to join 30 MiB of pieces takes the loop a while."""
        if not hasattr(self, "_body"):
            body = bytearray()
            async for piece in self.stream():
                body += piece
            self._body = body  # type: ignore[assignment]
        return self._body

    async def json(self) -> Any:
        return await context_of(self).json_bodies.decode(await self.body(), self.kind)

"""What every HTTP request passes before a route sees it. Plain ASGI: streams stay cheap."""

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_jax.server.errors import ApiError, error_response

MAX_BODY_BYTES = 32 * 2**20
_OPEN_PATHS = frozenset({"/health"})  # load balancers have no key


class ApiKeyMiddleware:
    """Lets only bearers of the key pass."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = ApiError(
                    401,
                    "the Authorization header must be 'Bearer ' and this server's API key",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimitMiddleware:
    """Refuses bodies above `MAX_BODY_BYTES`, by their announced length or while they arrive."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
            await error_response(_too_large())(scope, receive, send)
            return
        num_bytes = 0

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise _too_large()
            return message

        await self._app(scope, counting_receive, send)


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"the body exceeds the {MAX_BODY_BYTES} bytes that one request may have",
        code="body_too_large",
        headers={"connection": "close"},
    )

"""What every HTTP request passes before a route sees it. Plain ASGI: streams stay cheap."""

import asyncio
import ctypes
import gc

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_jax.server.api_keys import ADMIN_PATHS, ApiKeys, note_caller
from sgl_jax.server.errors import ApiError, error_response, is_of_messages
from sgl_jax.server.limits import Limits

_LONG_BYTES = 2**20
_DELAY_S = 1.0  # once for all requests that end within it


class MemoryReturn:
    """Gives the memory of long requests back to the system; one per server.

    What a request leaves behind may hang together in circles, of exceptions and the frames they
    went through, which Python frees at some later time; and the C library keeps what it once had.
    """

    def __init__(self) -> None:
        self._is_due = False

    def after(self, num_bytes: int) -> None:
        """A request with a body of so many bytes has ended."""
        if num_bytes >= _LONG_BYTES and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_DELAY_S, self._start)

    def _start(self) -> None:
        self._is_due = False
        # Milliseconds: what the server is made of was frozen when it started.
        gc.collect()
        asyncio.get_running_loop().run_in_executor(None, _trim)


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


_OPEN_PATHS = frozenset({"/health", "/ping"})  # load balancers have no key
# A page may read these of an answer, beside what browsers always show.
_SHOWN_HEADERS = ("retry-after",)


def let_pages_in(app: ASGIApp, origins: str | None) -> ASGIApp:
    """`app` for pages of `origins` too, as `--cors-allow-origins` names them; None: of no other.

    Around everything that answers, so that a page can read every refusal.
    """
    if origins is None:
        return app
    return CORSMiddleware(
        app,
        allow_origins=[origin.strip() for origin in origins.split(",")],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=_SHOWN_HEADERS,
    )


class ApiKeyMiddleware:
    """Refuses callers that `keys` does not admit, before anything of the body is read."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = _authorization(scope)
            caller = self._keys.admit(scope["path"], given)
            if caller is None:
                whose = "an admin API key" if scope["path"] in ADMIN_PATHS else "an API key"
                or_header = ", or x-api-key the key," if is_of_messages(scope["path"]) else ""
                refusal = ApiError(
                    401,
                    f"the Authorization header must be 'Bearer ' and {whose}{or_header} of this "
                    "server",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                await error_response(refusal, scope["path"])(scope, receive, send)
                return
            note_caller(scope, caller)
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> list[bytes]:
    """Values of the `Authorization` header; Anthropic's clients may send `x-api-key` instead."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if not given and is_of_messages(scope["path"]):
        keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
        given = [b"Bearer " + key for key in keys]
    return given


class BodyLimitMiddleware:
    """Refuses bodies above what their route may have, by their announced length or while they
    arrive, and what would make the bodies held at a time too many bytes."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._held_bytes = 0
        self._memory = MemoryReturn()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._limits.body_bytes_of(scope["path"])
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            # The rest is read and dropped, so that the client gets to read the answer; unless it
            # would take too long.
            is_endless = int(announced) > self._limits.max_held_body_bytes
            refusal = _too_large(most, closes=is_endless)
            await error_response(refusal, scope["path"])(scope, receive, send)
            return
        num_bytes = 0

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            gained = len(message.get("body", b""))
            num_bytes += gained
            self._held_bytes += gained
            if num_bytes > most:
                raise _too_large(most, closes=True)
            if gained and self._held_bytes > self._limits.max_held_body_bytes:
                raise ApiError(
                    503, "the server holds too many long requests", code="too_many_bytes"
                )
            return message

        try:
            await self._app(scope, counting_receive, send)
        finally:
            self._held_bytes -= num_bytes
            self._memory.after(num_bytes)


def _too_large(most: int, *, closes: bool) -> ApiError:
    return ApiError(
        413,
        f"the body exceeds the {most} bytes that this route takes",
        code="body_too_large",
        headers={"connection": "close"} if closes else None,
    )

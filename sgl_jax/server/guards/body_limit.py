"""Bounds the bytes of bodies, of each and of all at a time, and returns the memory of long ones."""

import asyncio
import ctypes
import gc

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_jax.server.errors import ApiError, error_response
from sgl_jax.server.guards.limits import Limits

_LONG_BYTES = 2**20
_DELAY_S = 1.0  # once for all requests that end within it


class MemoryReturn:
    """Gives the memory of long requests back to the system; one per server.

    Garbage of a request may hang together in circles, of exceptions and the frames they went
    through, which Python frees at some later time; and the C library keeps freed memory.
    """

    def __init__(self) -> None:
        self._is_due = False

    def after(self, num_bytes: int) -> None:
        if num_bytes >= _LONG_BYTES and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_DELAY_S, self._start)

    def _start(self) -> None:
        self._is_due = False
        # It takes milliseconds: the objects of the server were frozen when it started.
        gc.collect()
        asyncio.get_running_loop().run_in_executor(None, _trim)


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


class BodyLimitMiddleware:
    """Refuses bodies above the limit of their route, by their announced length or while they
    arrive, and bodies that would exceed the bytes held at a time."""

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

"""Limits bodies in bytes and complexity, and decodes them strictly as JSON.

A decoder holds the interpreter lock until it is done. Its cost depends on values, not bytes: 27 MiB
of empty lists take seconds, the same amount of text milliseconds. So numpy first counts the values
of long bodies, in slices and without the lock. Long bodies are decoded and validated in a thread:
the event loop waits for at most one decoding, or for one part of a validation.
"""

import asyncio
import ctypes
import gc
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import State
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_jax.core.surrogates import replace_in_json
from sgl_jax.server.errors import ApiError, error_response, to_api_error
from sgl_jax.server.guards.connection import CLIENT_GONE
from sgl_jax.server.guards.limits import Limits
from sgl_jax.server.unserved_fields import STRICT

T = TypeVar("T")
_LONG_BYTES = 2**20
_DELAY_S = 1.0  # combines requests that end within this time


class BodyLimitMiddleware:
    """Refuses bodies above the limit of their route, by their announced length or while they
    arrive, and bodies that would exceed the total of held bytes."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._held_bytes = 0
        self._returns_memory = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._limits.body_bytes_of(scope["path"])
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            # Read and drop the rest, so that the client reads the answer, unless that would take
            # too long.
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
            if num_bytes >= _LONG_BYTES and not self._returns_memory:
                self._returns_memory = True
                asyncio.get_running_loop().call_later(_DELAY_S, self._return_memory)

    def _return_memory(self) -> None:
        """Return the memory of long requests to the system.

        A request may leave reference cycles of exceptions and their frames, which Python frees only
        later, and the C library keeps freed memory.
        """
        self._returns_memory = False
        # Takes milliseconds, because the server's objects were frozen at the start.
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            asyncio.get_running_loop().run_in_executor(None, trim, 0)


def _too_large(most: int, *, closes: bool) -> ApiError:
    return ApiError(
        413,
        f"the body exceeds the {most} bytes that this route takes",
        code="body_too_large",
        headers={"connection": "close"} if closes else None,
    )


# One thread: each further thread would delay the event loop by a turn of the interpreter lock.
_READER = ThreadPoolExecutor(1, thread_name_prefix="json")
_INLINE_BYTES = 65_536  # has too few values for counting to pay


class JsonRoute(APIRoute):
    """Calls an endpoint that takes only `body` and `request`.

    FastAPI's general path handles forms, files and dependencies, and takes a sixth of a short
    request's time. It still serves routes without a body, and the OpenAPI description.
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
            body = None
            if data or field.is_required():
                body = await _read_as(kind, data, request)
            response: Response = await endpoint(body=body, request=request)
            return response

        return handle


async def _whole_body(request: Request) -> bytearray:
    """Return the whole body, grown in place: joining 30 MiB of pieces would block the loop."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
    except ClientDisconnect as error:
        raise ApiError(CLIENT_GONE, "the client went away") from error
    return body


async def _read_as(kind: TypeAdapter[T], body: bytearray, request: Request) -> T:
    """Return the JSON value of `body` as a `kind`, strictly by RFC 8259.

    Raises:
        ApiError: 400, the body is not JSON, exceeds a limit of values, keys or depth, or is not a
            `kind`.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    main, _, sub = content_type.partition("/")
    if main != "application" or not (sub == "json" or sub.endswith("+json")):
        return _validated(body or None, kind)
    if len(body) > _INLINE_BYTES:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_READER, _read, kind, body, request.app.state)
    return _read(kind, body, request.app.state)


def _read(kind: TypeAdapter[T], body: bytearray, state: State) -> T:
    limits: Limits = state.limits
    is_long = len(body) > _INLINE_BYTES
    if is_long or body.count(b"[") + body.count(b"{") > limits.max_json_depth:
        check_shape(body, limits)
    try:
        value = _decoded(body, state)
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8: {error.reason}") from error
    except RecursionError as error:  # not JSON, or `check_shape` would have failed
        raise _invalid("the body is nested too deeply") from error
    except msgspec.MsgspecError as error:
        raise _invalid(f"the body is not valid JSON: {error}") from error
    return _validated(value, kind, STRICT if state.references.args.strict_fields else None)


def _decoded(body: bytearray, state: State) -> Any:
    """Decode the JSON of `body`, with unpaired surrogates replaced.

    Decoders refuse them, but tools cut their output within a character, and the conversation must
    continue.
    """
    try:
        return msgspec.json.decode(body)
    except (UnicodeDecodeError, msgspec.MsgspecError):
        replaced, num_replaced = replace_in_json(body)
        if not num_replaced:
            raise
        value = msgspec.json.decode(replaced)
        state.references.frontend.metrics.replaced_surrogates.inc(num_replaced)
        return value


def _validated(value: Any, kind: TypeAdapter[T], context: str | None = None) -> T:
    try:
        return kind.validate_python(value, context=context)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        in_body = [{**each, "loc": ("body", *each["loc"])} for each in found]
        raise to_api_error(RequestValidationError(in_body)) from error


_SLICE_BYTES = 2**20
_QUOTE, _COMMA = ord('"'), ord(",")
# Marks of keys, lists and objects, which dominate the cost of decoding.
_COSTLY = tuple(ord(char) for char in ":[{")
_DEPTH_OF_BYTE = np.zeros(256, np.int8)
_DEPTH_OF_BYTE[[ord("["), ord("{")]] = 1
_DEPTH_OF_BYTE[[ord("]"), ord("}")]] = -1


def check_shape(body: bytes | bytearray, limits: Limits) -> None:
    """Raise `ApiError` 400 if `body` has more values, keys or depth than `limits` allow.

    The counts are exact for JSON. Other input passes or fails arbitrarily.
    """
    depth = num_values = num_keys = 0
    in_string = False
    for piece in _without_escapes(body):
        codes = np.frombuffer(piece, np.uint8)
        is_quote = codes == _QUOTE
        # True after an odd number of quotes.
        is_inside = np.bitwise_xor.accumulate(is_quote.view(np.uint8)) != int(in_string)
        codes = codes[~is_inside]
        in_string ^= bool(np.count_nonzero(is_quote) & 1)
        num_values += int(np.count_nonzero(codes == _COMMA))
        num_keys += sum(int(np.count_nonzero(codes == code)) for code in _COSTLY)
        steps = _DEPTH_OF_BYTE[codes]
        depths = depth + np.cumsum(steps[steps != 0], dtype=np.int32)
        if len(depths):
            depth = int(depths[-1])
            _check("levels of lists and objects", int(depths.max()), limits.max_json_depth)
        _check("values", num_values, limits.max_json_values)
        _check("keys, lists and objects", num_keys, limits.max_json_keys)


def _without_escapes(body: bytes | bytearray) -> Iterator[bytes | bytearray]:
    r"""Yield slices of `body` without `\\` and `\"`, so that each quote begins or ends a string."""
    begun = b""  # a backslash that escapes the next slice's first byte
    for start in range(0, len(body), _SLICE_BYTES):
        piece = begun + body[start : start + _SLICE_BYTES]
        end = len(piece) - (len(piece) - len(piece.rstrip(b"\\"))) % 2
        begun = bytes(piece[end:])
        yield piece[:end].replace(rb"\\", b"").replace(rb"\"", b"")


def _check(unit: str, count: int, most: int) -> None:
    if count > most:
        raise _invalid(f"the body has more than {most:,} {unit}", code="too_complex")


def _invalid(message: str, code: str = "invalid_json") -> ApiError:
    return ApiError(400, message, code=code)

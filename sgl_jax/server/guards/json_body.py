"""JSON bodies, read strictly, and only once it is clear that this is cheap.

A decoder holds the interpreter until it is done. Its cost is not bytes but values: 27 MiB of empty
lists take it seconds, as many of text milliseconds. So long bodies are counted first, in slices, by
numpy, beside which other threads run. They are decoded and validated beside the event loop, which
waits for one of these at most, and of a validation for one of its parts.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from sgl_jax.server.errors import ApiError, to_api_error
from sgl_jax.server.guards.connection import CLIENT_GONE
from sgl_jax.server.guards.limits import Limits

T = TypeVar("T")
_INLINE_BYTES = 65_536  # has so few values that counting them would cost more than it saves
_SLICE_BYTES = 2**20
_QUOTE, _COMMA = ord('"'), ord(",")
# Marks of keys, lists and objects, which cost most of decoding.
_COSTLY = tuple(ord(char) for char in ":[{")
_DEPTH_OF_BYTE = np.zeros(256, np.int8)
_DEPTH_OF_BYTE[[ord("["), ord("{")]] = 1
_DEPTH_OF_BYTE[[ord("]"), ord("}")]] = -1


class JsonBodies:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # One, since each of several would take its turn of the interpreter before the event loop.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="json")

    async def read(self, body: bytearray, kind: TypeAdapter[T]) -> T:
        """The `kind` that `body` holds in JSON, by the letter of RFC 8259.

        Raises:
            ApiError: 400, it is no JSON, or has more values, keys or depth than the limits allow,
                or is no `kind`.
        """
        if len(body) > _INLINE_BYTES:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._reader, _read, body, self._limits, kind)
        if body.count(b"[") + body.count(b"{") > self._limits.max_json_depth:
            check_shape(body, self._limits)
        return validated(_decode(body), kind)


def _read(body: bytearray, limits: Limits, kind: TypeAdapter[T]) -> T:
    check_shape(body, limits)
    return validated(_decode(body), kind)


def validated(value: Any, kind: TypeAdapter[T]) -> T:
    """`value`, sent as a body, as a `kind`. Raises `ApiError` 400 that names the field at fault."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        in_body = [{**each, "loc": ("body", *each["loc"])} for each in found]
        raise to_api_error(RequestValidationError(in_body)) from error


def _decode(body: bytearray) -> Any:
    try:
        return msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8: {error.reason}") from error
    except RecursionError as error:  # it is no JSON, else `check_shape` would have counted
        raise _invalid("the body is nested too deeply") from error
    except msgspec.MsgspecError as error:
        raise _invalid(f"the body is not valid JSON: {error}") from error


def check_shape(body: bytes | bytearray, limits: Limits) -> None:
    """Raise `ApiError` 400 if `body` has more values, keys or depth than `limits` allow.

    Exact for JSON; other bytes pass or fail without meaning.
    """
    depth = num_values = num_keys = 0
    in_string = False
    for piece in _without_escapes(body):
        codes = np.frombuffer(piece, np.uint8)
        is_quote = codes == _QUOTE
        # True behind an odd number of quotes.
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
    r"""Slices of `body` without `\\` and `\"`, so that every quote begins or ends a string."""
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


class JsonRoute(APIRoute):
    """Calls an endpoint that takes a body with `body` and `request`, and nothing else.

    FastAPI's own way to an endpoint handles forms, files and dependencies, and takes a sixth of a
    short request's time. It still serves the routes without a body, and the description.
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
                body = await request.app.state.json_bodies.read(data, kind)
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

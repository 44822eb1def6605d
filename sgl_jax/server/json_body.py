"""JSON bodies, read strictly, and not before it is known that reading them is cheap.

A decoder holds the interpreter until it is done. What it costs is not bytes but values: 27 MiB of
empty lists take it seconds, as many of text milliseconds. So long bodies are counted first, in
slices, by numpy, which lets other threads run. They are decoded and validated beside the event
loop, which so waits for one of these at most, and of a validation for one of its parts.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from sgl_jax.server.errors import ApiError, to_api_error
from sgl_jax.server.limits import Limits

T = TypeVar("T")
_INLINE_BYTES = 65_536  # has so few values that counting them would cost more than it saves
_SLICE_BYTES = 2**20
_QUOTE, _COMMA = ord('"'), ord(",")
# Of a key, a list and an object: what costs most of decoding.
_COSTLY = tuple(ord(char) for char in ":[{")
_DEPTH_OF_BYTE = np.zeros(256, np.int8)
_DEPTH_OF_BYTE[[ord("["), ord("{")]] = 1
_DEPTH_OF_BYTE[[ord("]"), ord("}")]] = -1


class JsonBodies:
    """Decodes the bodies that one server receives."""

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

    Exact for JSON; of anything else it tells nothing, nor fails.
    """
    depth = num_values = num_keys = 0
    in_string = False
    for piece in _without_escapes(body):
        codes = np.frombuffer(piece, np.uint8)
        is_quote = codes == _QUOTE
        # Whether an odd number of quotes came before, or lies here.
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
    start = 0
    while start < len(body):
        end = min(start + _SLICE_BYTES, len(body))
        # Do not cut behind a backslash that escapes what follows.
        num_backslashes = 0
        while end < len(body) and body[end - 1 - num_backslashes] == ord("\\"):
            num_backslashes += 1
            if num_backslashes == end - start:
                break
        end += num_backslashes & 1
        yield body[start:end].replace(rb"\\", b"").replace(rb"\"", b"")
        start = end


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise _invalid(f"the body has more than {most:,} {what}", code="too_complex")


def _invalid(message: str, code: str = "invalid_json") -> ApiError:
    return ApiError(400, message, code=code)

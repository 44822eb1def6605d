"""Encode and decode messages with numpy arrays as msgpack: an array is (dtype, shape, bytes)."""

import re
from functools import cache
from typing import Any

import msgspec
import numpy as np


def make_encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_encode_array)


def make_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of type `kind`, the inverse of `make_encoder`."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _dtype_text(value.dtype), value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a message holds a {type(value).__name__}")


@cache
def _dtype_text(dtype: "np.dtype[Any]") -> str:
    # Cached: numpy builds this text on each access, at the cost of encoding a short array.
    return dtype.str


def _decode_array(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    # numpy would parse any other string as Python.
    if not re.fullmatch("[<|][biuf][1248]", dtype):
        raise ValueError(f"an array of an unknown dtype, {dtype!r}")
    # Copied: compiled loops reject read-only arrays.
    return np.frombuffer(bytearray(data), dtype).reshape(shape)

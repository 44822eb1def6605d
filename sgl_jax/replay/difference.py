"""The first place where two values differ, in words a person can use."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

_MAX_CHARS = 200  # of a value in the words


def first_difference(path: str, recorded: Any, got: Any) -> str | None:
    """Where and how `got` differs from `recorded`, values of one kind; None if they are equal.

    Goes into dataclasses, structs, named tuples, sequences, dictionaries and arrays.
    """
    if isinstance(recorded, np.ndarray) and isinstance(got, np.ndarray):
        return _array_difference(path, recorded, got)
    if type(recorded) is type(got):
        fields = _fields(recorded)
        if fields:
            values = ((f, getattr(recorded, f), getattr(got, f)) for f in fields)
            return _first(first_difference(_join(path, f), a, b) for f, a, b in values)
        if isinstance(recorded, dict) and recorded.keys() == got.keys():
            return _first(first_difference(f"{path}[{k!r}]", recorded[k], got[k]) for k in recorded)
        if isinstance(recorded, (list, tuple)):
            return _sequence_difference(path, recorded, got)
    is_same = recorded == got or (recorded != recorded and got != got)  # NaN is as recorded
    return None if is_same else f"{path}: recorded {_cut(recorded)}, got {_cut(got)}"


def _fields(value: Any) -> Sequence[str]:
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    named: Sequence[str] = getattr(value, "_fields", ())
    return named


def _sequence_difference(path: str, recorded: Sequence[Any], got: Sequence[Any]) -> str | None:
    found = _first(
        first_difference(f"{path}[{i}]", a, b)
        for i, (a, b) in enumerate(zip(recorded, got, strict=False))
    )
    if found is None and len(recorded) != len(got):
        return f"{path}: recorded {len(recorded)} of them, got {len(got)}"
    return found


def _array_difference(path: str, recorded: np.ndarray, got: np.ndarray) -> str | None:
    if recorded.shape != got.shape:
        return (
            f"{path}: recorded shape {recorded.shape} {_short(recorded)}, "
            f"got shape {got.shape} {_short(got)}"
        )
    is_nan = (recorded != recorded) & (got != got)
    different = np.argwhere((recorded != got) & ~is_nan)
    if len(different) == 0:
        return None
    index = tuple(different[0].tolist())
    place = "".join(f"[{i}]" for i in index)
    return f"{path}{place}: recorded {recorded[index].item()}, got {got[index].item()}"


def _short(array: np.ndarray) -> str:
    return np.array2string(array, threshold=20, separator=", ")


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "..."


def _first(found: Any) -> str | None:
    return next((words for words in found if words is not None), None)


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field

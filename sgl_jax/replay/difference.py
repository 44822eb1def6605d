"""Describe the first difference of two values in text for people."""

import dataclasses
from typing import Any

import numpy as np

_MAX_CHARS = 200  # of a value in the text


def first_difference(path: str, recorded: Any, got: Any) -> str | None:
    """Return the place and kind of the first difference of two values; None if they are equal.
    Compares dataclasses, structs, named tuples, sequences, dictionaries and arrays recursively."""
    if isinstance(recorded, np.ndarray) and isinstance(got, np.ndarray):
        return _array_difference(path, recorded, got)
    parts, others = _parts(recorded), _parts(got)
    if type(recorded) is type(got) and parts is not None and others is not None:
        common = [place for place in parts if place in others]
        for place in common:
            words = first_difference(path + place, parts[place], others[place])
            if words is not None:
                return words
        if len(parts) != len(others):
            return f"{path}: recorded {len(parts)} of them, got {len(others)}"
        if len(common) == len(parts):
            return None
    is_same = recorded == got or (recorded != recorded and got != got)  # NaN equals NaN
    return None if is_same else f"{path}: recorded {_cut(recorded)}, got {_cut(got)}"


def _parts(value: Any) -> dict[str, Any] | None:
    """Return the parts of a value, keyed by access suffix; None for a scalar."""
    if isinstance(value, dict):
        return {f"[{key!r}]": part for key, part in value.items()}
    names = getattr(value, "__struct_fields__", None) or getattr(value, "_fields", None)
    if names is None and dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    if names is not None:
        return {f".{name}": getattr(value, name) for name in names}
    if isinstance(value, list | tuple):
        return {f"[{index}]": part for index, part in enumerate(value)}
    return None


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

"""Readers of single config fields: each checks kind and range, and names the field it refuses."""

import math
from collections.abc import Mapping
from typing import Any

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
_MAX_INT = 2**31 - 1


class ModelConfigError(ValueError):
    """A config.json that is incomplete, inconsistent or unsupported.

    `file` is where the fault lies.
    """

    def __init__(self, message: str, file: str = CONFIG_FILE) -> None:
        super().__init__(message)
        self.file = file


def required(raw: Mapping[str, Any], name: str) -> Any:
    """The field's value. Like the functions below, raises ModelConfigError."""
    if raw.get(name) is None:
        raise ModelConfigError(f"config.json lacks {name!r}")
    return raw[name]


def positive_int(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The field's value, a whole number from 1 to 2**31 - 1."""
    value = default if default is not None and raw.get(name) is None else required(raw, name)
    if not is_int(value) or not 1 <= value <= _MAX_INT:
        raise ModelConfigError(f"{name} must be a positive integer below 2**31, got {value!r}")
    return int(value)


def positive_float(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """The field's value, a finite number above 0."""
    value = default if default is not None and raw.get(name) is None else required(raw, name)
    is_number = is_int(value) or isinstance(value, float)
    if not is_number or not 0 < value < math.inf:  # nor NaN
        raise ModelConfigError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def optional_float(raw: Mapping[str, Any], name: str) -> float | None:
    """A finite number above 0, or None if the field is absent."""
    return None if raw.get(name) is None else positive_float(raw, name)


def switch(raw: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """True or false; `default` if the field is absent."""
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelConfigError(f"{name} must be true or false, got {value!r}")
    return value


def object_field(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of the field's object; an empty one if the field is absent."""
    value = raw.get(name)
    if value is not None and not isinstance(value, dict):
        raise ModelConfigError(f"{name} must be an object, got {value!r}")
    return dict(value or {})


def is_int(value: Any) -> bool:
    """True for whole numbers, and not for true and false, which Python counts as such."""
    return isinstance(value, int) and not isinstance(value, bool)

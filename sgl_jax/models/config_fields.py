"""Readers of single config fields: each checks type and range, and names the field in its error."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
QUANTIZATION_FILE = "hf_quant_config.json"  # of Model Optimizer, if config.json has none
_MAX_INT = 2**31 - 1


class ModelConfigError(ValueError):
    """A config.json that is incomplete, inconsistent or unsupported; `file` is the faulty file."""

    def __init__(self, message: str, file: str = CONFIG_FILE) -> None:
        super().__init__(message)
        self.file = file


def required(raw: Mapping[str, Any], name: str) -> Any:
    """Return the field's value. Like the functions below, raise ModelConfigError."""
    if raw.get(name) is None:
        raise ModelConfigError(f"config.json lacks {name!r}")
    return raw[name]


def positive_int(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return the field's value, an integer from 1 to 2**31 - 1."""
    value = default if default is not None and raw.get(name) is None else required(raw, name)
    if not is_int(value) or not 1 <= value <= _MAX_INT:
        raise ModelConfigError(f"{name} must be a positive integer below 2**31, got {value!r}")
    return int(value)


def positive_float(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return the field's value, a finite number above 0."""
    value = default if default is not None and raw.get(name) is None else required(raw, name)
    is_number = is_int(value) or isinstance(value, float)
    if not is_number or not 0 < value < math.inf:  # NaN fails, too
        raise ModelConfigError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def optional_float(raw: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number above 0, or None if the field is absent."""
    return None if raw.get(name) is None else positive_float(raw, name)


def positive_floats(raw: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """Return the field's list of finite numbers above 0."""
    values = required(raw, name)
    if not isinstance(values, list):
        raise ModelConfigError(f"{name} must be a list of numbers, got {values!r}")
    return tuple(positive_float({name: value}, name) for value in values)


def switch(raw: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return true or false; `default` if the field is absent."""
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelConfigError(f"{name} must be true or false, got {value!r}")
    return value


def object_field(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of the field's object; an empty dict if the field is absent."""
    value = raw.get(name)
    if value is not None and not isinstance(value, dict):
        raise ModelConfigError(f"{name} must be an object, got {value!r}")
    return dict(value or {})


def is_int(value: Any) -> bool:
    """Return True for integers, except True and False, which Python counts as int."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise ModelConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelConfigError(f"{str(path)!r} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelConfigError(f"{str(path)!r} must hold a JSON object")
    return content

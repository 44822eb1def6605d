"""Files of API keys: a line for each key, with the name and the limits of its tenant."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sgl_jax.core.messages import Tenant

_FORMAT = "must be KEY, or NAME KEY [weight=W] [max_queued=N] [max_running=N]"
_MOST = {"weight": 1e6, "max_queued": 1e7, "max_running": 1e7}
_OPTION = re.compile(f"({'|'.join(_MOST)})=(.*)")


def read_key_file(path: str, prefix: str) -> Iterator[tuple[str, Tenant]]:
    """Each key in `path` and its tenant, called `prefix` and the line's number if it has no name.

    Lines that begin with # are comments. Raises `ValueError`, naming the line, for a bad file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the API keys in {path}: {error}") from error
    names = {prefix}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key, tenant = _read_line(words, f"{prefix}-{number}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if tenant.name in names:
            raise ValueError(f"{path}, line {number}: the name {tenant.name!r} is taken")
        names.add(tenant.name)
        yield key, tenant
    if len(names) == 1:
        raise ValueError(f"{path} holds no API key")


def _read_line(words: Sequence[str], default_name: str) -> tuple[str, Tenant]:
    if len(words) == 1:
        return words[0], Tenant(name=default_name)
    name, key, *options = words
    if _OPTION.fullmatch(key):  # else the first word, a key, would be shown as a name
        raise ValueError(f"a key with options needs a name: {_FORMAT}")
    limits: dict[str, Any] = {}
    for option in options:
        match = _OPTION.fullmatch(option)
        if match is None:
            raise ValueError(_FORMAT)
        field, text = match.groups()
        if field in limits:
            raise ValueError(f"{field} stands there twice")
        limits[field] = _number(field, text)
    return key, Tenant(name=name, **limits)


def _number(field: str, text: str) -> float:
    """The value of an option; an integer unless it is a weight."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST[field]:  # nor NaN
        raise ValueError(f"{field} must be a number from 0 to {_MOST[field]:g}, got {text!r}")
    if field == "weight":
        if value == 0:
            raise ValueError("weight must be above 0")
        return value
    if not value.is_integer():
        raise ValueError(f"{field} must be a whole number, got {text!r}")
    return int(value)

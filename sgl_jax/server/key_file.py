"""Reads a file of API keys: a key on each line, with the limits of the tenant that it names."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sgl_jax.core.messages import Tenant

_FORMAT = "must be KEY, or NAME KEY [weight=W] [max_queued=N] [max_running=N]"
_OPTIONS = ("weight", "max_queued", "max_running")
MAX_WEIGHT = 1e6
MAX_COUNT = 10_000_000


class FileKey(NamedTuple):
    """One line of the file."""

    key: str
    tenant: Tenant


def read_key_file(path: str, prefix: str) -> Iterator[FileKey]:
    """The keys in `path`; one without a name is called `prefix` and the number of its line.

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
            read = _read_line(words, f"{prefix}-{number}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if read.tenant.name in names:
            raise ValueError(f"{path}, line {number}: the name {read.tenant.name!r} is taken")
        names.add(read.tenant.name)
        yield read
    if len(names) == 1:
        raise ValueError(f"{path} holds no API key")


def _read_line(words: Sequence[str], default_name: str) -> FileKey:
    if len(words) == 1:
        return FileKey(words[0], Tenant(name=default_name))
    name, key, *options = words
    if _is_option(key):  # else the first word, a key, would be shown as a name
        raise ValueError(f"a key with options needs a name: {_FORMAT}")
    given: dict[str, str] = {}
    for option in options:
        if not _is_option(option):
            raise ValueError(_FORMAT)
        field, _, value = option.partition("=")
        if field in given:
            raise ValueError(f"{field} stands there twice")
        given[field] = value
    weight = _number("weight", given.get("weight", "1"), MAX_WEIGHT)
    if weight == 0:
        raise ValueError("weight must be above 0")
    counts = {name: _count(name, given[name]) for name in _OPTIONS[1:] if name in given}
    return FileKey(key, Tenant(name=name, weight=weight, **counts))


def _is_option(word: str) -> bool:
    return word.partition("=")[0] in _OPTIONS and "=" in word


def _count(name: str, text: str) -> int:
    value = _number(name, text, MAX_COUNT)
    if not value.is_integer():
        raise ValueError(f"{name} must be a whole number, got {text!r}")
    return int(value)


def _number(name: str, text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:  # nor NaN
        raise ValueError(f"{name} must be a number from 0 to {most:g}, got {text!r}")
    return value

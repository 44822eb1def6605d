"""Settings as dataclass fields with a default, a range and a help text.

`core/command_line.py` builds the flags from them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any


def setting(
    default: Any,
    help: str,
    choices: Sequence[str] | None = None,
    *,
    bounds: tuple[float, float] | None = None,
    env: str | None = None,
    secret: bool = False,
) -> Any:
    """Return the dataclass field of a setting.

    Args:
        help: meaning of the value, shown on the command line and in the docs.
        choices: allowed values of a string.
        bounds: allowed numbers, both ends included; upper bounds are far above useful values, to
            catch typing errors.
        env: environment variable that replaces the default on the command line.
        secret: never show the value.
    """
    metadata = {"help": help, "choices": choices, "bounds": bounds, "env": env, "secret": secret}
    return dataclasses.field(default=default, metadata=metadata)


def check_settings(settings: Any) -> None:
    """Raise ValueError with the flag's name if a value is outside its bounds or choices."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        bounds, choices = field.metadata["bounds"], field.metadata["choices"]
        if bounds and value is not None and not bounds[0] <= value <= bounds[1]:  # also rejects NaN
            raise ValueError(f"{flag(field.name)} must be in {list(bounds)}, got {value}")
        if choices and value not in choices:
            raise ValueError(
                f"{flag(field.name)} must be one of {', '.join(choices)}, got {value!r}"
            )


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")

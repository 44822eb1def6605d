"""Settings as fields of dataclasses, whose metadata makes the command line.

A field states once a setting's default, its range, and its purpose.
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
    """The field of a setting.

    `bounds` are inclusive; the upper ones are far beyond useful values, to catch slips of the
    keyboard. `env` names the environment variable that gives the flag's default, where there is
    one; a secret is never shown.
    """
    metadata = {"help": help, "choices": choices, "bounds": bounds, "env": env, "secret": secret}
    return dataclasses.field(default=default, metadata=metadata)


def check_settings(settings: Any) -> None:
    """Raise ValueError, naming the flag, for a value that is out of bounds or no choice."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        bounds, choices = field.metadata["bounds"], field.metadata["choices"]
        if bounds and value is not None and not bounds[0] <= value <= bounds[1]:  # nor NaN
            raise ValueError(f"{flag(field.name)} must be in {list(bounds)}, got {value}")
        if choices and value not in choices:
            raise ValueError(
                f"{flag(field.name)} must be one of {', '.join(choices)}, got {value!r}"
            )


def flag(name: str) -> str:
    """The command line's name of a setting."""
    return "--" + name.replace("_", "-")

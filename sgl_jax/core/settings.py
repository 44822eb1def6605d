"""Settings as fields of dataclasses, whose metadata makes the command line.

A field states once a setting's default, its range, and its purpose.
"""

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
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


def add_flags(
    parser: argparse.ArgumentParser,
    fields: "Iterable[dataclasses.Field[Any]]",
    environment: Mapping[str, str],
) -> None:
    """Add one flag for each field; booleans are switches.

    Raises ValueError if a variable of the environment cannot be read.
    """
    for field in fields:
        default = _default(field, environment)
        help_text, secret = field.metadata["help"], field.metadata["secret"]
        if field.metadata["env"]:
            help_text += f" [{field.metadata['env']}]"
        if field.type is bool:
            # A flag must be able to switch off a setting that the environment switches on.
            action = argparse.BooleanOptionalAction if field.metadata["env"] else "store_true"
            parser.add_argument(flag(field.name), action=action, default=default, help=help_text)
            continue
        parser.add_argument(
            flag(field.name),
            type=_scalar_type(str(field.type)),
            default=default,
            choices=field.metadata["choices"],
            required=field.name == "model_path",
            metavar=None if field.metadata["choices"] else "VALUE",
            help=help_text if default in (None, "") or secret else f"{help_text} (%(default)s)",
        )


def _default(field: "dataclasses.Field[Any]", environment: Mapping[str, str]) -> Any:
    name = field.metadata["env"]
    text = environment.get(name, "") if name else ""
    if not text:
        if field.metadata["secret"] and name in environment:
            raise ValueError(f"the environment's {name} is empty: set a key, or unset it")
        return field.default
    if field.type is bool:
        return _read_switch(name, text)
    kind = _scalar_type(str(field.type))
    try:
        return kind(text)
    except ValueError:
        raise ValueError(
            f"the environment's {name} must be {kind.__name__}, got {text!r}"
        ) from None


def _read_switch(name: str, text: str) -> bool:
    on, off = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
    if text.lower() not in on + off:
        raise ValueError(f"the environment's {name} must be 1 or 0, got {text!r}")
    return text.lower() in on


def _scalar_type(annotation: str) -> type:
    for name, kind in (("int", int), ("float", float)):
        if name in annotation:
            return kind
    return str

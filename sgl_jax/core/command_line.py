"""The command line of a server: one flag per field of `ServerArgs`, made from its metadata."""

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_jax.core.server_args import SchedulerArgs, ServerArgs
from sgl_jax.core.settings import flag


def parse_server_args(
    argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> ServerArgs:
    """Read settings from the command line; `environment` (default: this process's) has defaults.

    Prints the usage and exits if a value is invalid, as argparse does.
    """
    parser = argparse.ArgumentParser(
        prog="sgl-jax", description="Serve a language model over HTTP."
    )
    try:
        add_arguments(parser, os.environ if environment is None else environment)
        return ServerArgs(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))


def add_arguments(
    parser: argparse.ArgumentParser,
    environment: Mapping[str, str] | None = None,
    only: Sequence[str] | None = None,
) -> None:
    """Add one flag per field of `ServerArgs`, or for those in `only`; booleans are switches.

    Args:
        environment: has the variables that fields name (`env`). A variable replaces the default of
            its flag; a flag that is given overrides it. A `ServerArgs` made in Python ignores them.

    Raises:
        ValueError: a variable has no valid value.
    """
    shared = {field.name for field in dataclasses.fields(SchedulerArgs)}
    # The scheduler's flags come last, so that the help text begins with the model.
    for field in sorted(dataclasses.fields(ServerArgs), key=lambda field: field.name in shared):
        if only is None or field.name in only:
            _add_flag(parser, field, environment or {})


def _add_flag(
    parser: argparse.ArgumentParser,
    field: "dataclasses.Field[Any]",
    environment: Mapping[str, str],
) -> None:
    default = _default(field, environment)
    help_text, choices = field.metadata["help"], field.metadata["choices"]
    if field.metadata["env"]:
        help_text += f" [{field.metadata['env']}]"
    if field.type is bool:
        # A flag must be able to switch off a setting that the environment switches on.
        action = argparse.BooleanOptionalAction if field.metadata["env"] else "store_true"
        parser.add_argument(flag(field.name), action=action, default=default, help=help_text)
        return
    if default not in (None, "") and not field.metadata["secret"]:
        help_text += " (%(default)s)"
    parser.add_argument(
        flag(field.name),
        type=_scalar_type(str(field.type)),
        default=default,
        choices=choices,
        required=field.name == "model_path",
        metavar=None if choices else "VALUE",
        help=help_text,
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

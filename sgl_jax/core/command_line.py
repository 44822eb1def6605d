"""The command line of a server: one flag per field of `ServerArgs`, built from its metadata."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.settings import flag

_CONFIG_HELP = "YAML file with flags by name; a flag on the command line wins over it"


def parse_server_args(
    argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> ServerArgs:
    """Read settings from the command line, the file of `--config`, and the environment (default:
    `os.environ`); the first source with a value wins. An invalid value exits with the usage."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="sgl-jax", description="Serve a language model over HTTP."
    )
    config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for each in (parser, config):
        each.add_argument("--config", metavar="FILE", type=Path, help=_CONFIG_HELP)
    try:
        add_arguments(parser, os.environ if environment is None else environment)
        file = config.parse_known_args(argv)[0].config
        flags = [] if file is None else config_flags(file)
        words = vars(parser.parse_args([*flags, *argv]))
        del words["config"]
        return ServerArgs(**words)
    except ValueError as error:
        parser.error(str(error))


def config_flags(file: Path) -> list[str]:
    """Return the flags in a YAML file that maps flag names, with `-` or `_`, to values. Raises
    ValueError if the file cannot be read, a name is unknown, or a value has the wrong type."""
    try:
        values = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {file}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--config {file} must map the names of flags to values")
    fields = {field.name: field for field in dataclasses.fields(ServerArgs)}
    flags: list[str] = []
    for key, value in values.items():
        field = fields.get(str(key).replace("-", "_"))
        if field is None:
            close = get_close_matches(str(key).replace("-", "_"), fields, 1)
            hint = f": did you mean {flag(close[0])[2:]}?" if close else ""
            raise ValueError(f"--config {file}: {key!r} is the name of no flag{hint}")
        if isinstance(value, bool) != (field.type is bool) or isinstance(value, dict | list):
            wanted = "true or false" if field.type is bool else "one value"
            raise ValueError(f"--config {file}: {key} must be {wanted}, got {value!r}")
        if value is True:
            flags.append(flag(field.name))
        elif value is False and field.metadata["env"]:
            flags.append(f"--no-{flag(field.name)[2:]}")
        elif value is not False and value is not None:
            flags.append(f"{flag(field.name)}={value}")
    return flags


def add_arguments(
    parser: argparse.ArgumentParser,
    environment: Mapping[str, str] | None = None,
    only: Sequence[str] | None = None,
) -> None:
    """Add one flag per field of `ServerArgs`, or per field named in `only`; booleans are switches.

    Args:
        environment: values of variables that fields name (`env`). A variable replaces the default
            of its flag; a given flag overrides it. A `ServerArgs` made in Python ignores them.

    Raises:
        ValueError: a variable has an invalid value.
    """
    shared = {field.name for field in dataclasses.fields(SchedulerArgs)}
    # The scheduler's flags come last: the help text begins with the model.
    for field in sorted(dataclasses.fields(ServerArgs), key=lambda field: field.name in shared):
        if only is None or field.name in only:
            _add_flag(parser, field, environment or {})


def check_numbers(
    words: argparse.Namespace,
    *,
    counts: Sequence[str] = (),
    positive: Sequence[str] = (),
    finite: Sequence[str] = (),
) -> None:
    """Raise ValueError if a given number is out of range: `counts` begin at 1, `positive` above 0,
    and `finite` ones are above 0 and below infinity."""
    for name in (*counts, *positive, *finite):
        value = getattr(words, name)
        if value is None:
            continue
        if name in counts and value < 1:
            raise ValueError(f"{flag(name)} must be at least 1, got {value}")
        if not value > 0 or (name in finite and value == float("inf")):
            raise ValueError(f"{flag(name)} must be positive, got {value}")


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
        # `--no-...` turns off a setting that the environment turned on.
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

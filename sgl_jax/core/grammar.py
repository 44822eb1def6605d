"""Grammars that constrain an output, in the forms that clients send."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
MAX_GRAMMAR_CHARS = 1 << 16
# If a schema allowed free whitespace, an unsure model could write whitespace for ever.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPTIONS = "x-guidance"  # the key under which llguidance finds its options in a schema


def styled(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema`, for JSON with the spaces that Python writes, unless it sets its own style."""
    return _with_options(schema, _JSON_STYLE, {})


def lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema`, compiled without the keywords that a grammar cannot express, such as `not`."""
    return _with_options(schema, {}, {"lenient": True, "coerce_one_of": True})


def is_lenient(schema: Mapping[str, Any]) -> bool:
    """True if `lenient` made `schema`."""
    options = schema.get(_OPTIONS)
    return isinstance(options, Mapping) and options.get("lenient") is True


def _with_options(
    schema: Mapping[str, Any], defaults: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    own = schema.get(_OPTIONS, {})
    if not isinstance(own, Mapping):
        return dict(schema)  # llguidance reports the fault
    return {**schema, _OPTIONS: {**defaults, **own, **options}}


class Grammar(NamedTuple):
    """Text that describes the valid outputs.

    - json_schema: a JSON schema; the output is one JSON value that it allows.
    - regex: a regular expression in the syntax of Rust's `regex` crate; it matches all of the
      output.
    - ebnf: a grammar in GBNF (`root ::= ...`) or in Lark's form (`start: ...`).
    - structural_tag: JSON with `structures` (each has a `begin`, a `schema` and an `end`) and
      `triggers`. The output is free text until a trigger; then one of the structures follows.

    `reasoning` is a start mark and an end mark. The output may then begin with reasoning: the start
    mark, free text, the end mark, whitespace. If the start mark is "", the output must begin with
    free text up to the end mark.
    """

    kind: GrammarKind
    text: str
    reasoning: tuple[str, str] | None = None

"""A grammar that an output is held to, as clients name it."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
MAX_GRAMMAR_CHARS = 1 << 16
# Where spaces are free, a model that is not sure writes nothing else.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPTIONS = "x-guidance"  # the key under which a schema tells llguidance how to take it


def styled(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` of JSON as Python writes it, unless it says itself how."""
    return _with_options(schema, _JSON_STYLE, {})


def lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` of which what no grammar can hold, such as `not`, counts for nothing."""
    return _with_options(schema, {}, {"lenient": True, "coerce_one_of": True})


def is_lenient(schema: Mapping[str, Any]) -> bool:
    """Whether it was made by `lenient`."""
    options = schema.get(_OPTIONS)
    return isinstance(options, Mapping) and options.get("lenient") is True


def _with_options(
    schema: Mapping[str, Any], defaults: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    own = schema.get(_OPTIONS, {})
    if not isinstance(own, Mapping):
        return dict(schema)  # llguidance says what is wrong
    return {**schema, _OPTIONS: {**defaults, **own, **options}}


class Grammar(NamedTuple):
    """Text that says which outputs are valid.

    - json_schema: a JSON schema; the output is one JSON value that it allows.
    - regex: a regular expression of Rust's `regex` crate, of the whole output.
    - ebnf: a grammar in GBNF (`root ::= ...`) or in Lark's form (`start: ...`).
    - structural_tag: JSON with `structures`, each a `begin`, a `schema` and an `end`, and
      `triggers`: free text, in which what follows a trigger is such a structure.

    With `reasoning`, two marks, free text that ends with the second may come first, and spaces: if
    it begins with the first mark, and in any case if that is "".
    """

    kind: GrammarKind
    text: str
    reasoning: tuple[str, str] | None = None

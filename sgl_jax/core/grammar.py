"""A grammar that an output is held to, as clients name it."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
MAX_GRAMMAR_CHARS = 1 << 16
# With free spaces, a model that is not sure writes nothing else.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPTIONS = "x-guidance"  # the key under which llguidance finds its options in a schema


def styled(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` of JSON as Python writes it, unless it sets its own style."""
    return _with_options(schema, _JSON_STYLE, {})


def lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` without the keywords that no grammar can hold, such as `not`."""
    return _with_options(schema, {}, {"lenient": True, "coerce_one_of": True})


def is_lenient(schema: Mapping[str, Any]) -> bool:
    """True if `lenient` made it."""
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
    - regex: a regular expression of Rust's `regex` crate, of the whole output.
    - ebnf: a grammar in GBNF (`root ::= ...`) or in Lark's form (`start: ...`).
    - structural_tag: JSON with `structures`, each a `begin`, a `schema` and an `end`, and
      `triggers`: free text, in which such a structure follows a trigger.

    With `reasoning`, two marks, free text that ends with the second may come first, and spaces: if
    it begins with the first mark, and in any case if that is "".
    """

    kind: GrammarKind
    text: str
    reasoning: tuple[str, str] | None = None

"""A grammar that an output is held to, as clients name it."""

from typing import Literal, NamedTuple

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
MAX_GRAMMAR_CHARS = 1 << 16
# Under "x-guidance" of a schema: as Python writes JSON. Where spaces are free, a model that is not
# sure writes nothing else.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


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

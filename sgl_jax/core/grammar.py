"""Grammars that constrain an output, in the forms that clients send."""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from sgl_jax.core.closed_schema import closed

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
MAX_GRAMMAR_CHARS = 1 << 16
# An uncertain model may repeat free whitespace without end. By default only the spaces that Python
# writes are allowed, and at most one where the schema's options allow any number.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREE_STYLE = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]?"}
_OPTIONS = "x-guidance"  # key of llguidance's options in a schema
_OPEN = "open_objects"  # an option of this project, not of llguidance
# Rule of an `ebnf` with a JSON schema that the client sent in another field. The name is one that
# no client's grammar has.
JSON_RULE = "json_of_response_format"
# Text of a special token -> its id.
SpecialIds = Mapping[str, int]


def split_special(text: str, special: SpecialIds) -> list[str]:
    """Split `text` at special tokens: plain text (possibly ""), a special token, plain text, ..."""
    marks = sorted((mark for mark in special if mark in text), key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]


def lark_literal(text: str, special: SpecialIds) -> str:
    """Return `text` as a Lark literal, with special tokens by id, since a grammar cannot spell
    them."""
    pieces = [piece for piece in split_special(text, special) if piece]
    return (
        " ".join(
            f"<[{special[piece]}]>" if piece in special else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
        )
        or '""'
    )


def styled(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema` with llguidance options: by default, JSON with the spaces that Python writes
    and closed objects (`closed_schema.py`). Options in `schema` take precedence."""
    own = schema.get(_OPTIONS, {})
    if not isinstance(own, Mapping):
        return dict(schema)  # llguidance reports the fault
    style = _FREE_STYLE if own.get("whitespace_flexible") is True else _JSON_STYLE
    options = {**style, **own}
    is_open = options.pop(_OPEN, False)
    return {**closed(schema, is_open=is_open), _OPTIONS: options}


def opened(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema` with objects that may have properties that it does not name."""
    return _with_options(schema, {_OPEN: True})


def lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema` with keywords ignored that a grammar cannot express, such as `not`."""
    return _with_options(schema, {"lenient": True, "coerce_one_of": True})


def is_lenient(schema: Mapping[str, Any]) -> bool:
    options = schema.get(_OPTIONS)
    return isinstance(options, Mapping) and options.get("lenient") is True


def _with_options(schema: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    own = schema.get(_OPTIONS, {})
    if not isinstance(own, Mapping):
        return dict(schema)  # llguidance reports the fault
    return {**schema, _OPTIONS: {**own, **options}}


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

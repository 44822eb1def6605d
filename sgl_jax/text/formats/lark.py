"""Pieces of grammars in Lark's form, in llguidance's dialect.

Special tokens are written by their ids, because a grammar cannot spell them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from sgl_jax.core.grammar import SpecialIds, lark_literal, styled

NUMBER = "\0"  # placeholder for digits in a text


def literal(text: str, special: SpecialIds) -> str:
    """Return `text` as a literal, with special tokens by their ids."""
    pieces = [piece for piece in re.split(f"({NUMBER})", text) if piece]
    return (
        " ".join(
            "/[0-9]{1,3}/" if piece == NUMBER else lark_literal(piece, special) for piece in pieces
        )
        or '""'
    )


def free_text(rule: str, end: str, special: SpecialIds, text: str = "/(?s:.*)/") -> Iterator[str]:
    """Yield the lines of rule `rule`: any text, or text of a pattern, then `end`."""
    mark = next((mark for mark in special if end.startswith(mark)), None)
    if mark is not None:  # a token is not text
        yield f"{rule}: {text} {literal(end, special)}"
        return
    cut = min((end.find(mark) for mark in special if mark in end), default=len(end))
    yield f"{rule}: {rule}_text {literal(end[cut:], special)}"
    yield f"{rule}_text[suffix={quoted(end[:cut])}]: {text}"


def quoted(text: str) -> str:
    """Return a literal of a text without special tokens."""
    return json.dumps(text, ensure_ascii=False)


def of_json(schema: Mapping[str, Any]) -> str:
    """Return a rule body for JSON that `schema` allows. References start at `schema`."""
    return f"%json {json.dumps(styled(schema))}"

"""Converts structural tags, free text with tags around JSON by schemas, to Lark grammars.

A special token in a trigger, a beginning or an end is written by its id. Since it never occurs in
free text, it begins a tag; a trigger of plain text is searched for in the text.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from sgl_jax.core.grammar import SpecialIds, lark_literal, split_special

_FREE_TEXT = r"(.|\n)*"


def structural_tag(
    text: str, prepared: Callable[[Mapping[str, Any]], dict[str, Any]], special: SpecialIds
) -> str:
    """Return the grammar of a structural tag.

    Args:
        text: JSON with `structures` (`begin`, `schema`, `end`) and `triggers`.
        prepared: converts a schema to llguidance's form.
        special: text -> id of the special tokens.

    Raises:
        ValueError: `text` has another form.
    """
    value = json.loads(text)
    if not isinstance(value, dict) or not value.get("structures") or not value.get("triggers"):
        raise ValueError("must be an object with lists `structures` and `triggers`")
    lines = []
    for number, each in enumerate(value["structures"]):
        is_whole = isinstance(each, dict) and {"begin", "schema", "end"} <= each.keys()
        if not is_whole or not isinstance(each["schema"], dict):
            raise ValueError(f"structures[{number}]: must have begin, schema and end")
        begin, end = each["begin"], each["end"]
        trigger = next((one for one in value["triggers"] if one and begin.startswith(one)), None)
        if trigger is None:
            raise ValueError(f"structures[{number}]: {begin!r} begins with no trigger")
        body = f"%json {json.dumps(prepared(each['schema']))} {lark_literal(end, special)}"
        lines += _tag(f"tag_{number}", begin, len(trigger), body, special)
    tags = " | ".join(f"tag_{number}" for number in range(len(value["structures"])))
    head = ["%llguidance {}", f"start: ({tags})* TEXT", f"TEXT: /{_FREE_TEXT}/"]
    return "\n".join([*head, *lines])


def _tag(rule: str, begin: str, trigger_size: int, body: str, special: SpecialIds) -> list[str]:
    """Return the lines of a tag after free text. The trigger is cut before its first special token,
    which may extend beyond it."""
    plain, *rest = split_special(begin, special)
    if len(plain) >= trigger_size:
        trigger, rest = plain[:trigger_size], [plain[trigger_size:], *rest]
        return [
            f"{rule}_trigger[lazy]: TEXT {lark_literal(trigger, special)}",
            f"{rule}: {rule}_trigger {lark_literal(''.join(rest), special)} {body}",
        ]
    before = "TEXT"
    lines = []
    if plain:
        before = f"TEXT_{rule.upper()}"
        lines = [f"{before}: /{_FREE_TEXT}{_escaped(plain)}/"]
    return [*lines, f"{rule}: {before} {lark_literal(''.join(rest), special)} {body}"]


def _escaped(text: str) -> str:
    """Return a regular expression of `text`, between slashes."""
    return re.sub("[^A-Za-z0-9 ]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)

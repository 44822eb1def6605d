"""Close the objects of a JSON schema, so that they have only the named properties.

By the standard, an object without `additionalProperties` may have any further properties. This is
rarely intended, and a model that may invent keys can generate up to its token limit.

An object stays open if its schema

- has `additionalProperties` or `unevaluatedProperties`, or names no properties;
- is combined with another schema by `allOf`, `$ref` or alternatives in addition to its properties:
  each part describes some of the properties, and a closed part would forbid the rest.

A pattern that matches only named properties is merged into those properties. llguidance treats such
a pattern as a source of further properties, and after a comma no token could follow.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

_LISTS = ("allOf", "anyOf", "oneOf")  # lists of schemas for the same value
_OPENING = ("additionalProperties", "unevaluatedProperties")
# Keywords with schemas for different values: one schema, a list, or one per name.
_ONE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames")
_SEVERAL = ("prefixItems",)
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# A group of whole names as a pattern, and the text of one name in a pattern.
_GROUP = re.compile(r"\^\((?:\?:)?([^()]*)\)\$")
_NAME = re.compile(r"(?:[^\\.^$*+?{}\[\]|()]|\\[^A-Za-z0-9])*")

Schema = Mapping[str, Any]


def closed(schema: Schema, *, is_open: bool = False) -> dict[str, Any]:
    """Return `schema` with `"additionalProperties": false` in each object that should have it.
    Values that are not JSON schemas are copied unchanged. If `is_open`, no object is closed."""
    joined: set[str] = set()
    num_before = -1
    while len(joined) > num_before:  # a new reference may reveal more
        num_before = len(joined)
        result = _Closing(joined, is_open=is_open).schema(schema, is_whole="#" not in joined)
    return result


class _Closing:
    """One walk over a schema; adds references to parts of larger objects to `joined`."""

    def __init__(self, joined: set[str], *, is_open: bool) -> None:
        self._joined = joined
        self._is_open = is_open

    def schema(self, schema: Schema, *, is_whole: bool) -> dict[str, Any]:
        """Return the closed `schema`; `is_whole` if no other schema describes the same value."""
        schema = _without_patterns_of_names(schema)
        is_whole = is_whole and _num_parts(schema) <= 1
        reference = schema.get("$ref")
        if isinstance(reference, str) and not is_whole:
            self._joined.add(reference)
        result = {key: self._keyword(key, value, is_whole) for key, value in schema.items()}
        has_names = isinstance(schema.get("properties"), Mapping)
        is_closed = is_whole and not self._is_open
        if is_closed and has_names and not any(key in schema for key in _OPENING):
            # A required property without a schema may have any value.
            others = _named_without_schema(schema)
            result["properties"] = {**result["properties"], **{name: {} for name in others}}
            result["additionalProperties"] = False
        return result

    def _keyword(self, key: str, value: Any, is_whole: bool) -> Any:
        if key in _LISTS:
            return _of_list(value, lambda each: self.schema(each, is_whole=is_whole))
        if key in _ONE and isinstance(value, Mapping):
            return self.schema(value, is_whole=True)
        if key in _SEVERAL or key == "items":
            return _of_list(value, lambda each: self.schema(each, is_whole=True))
        if key in _NAMED and isinstance(value, Mapping):
            return {name: self._named(f"#/{key}/{name}", each) for name, each in value.items()}
        return value

    def _named(self, reference: str, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        return self.schema(schema, is_whole=reference not in self._joined)


def _without_patterns_of_names(schema: Schema) -> Schema:
    """Merge each pattern that matches only named properties into those properties."""
    names, patterns = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(names, Mapping) or not isinstance(patterns, Mapping):
        return schema
    named, kept = dict(names), dict(patterns)
    for pattern, value in patterns.items():
        matched = _names_of(pattern)
        if matched and matched <= named.keys():
            del kept[pattern]
            named |= {name: {"allOf": [named[name], value]} for name in matched}
    result = {**schema, "properties": named, "patternProperties": kept}
    return result if kept else {key: result[key] for key in result if key != "patternProperties"}


def _names_of(pattern: str) -> set[str]:
    """Return the names listed by a `pattern` such as `^(a|b)$`; none for other patterns."""
    group = _GROUP.fullmatch(pattern)
    parts = pattern.split("|") if group is None else [f"^{part}$" for part in group[1].split("|")]
    names = [part[1:-1] for part in parts if re.fullmatch(r"\^.*\$", part)]
    if len(names) < len(parts) or not all(map(_NAME.fullmatch, names)):
        return set()
    return {re.sub(r"\\(.)", r"\1", name) for name in names}


def _named_without_schema(schema: Schema) -> list[str]:
    required = schema.get("required")
    if not isinstance(required, list) or "patternProperties" in schema:
        return []
    return [name for name in required if name not in schema["properties"]]


def _of_list(value: Any, closing: Callable[[Schema], Any]) -> Any:
    if not isinstance(value, list):
        return value
    return [closing(each) if isinstance(each, Mapping) else each for each in value]


def _num_parts(schema: Schema) -> int:
    """Return the number of parts of `schema` that describe properties of the same value."""
    names_any = any(key in schema for key in ("properties", "patternProperties"))
    num_parts = names_any + ("$ref" in schema)
    num_parts += any(key in schema for key in ("if", "dependentSchemas"))
    if isinstance(schema.get("allOf"), list):
        num_parts += len(schema["allOf"])
    for key in ("anyOf", "oneOf"):
        parts = schema.get(key)
        if isinstance(parts, list):
            num_parts += any(isinstance(each, Mapping) and _num_parts(each) for each in parts)
    return num_parts

"""Closes the objects of a JSON schema: they have the named properties and no others.

By the standard, an object without `additionalProperties` may have any further properties. Few
schemas are written for that, and a model that may invent keys can go on up to its token limit.

An object stays open if its schema

- has `additionalProperties` or `unevaluatedProperties`, or names no properties at all;
- is joined with another by `allOf`, `$ref` or alternatives beside its own properties: each part
  describes some of the properties, and a closed part would forbid all others.
"""

from collections.abc import Callable, Mapping
from typing import Any

_LISTS = ("allOf", "anyOf", "oneOf")  # of schemas for the same value
_OPENING = ("additionalProperties", "unevaluatedProperties")
# Keywords with schemas for other values: one, a list, or one for each name.
_ONE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames")
_SEVERAL = ("prefixItems",)
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

Schema = Mapping[str, Any]


def closed(schema: Schema) -> dict[str, Any]:
    """`schema` with `"additionalProperties": false` in each object that should have it.

    Anything in it that is no JSON schema is left as it is.
    """
    joined: set[str] = set()
    num_before = -1
    while len(joined) > num_before:  # a reference found late may be to a part that has others
        num_before = len(joined)
        result = _Closing(joined).schema(schema, is_whole="#" not in joined)
    return result


class _Closing:
    """One walk over a schema; adds to `joined` the references to parts of larger objects."""

    def __init__(self, joined: set[str]) -> None:
        self._joined = joined

    def schema(self, schema: Schema, *, is_whole: bool) -> dict[str, Any]:
        """The closed form of `schema`, which alone describes a value if it `is_whole`."""
        is_whole = is_whole and _num_parts(schema) <= 1
        reference = schema.get("$ref")
        if isinstance(reference, str) and not is_whole:
            self._joined.add(reference)
        result = {key: self._keyword(key, value, is_whole) for key, value in schema.items()}
        has_names = isinstance(schema.get("properties"), Mapping)
        if is_whole and has_names and not any(key in schema for key in _OPENING):
            # A property that is required without a schema may have any value.
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
    """The number of parts of a schema that each describe properties of the same value."""
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

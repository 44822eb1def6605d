"""The parts of a tool's parameters that count if its arguments are not written as JSON."""

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from sgl_jax.core.grammar import is_lenient

# Keywords that constrain an object beyond its properties.
_BEYOND_PROPERTIES = ("$ref", "allOf", "anyOf", "oneOf", "not", "if")
_ROOT = ("$defs", "definitions", "x-guidance")


class ArgumentSchema(NamedTuple):
    """The arguments' schemas by name, the required names, and the keywords of the root.

    root: "$defs" and "definitions" if present, and the mark of a lenient schema.
    """

    properties: Mapping[str, Any]
    required: Set[str]
    root: Mapping[str, Any]

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> "ArgumentSchema":
        """Raises ValueError for anything but an object's properties, unless `schema` is lenient."""
        beyond = [name for name in _BEYOND_PROPERTIES if name in schema]
        properties, required = schema.get("properties", {}), schema.get("required", [])
        is_object = isinstance(properties, dict) and {*required} <= properties.keys()
        if (beyond or not is_object) and not is_lenient(schema):
            reason = (
                f"{beyond[0]} cannot be enforced" if beyond else "each that is required must be one"
            )
            raise ValueError(
                "parameters must be the properties of an object in calls of this model's format: "
                + reason
            )
        if not isinstance(properties, dict):
            properties = {}
        root = {name: schema[name] for name in _ROOT if name in schema}
        return cls(properties, properties.keys() & required, root)

"""What is read of a tool's parameters where its arguments are not written as JSON."""

from collections.abc import Mapping
from typing import Any, NamedTuple

# What says more of an object than its properties do.
_BEYOND_PROPERTIES = ("$ref", "allOf", "anyOf", "oneOf", "not", "if")
_DEFINITIONS = ("$defs", "definitions")


class ArgumentSchema(NamedTuple):
    """The arguments' schemas by their names, which of them there must be, and definitions.

    definitions: "$defs" and "definitions" of the schema, those that it has.
    """

    properties: Mapping[str, Any]
    required: frozenset[str]
    definitions: Mapping[str, Any]

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> "ArgumentSchema":
        """Raises ValueError for parameters of anything but an object's properties."""
        beyond = [name for name in _BEYOND_PROPERTIES if name in schema]
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if beyond or not isinstance(properties, dict) or not set(required) <= properties.keys():
            why = f"{beyond[0]} is not held" if beyond else "each that is required is a property"
            raise ValueError(
                f"parameters must be the properties of an object in calls of this model's format: "
                f"{why}"
            )
        definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        return cls(properties, frozenset(required), definitions)

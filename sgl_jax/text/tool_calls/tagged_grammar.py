"""Arguments between tags, as a grammar: what `tagged_values` reads."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from sgl_jax.text.tool_calls.call_grammar import (
    Schema,
    SpecialIds,
    free_text,
    literal,
    of_json,
)

# What says more of an object than its properties do.
_BEYOND_PROPERTIES = ("$ref", "allOf", "anyOf", "oneOf", "not", "if")
_DEFINITIONS = ("$defs", "definitions")


class Tags(NamedTuple):
    """What stands before an argument's name, before its value, and after that."""

    begin: str
    after_name: str
    end: str

    def arguments(self, rule: str, schema: Schema, special: SpecialIds) -> Iterator[str]:
        """The lines of rule `rule`: the properties in their order, without those not required.

        A string has no quotes: it is one of its `enum`, or any text; its pattern, format and
        length are not held. Raises ValueError for a schema of anything but an object's properties.
        """
        beyond = [name for name in _BEYOND_PROPERTIES if name in schema]
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if beyond or not isinstance(properties, dict) or not set(required) <= properties.keys():
            why = f"{beyond[0]} is not held" if beyond else "each that is required is a property"
            raise ValueError(
                f"parameters must be the properties of an object in calls of this model's format: "
                f"{why}"
            )
        definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        names = [f"{rule}_{number}" for number in range(len(properties))]
        each = (
            name if key in required else f"{name}?"
            for name, key in zip(names, properties, strict=True)
        )
        yield f"{rule}: {' '.join(each)}" if names else f'{rule}: ""'
        for name, (key, value) in zip(names, properties.items(), strict=True):
            yield f"{name}: {literal(self.begin + key + self.after_name, special)} {name}_value"
            yield from self._value(f"{name}_value", value, definitions, special)

    def _value(
        self, rule: str, schema: Any, definitions: Schema, special: SpecialIds
    ) -> Iterator[str]:
        """An argument's value and what ends it."""
        end = literal(self.end, special)
        if not isinstance(schema, dict):
            schema = {}
        if schema.get("type") != "string":
            yield f"{rule}: {rule}_json {end}"
            yield f"{rule}_json: {of_json({**definitions, **schema})}"
        elif "enum" in schema or "const" in schema:
            allowed = schema.get("enum", [schema.get("const")])
            texts = [literal(text, special) for text in allowed if isinstance(text, str)]
            yield f"{rule}: ({' | '.join(texts)}) {end}"
        else:
            yield from free_text(rule, self.end, special)

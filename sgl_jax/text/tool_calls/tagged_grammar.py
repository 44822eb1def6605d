"""Arguments between tags, as a grammar: what `tagged_values` reads."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sgl_jax.text.tool_calls.argument_schema import ArgumentSchema
from sgl_jax.text.tool_calls.lark import SpecialIds, free_text, literal, of_json


class Tags(NamedTuple):
    """What stands before an argument's name, before its value, and after that."""

    begin: str
    after_name: str
    end: str

    def arguments(self, rule: str, schema: Mapping[str, Any], special: SpecialIds) -> Iterator[str]:
        """The lines of rule `rule`: the properties in their order, without those not required.

        A string has no quotes: it is one of its `enum`, or any text; its pattern, format and
        length are not held. Raises ValueError for a schema of anything but an object's properties.
        """
        parts = ArgumentSchema.of(schema)
        names = [f"{rule}_{number}" for number in range(len(parts.properties))]
        each = (
            name if key in parts.required else f"{name}?"
            for name, key in zip(names, parts.properties, strict=True)
        )
        yield f"{rule}: {' '.join(each)}" if names else f'{rule}: ""'
        for name, (key, value) in zip(names, parts.properties.items(), strict=True):
            yield f"{name}: {literal(self.begin + key + self.after_name, special)} {name}_value"
            yield from self._value(f"{name}_value", value, parts.root, special)

    def _value(
        self, rule: str, schema: Any, root: Mapping[str, Any], special: SpecialIds
    ) -> Iterator[str]:
        """An argument's value and what ends it."""
        end = literal(self.end, special)
        if not isinstance(schema, dict):
            schema = {}
        if schema.get("type") != "string":
            yield f"{rule}: {rule}_json {end}"
            yield f"{rule}_json: {of_json({**root, **schema})}"
        elif "enum" in schema or "const" in schema:
            allowed = schema.get("enum", [schema.get("const")])
            texts = [literal(text, special) for text in allowed if isinstance(text, str)]
            yield f"{rule}: ({' | '.join(texts)}) {end}"
        else:
            yield from free_text(rule, self.end, special)

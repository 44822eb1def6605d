"""The parts of a tool's parameters that matter if its arguments are not written as JSON."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from sgl_jax.core.grammar import is_lenient

# Keywords that constrain an object beyond its properties.
_BEYOND_PROPERTIES = ("$ref", "allOf", "anyOf", "oneOf", "not", "if")
_OPTIONS = "x-guidance"
_ROOT = ("$defs", "definitions", _OPTIONS)


class ArgumentSchema(NamedTuple):
    """The arguments' schemas by name, the required names, and the keywords of the root.

    `root` has "$defs" and "definitions" if present, and the mark of a lenient schema.
    """

    properties: Mapping[str, Any]
    required: Set[str]
    root: Mapping[str, Any]

    def form_of(self, name: str) -> "ValueForm":
        """Return the form of argument `name`, which the schema need not declare."""
        scope = {**self.root, "properties": self.properties}
        return ValueForm.of(self.properties.get(name, {}), scope)

    @classmethod
    def read(cls, schema: Mapping[str, Any]) -> "ArgumentSchema":
        """Return the parts of `schema` needed by a reader; accepts any schema."""
        schema = next(_alternatives(schema, schema), {})
        return cls.of({**schema, _OPTIONS: {"lenient": True}, "required": []})

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> "ArgumentSchema":
        """Read an object's schema. Raises ValueError if it is another kind and not lenient."""
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


class ValueForm(NamedTuple):
    """The notation of a value if strings have no quotes. A text that may be a string is a string.

    Attributes:
        is_text: any text is a string.
        has_null: the word `null` is not a string, although other words are.
        texts: the only strings, from `enum` and `const`.
        others: schemas of values other than strings, which are written as JSON.
    """

    is_text: bool
    has_null: bool
    texts: Sequence[str]
    others: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, schema: Any, scope: Mapping[str, Any]) -> "ValueForm":
        """Resolve `schema`; references start at `scope`. A schema without a type is JSON."""
        texts, others = list[str](), list[Mapping[str, Any]]()
        is_text = has_null = False
        for each in _alternatives(schema, scope):
            types = each.get("type")
            types = types if isinstance(types, list) else [types]
            has_null |= "null" in types
            if "enum" in each or "const" in each:
                given = each.get("enum", [each.get("const")])
                values = given if isinstance(given, list) else []
                texts += [value for value in values if isinstance(value, str)]
                rest = [value for value in values if not isinstance(value, str)]
                if rest:
                    kept = {key: value for key, value in each.items() if key != "const"}
                    others.append({**kept, "enum": rest})
                continue
            is_text |= "string" in types
            if types != ["string"]:
                rest = [name for name in types if name != "string"]
                others.append({**each, "type": rest} if "string" in types else each)
        return cls(is_text, has_null, [*dict.fromkeys(texts)], others)

    def is_string(self, text: str) -> bool:
        """Return whether `text`, a whole value, is a string rather than JSON."""
        return self.is_text or text in self.texts or not self.others


def _alternatives(schema: Any, scope: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield schemas without alternatives and references at their top, of which a value of `schema`
    must follow one. Each reference is followed once."""
    left, seen = [schema], set[str]()
    while left:
        each = left.pop()
        if not isinstance(each, Mapping):
            each = {}
        key = next((key for key in _JOINING if _is_joined(each.get(key))), None)
        if key is None:
            yield each
            continue
        rest = {name: value for name, value in each.items() if name != key}
        value = each[key]
        if key == "$ref":
            if value not in seen:
                seen.add(value)
                target = referred(value, scope)
                left.append({**rest, **(target if isinstance(target, Mapping) else {})})
        elif key == "allOf":
            for part in value:
                rest |= part
            left.append(rest)
        else:
            left += [{**rest, **part} for part in reversed(value)]


_JOINING = ("$ref", "allOf", "anyOf", "oneOf")


def _is_joined(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(part, Mapping) for part in value)
    return isinstance(value, str)


def referred(reference: str, scope: Mapping[str, Any]) -> Any:
    """Return the part of `scope` that a reference such as `#/$defs/name` names, or None."""
    found: Any = scope
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found

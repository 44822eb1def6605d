"""Builds grammars of arguments in notations close to JSON, such as Python's.

The grammar enforces types, `enum`, `const`, `anyOf`, references, properties and which of them are
required, an array's items and their number, and a number's limits. It does not enforce a string's
pattern, format and length.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from sgl_jax.core.grammar import SpecialIds, is_lenient, lenient
from sgl_jax.text.formats.argument_schema import ArgumentSchema, referred
from sgl_jax.text.formats.lark import literal, of_json, quoted

_NOT_ENFORCED = ("allOf", "oneOf", "not", "if", "prefixItems", "patternProperties", "contains")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ANY = ["string", "number", "boolean", "null", "array", "object"]


class Notation(NamedTuple):
    """The way to write values.

    Attributes:
        string, strings: write a string; yield the lines of a rule for any string.
        true, false, null: the words for these values.
        separator: text between items.
        argument, key: write an argument's name, or a key within a value, with the text before its
            value. They raise ValueError for a name that cannot be written.
        keys: pattern of any such key, in Lark's form.
        begin, end: text around all arguments.
    """

    string: Callable[[str], str]
    strings: Callable[[str, SpecialIds], Iterator[str]]
    true: str
    false: str
    null: str
    separator: str
    argument: Callable[[str], str]
    key: Callable[[str], str]
    keys: str
    begin: str = ""
    end: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.string(""),)

    def rule(self, name: str, schema: Mapping[str, Any], special: SpecialIds) -> Iterator[str]:
        """Yield the lines of a rule: the properties in order; optional properties may be missing.

        Raises ValueError, with the reason, for a schema that cannot be enforced.
        """
        parts, rules = ArgumentSchema.of(schema), _Rules(self, name, special, schema)
        members = rules.members(parts.properties, parts.required, self.argument)
        yield f"{name}: {quoted(self.begin)} {members} {quoted(self.end)}"
        yield from rules.lines

    def written(self, value: Any) -> str:
        match value:
            case None:
                return self.null
            case bool():
                return self.true if value else self.false
            case str():
                return self.string(value)
            case list():
                return f"[{self.separator.join(map(self.written, value))}]"
            case dict():
                items = (self.key(key) + self.written(item) for key, item in value.items())
                return f"{{{self.separator.join(items)}}}"
        return json.dumps(value)


class _Rules:
    """Collects the rules of one tool's arguments."""

    def __init__(
        self, notation: Notation, prefix: str, special: SpecialIds, root: Mapping[str, Any]
    ) -> None:
        self._notation = notation
        self._prefix = prefix
        self._special = special
        self._root = root
        self._is_lenient = is_lenient(root)
        self._shared: dict[str, str] = {}  # part shared by several rules -> its rule
        self._count = 0
        self.lines: list[str] = []

    def members(
        self,
        properties: Mapping[str, Any],
        required: Collection[str],
        name: Callable[[str], str],
    ) -> str:
        """Return an object's members in order; `name` writes the text before a value."""
        members = [
            self._rule(f"{literal(name(key), self._special)} {self._value(schema)}")
            for key, schema in properties.items()
        ]
        after = [""]  # rules of the members after each member, backwards
        for key, member in reversed([*zip(properties, members, strict=True)]):
            mark = "" if key in required else "?"
            after.append(self._rule(f"({self._separator} {member}){mark} {after[-1]}"))
        begins = []
        for key, member, rest in zip(properties, members, after[-2::-1], strict=True):
            begins.append(f"{member} {rest}")
            if key in required:
                break
        else:
            begins.append('""')
        return f"({' | '.join(begins)})"

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}_{self._count}"
        self._count += 1
        self.lines.append(f"{name}: {body}")
        return name

    def _once(self, part: str, body: Callable[[], str]) -> str:
        """Return the rule of the shared part `part`; `body` may refer to it."""
        if part not in self._shared:
            name = self._shared[part] = f"{self._prefix}_shared_{len(self._shared)}"
            self.lines.append(f"{name}: {body()}")
        return self._shared[part]

    def _string(self) -> str:
        name = f"{self._prefix}_string"
        if "string" not in self._shared:
            self._shared["string"] = name
            self.lines += self._notation.strings(name, self._special)
        return name

    @property
    def _separator(self) -> str:
        return quoted(self._notation.separator)

    def _value(self, schema: Any) -> str:
        """Return the values that `schema` allows. Raises ValueError if it cannot be enforced."""
        if schema is True or schema == {}:
            return self._once("any", lambda: self._of_types(_ANY, {}))
        if not isinstance(schema, dict):
            raise ValueError(f"parameters: no value is of schema {schema!r}")
        beyond = [name for name in _NOT_ENFORCED if name in schema]
        if beyond and self._is_lenient:
            kept = {key: value for key, value in schema.items() if key not in _NOT_ENFORCED}
            either = {"anyOf": schema["oneOf"]} if "oneOf" in schema else {}
            return self._value(either | kept)
        if beyond:
            raise ValueError(f"{beyond[0]} cannot be enforced in calls of this model's format")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return f"({' | '.join(map(self._value, schema['anyOf']))})"
        if "enum" in schema or "const" in schema:
            values = map(self._notation.written, schema.get("enum", [schema.get("const")]))
            return f"({' | '.join(literal(value, self._special) for value in values)})"
        if "type" not in schema:
            return self._of_types(["object"], schema) if "properties" in schema else self._value({})
        types = schema["type"]
        return self._of_types([types] if isinstance(types, str) else types, schema)

    def _reference(self, reference: str) -> str:
        def target() -> str:
            found = referred(reference, self._root)
            if not reference.startswith("#/") or found is None:
                if self._is_lenient:
                    return self._value(True)
                raise ValueError(f"parameters: there is no {reference}")
            return self._value(found)

        return self._once(reference, target)

    def _of_types(self, types: list[str], schema: Mapping[str, Any]) -> str:
        return f"({' | '.join(self._of_type(name, schema) for name in types)})"

    def _of_type(self, name: str, schema: Mapping[str, Any]) -> str:
        notation = self._notation
        match name:
            case "string":
                return self._string()
            case "integer" | "number":
                limits = {key: schema[key] for key in _OF_NUMBERS if key in schema}
                return self._rule(of_json({"type": name, **limits}))
            case "boolean":
                return f"({quoted(notation.true)} | {quoted(notation.false)})"
            case "null":
                return quoted(notation.null)
            case "array":
                return self._array(schema)
            case "object" if "properties" in schema:
                parts = ArgumentSchema.of(lenient(schema) if self._is_lenient else schema)
                return f'"{{" {self.members(parts.properties, parts.required, notation.key)} "}}"'
            case "object" if schema.get("additionalProperties") is False:
                return '"{" "}"'
            case "object":
                of_item = self._value(schema.get("additionalProperties", True))
                item = self._rule(f"{notation.keys} {of_item}")
                return f'"{{" ({item} ({self._separator} {item})*)? "}}"'
        raise ValueError(f"parameters: {name!r} is no type")

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._rule(self._value(schema.get("items", True)))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"({self._separator} {item})"
        times = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        return f'"[" ({item} {more}{times}){"" if least else "?"} "]"'

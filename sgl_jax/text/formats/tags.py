"""Arguments written one by one between tags, with strings without quotes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic_core import from_json

from sgl_jax.core.grammar import SpecialIds
from sgl_jax.text.formats.argument_schema import ArgumentSchema
from sgl_jax.text.formats.lark import free_text, literal, of_json
from sgl_jax.text.reader import Arguments, CallEnded, Reading, Unread, as_json

_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


class Tags(NamedTuple):
    """The texts before an argument's name, between name and value, and after the value."""

    begin: str
    after_name: str
    end: str

    @property
    def texts(self) -> tuple[str, ...]:
        return self

    def rule(self, name: str, schema: Mapping[str, Any], special: SpecialIds) -> Iterator[str]:
        """Yield the lines of a rule: the properties in order; optional properties may be missing.

        A string is one of its `enum`, or any text; its pattern, format and length are not enforced.
        Raises ValueError for a schema of anything but an object's properties.
        """
        parts = ArgumentSchema.of(schema)
        names = [f"{name}_{number}" for number in range(len(parts.properties))]
        each = (
            rule if key in parts.required else f"{rule}?"
            for rule, key in zip(names, parts.properties, strict=True)
        )
        yield f"{name}: {' '.join(each)}" if names else f'{name}: ""'
        for rule, key in zip(names, parts.properties, strict=True):
            yield f"{rule}: {literal(self.begin + key + self.after_name, special)} {rule}_value"
            yield from self._value(f"{rule}_value", key, parts, special)

    def _value(
        self, rule: str, key: str, parts: ArgumentSchema, special: SpecialIds
    ) -> Iterator[str]:
        form, end = parts.form_of(key), literal(self.end, special)
        if form.is_text:
            yield from free_text(rule, self.end, special)
            return
        texts = [literal(text, special) for text in form.texts]
        if form.others:
            declared = parts.properties[key]
            schema = declared if isinstance(declared, dict) else {}
            if texts:
                schema = {"anyOf": [*form.others]}
            yield f"{rule}_json: {of_json({**parts.root, **schema})}"
            texts.append(f"{rule}_json")
        yield f"{rule}: ({' | '.join(texts)}) {end}"


class TaggedArguments:
    """The arguments of one call, yielded as a JSON object as they arrive.

    A value without its end mark ends at the next declared argument, or at the end of the call if
    nothing but another call follows.
    """

    def __init__(
        self, unread: Unread, schema: Mapping[str, Any], tags: Tags, ends: Mapping[str, list[str]]
    ) -> None:
        """Start reading. `ends` maps each mark that ends a call to the marks that may follow it."""
        self._unread = unread
        self._schema = ArgumentSchema.read(schema)
        self._tags = tags
        self._end = tags.end.strip()
        self._ends = ends
        self._marks = [self._end, tags.begin, *ends]  # that may end a value
        self._name_end, *self._before_value = tags.after_name.split()
        self._has_lines = tags.end.startswith("\n")  # a line end is before and after each value
        self._next = "{"
        self._names = set[str]()  # names of the arguments so far

    def read(self) -> Reading[bool]:
        """Yield all arguments. Return False if one is incomplete, after yielding its beginning."""
        unread = self._unread
        while (yield from unread.close(self._tags.begin)):
            size = yield from unread.find(self._name_end)
            if size < 0:
                yield Arguments(self._next + as_json(self._rest())[:-1])
                return False
            name = unread.take(size).strip()
            unread.take(len(self._name_end))
            for mark in self._before_value:
                if not (yield from unread.close(mark)):
                    yield Arguments(self._next + as_json(name))
                    return False
            self._names.add(name)
            if not (yield from self._read_value(name)):
                return False
        return True

    def close(self) -> Reading[None]:
        yield Arguments("{}" if self._next == "{" else "}")
        yield CallEnded()

    def _read_value(self, name: str) -> Reading[bool]:
        """Yield an argument, a string as it arrives. Return whether its end came."""
        key = f"{self._next}{as_json(name)}: "
        self._next = ", "
        form = self._schema.form_of(name)
        is_null = form.has_null and (yield from self._unread.comes("null"))
        if form.is_text and not is_null:
            yield Arguments(key + '"')
            return (yield from self._string())
        size = yield from self._find_end()
        if size < 0:
            rest = self._rest()
            is_json = rest and not form.is_string(rest) and _begins_json(rest)
            yield Arguments(key + (rest if is_json else as_json(rest)[:-1]))
            return False
        text = self._unread.take(size)
        yield from self._unread.skip(self._end)
        if form.is_string(text.strip()) and not (is_null and text.strip() == "null"):
            if self._has_lines:
                text = text.removeprefix("\n").removesuffix("\n")
            yield Arguments(key + as_json(text))
        else:
            yield Arguments(key + _as_value(text.strip()))
        return True

    def _rest(self) -> str:
        return self._unread.take(len(self._unread.held)).strip()

    def _string(self) -> Reading[bool]:
        unread = self._unread
        if self._has_lines and (yield from unread.begins_with("\n")):
            unread.take(1)
        while lead := (
            yield from unread.pass_on(lambda text: Arguments(as_json(text)[1:-1]), self._marks)
        ):
            mark = lead.lstrip()
            unread.held = mark + unread.held
            spaces, is_end = lead.removesuffix(mark), (yield from self._ends_value(mark))
            if is_end and self._has_lines:
                spaces = spaces.removesuffix("\n")
            yield Arguments(as_json(spaces)[1:-1])
            if is_end:
                yield Arguments('"')
                yield from unread.skip(self._end)
                return True
            yield Arguments(as_json(unread.take(len(mark)))[1:-1])
        return False

    def _find_end(self) -> Reading[int]:
        """Return the number of characters before the end of a value; -1 if none. Reads nothing."""
        unread, before = self._unread, ""
        while (size := (yield from unread.find(*self._marks))) >= 0:
            before += unread.take(size)
            mark = next(mark for mark in self._marks if unread.held.startswith(mark))
            if (yield from self._ends_value(mark)):
                break
            before += unread.take(len(mark))
        unread.held = before + unread.held
        return -1 if size < 0 else len(before)

    def _ends_value(self, mark: str) -> Reading[bool]:
        """Return whether the next mark, `mark`, ends the value before it. Reads nothing."""
        unread = self._unread
        if mark == self._end:
            return True
        if mark == self._tags.begin:
            size = yield from unread.find(self._name_end)
            name = unread.held[len(mark) : size].strip() if size >= 0 else ""
            return name in self._schema.properties and name not in self._names
        unread.take(len(mark))
        is_end = False
        for following in self._ends[mark]:
            is_end = is_end or (yield from unread.comes(following))
        rest = unread.held.strip()
        if unread.has_ended:
            is_end = is_end or not rest or any(each.startswith(rest) for each in self._ends[mark])
        unread.held = mark + unread.held
        return is_end


def _begins_json(text: str) -> bool:
    try:
        from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return False
    return True


def _as_value(text: str) -> str:
    """Return JSON unchanged, Python's constants as JSON's, anything else as a string."""
    try:
        return as_json(json.loads(_PYTHON_CONSTANTS.get(text, text)))
    except (ValueError, RecursionError):
        return as_json(text)

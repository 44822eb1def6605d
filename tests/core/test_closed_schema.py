"""Which objects of a schema are closed, and that closing forbids invented properties alone."""

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_jax.core.closed_schema import closed

INTEGER = {"type": "integer"}
A, B = ({"properties": {name: INTEGER}} for name in "ab")


def is_valid(schema: dict[str, Any], value: object) -> bool:
    return jsonschema_rs.validator_for(schema).is_valid(value)


@pytest.mark.parametrize(
    "schema",
    [
        A,
        {"type": "object", **A},
        {**A, "anyOf": [{"required": ["a"]}]},
        {"anyOf": [A, {"type": "null"}]},
        {"oneOf": [A, INTEGER]},
        {"allOf": [A]},
        {
            "allOf": [{"$ref": "#/$defs/A"}],
            "description": "as pydantic wrote it",
            "$defs": {"A": A},
        },
        {"$ref": "#/definitions/A", "definitions": {"A": A}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": A}},
        {**A, "x-guidance": {"whitespace_flexible": False}},
    ],
)
def test_no_property_can_be_invented(schema: dict[str, Any]) -> None:
    assert is_valid(schema, {"a": 1, "Madrid": 2})
    assert not is_valid(closed(schema), {"a": 1, "Madrid": 2})
    assert is_valid(closed(schema), {"a": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": INTEGER},
        {**A, "unevaluatedProperties": INTEGER},
        {"allOf": [A, B]},
        {**A, "allOf": [B]},
        {**A, "$ref": "#/$defs/B", "$defs": {"B": B}},
        {**A, "anyOf": [B, {"properties": {"c": INTEGER}}]},
        {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
        {
            "allOf": [{"$ref": "#/$defs/A"}, B],
            "$defs": {"A": {"$ref": "#/$defs/C"}, "C": {"properties": {"a": INTEGER}}},
        },
        {**A, "if": {"required": ["a"]}, "then": B},
    ],
)
def test_an_open_object_or_a_part_of_one_stays_open(schema: dict[str, Any]) -> None:
    assert is_valid(closed(schema), {"a": 1, "b": 2})


@pytest.mark.parametrize(
    "outer",
    [
        lambda inner: {"properties": {"x": inner}},
        lambda inner: {"properties": {}, "patternProperties": {"x": inner}},
        lambda inner: {"additionalProperties": inner},
        lambda inner: {"properties": {"x": inner}, "allOf": [{"required": ["x"]}, B]},
        lambda inner: {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": inner}},
    ],
)
def test_objects_within_objects_are_closed(outer: Any) -> None:
    schema = closed(outer(A))
    assert is_valid(schema, {"x": {"a": 1}})
    assert not is_valid(schema, {"x": {"a": 1, "Madrid": 2}})


@pytest.mark.parametrize("key", ["items", "prefixItems"])
def test_objects_within_arrays_are_closed(key: str) -> None:
    schema = closed({key: A if key == "items" else [A]})
    assert is_valid(schema, [{"a": 1}])
    assert not is_valid(schema, [{"a": 1, "Madrid": 2}])


def test_a_schema_that_refers_to_itself_is_closed() -> None:
    schema = closed({"properties": {"next": {"$ref": "#"}}})
    assert is_valid(schema, {"next": {"next": {}}})
    assert not is_valid(schema, {"next": {"other": 1}})


def test_a_required_property_without_a_schema_may_have_any_value() -> None:
    schema = closed({**A, "required": ["a", "b"]})
    assert is_valid(schema, {"a": 1, "b": "x"})
    assert not is_valid(schema, {"a": 1, "b": "x", "c": 2})


names = st.sampled_from(["a", "b", "c"])
values = st.recursive(
    st.integers(0, 3), lambda inner: st.lists(inner) | st.dictionaries(names, inner), max_leaves=8
)
leaves = st.sampled_from([{}, INTEGER, {"type": "object"}, {"$ref": "#/$defs/D"}])


def compound(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.fixed_dictionaries(
            {"properties": st.dictionaries(names, inner)},
            optional={
                "required": st.lists(names, unique=True),
                "allOf": several,
                "anyOf": several,
                "additionalProperties": inner | st.booleans(),
            },
        ),
        st.fixed_dictionaries({}, optional={"allOf": several, "oneOf": several, "items": inner}),
    )


schemas = st.recursive(leaves, compound, max_leaves=10)


@given(schemas, schemas, values)
def test_closing_only_forbids(part: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    whole = {**schema, "$defs": {"D": part | {"$defs": {}}}}
    if "oneOf" in str(whole):
        return  # a value that one alternative no longer allows may now be of exactly one
    try:
        before = is_valid(whole, value)
    except (jsonschema_rs.ValidationError, ValueError):
        return  # the definition refers to nothing but itself
    if is_valid(closed(whole), value):
        assert before


@given(schemas, values)
def test_closing_twice_is_closing_once(schema: dict[str, Any], value: Any) -> None:
    assert closed(closed(schema)) == closed(schema)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("pattern", "stays"),
    [
        ("^a$", False),
        ("^(a|x-y)$", False),
        ("^(?:a)$", False),
        ("^a$|^x-y$", False),
        (r"^x\-y$", False),
        ("^(a|b)$", True),
        ("^a", True),
        ("a$", True),
        ("^a|x-y$", True),
        ("^[a]$", True),
        ("^(a(b)?)$", True),
        (r"^\w$", True),
    ],
)
def test_patterns_of_named_properties_become_part_of_these(
    pattern: str, stays: bool, is_open: bool
) -> None:
    schema = {
        "properties": {"a": INTEGER, "x-y": {}},
        "patternProperties": {pattern: {"maximum": 5}},
    }
    result = closed({"items": schema}, is_open=is_open)["items"]
    assert ("patternProperties" in result) == stays
    for value in ({"a": 3}, {"a": 7}, {"x-y": 7}, {"a": "x"}):
        assert is_valid(result, value) == is_valid(schema, value), value

"""A closed schema accepts a part of what the schema does, and all that names known properties."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.gateway.closed_schema import closed

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
LEAVES = st.sampled_from(
    [({"type": "integer"}, 3), ({"enum": ["x", {"b": 1}]}, "x"), ({}, None), (True, [1])]
)
WORD = st.sampled_from("abcd")


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> tuple[Any, Any]:
    """A schema of an object, and a value of it with the properties that it names."""
    members = draw(st.dictionaries(WORD, inner, max_size=3))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: part for name, (part, _) in members.items()},
    }
    if members and draw(st.booleans()):
        schema["required"] = [draw(st.sampled_from(sorted(members)))]
    if draw(st.integers(0, 4)) == 0:
        schema["additionalProperties"] = draw(st.sampled_from([True, {"type": "string"}]))
    return schema, {name: value for name, (_, value) in members.items()}


def _lists(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return inner.map(lambda pair: ({"type": "array", "items": pair[0]}, [pair[1]] * 2))


def _either(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return inner.map(lambda pair: ({"anyOf": [{"type": "null"}, pair[0]]}, pair[1]))


CASES = st.recursive(LEAVES, lambda inner: objects(inner) | _lists(inner) | _either(inner))


@given(CASES)
def test_known_properties_are_all_that_a_closed_schema_accepts(case: tuple[Any, Any]) -> None:
    schema, value = case
    jsonschema.validate(value, schema)
    made = closed({"properties": {"it": schema}})
    jsonschema.validate({"it": value}, made)
    assert closed(made) == made
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"it": value, "other": 1}, made)


def test_each_object_that_names_properties_is_closed() -> None:
    nested = {"$defs": {"n": OBJECT}, "items": [OBJECT], "anyOf": [OBJECT, {"$ref": "#/$defs/n"}]}
    shut = OBJECT | {"additionalProperties": False}
    assert closed(nested) == {
        "$defs": {"n": shut}, "items": [shut], "anyOf": [shut, {"$ref": "#/$defs/n"}]
    }  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        OBJECT | {"additionalProperties": True},
        OBJECT | {"patternProperties": {"b": {}}},
        OBJECT | {"required": ["b"]},
        OBJECT | {"minProperties": 2},
        OBJECT | {"minProperties": "2"},
        OBJECT | {"required": 7},
        OBJECT | {"const": {"b": 1}},
        OBJECT | {"anyOf": [{"required": ["a"]}, OBJECT]},
        {"allOf": [OBJECT, {"properties": {"b": {}}}]},
        {"$defs": {"n": OBJECT}, "$ref": "#/$defs/n", "properties": {"b": {}}},
        {"properties": {"properties": {"allOf": [OBJECT, OBJECT]}}},
        {"oneOf": [OBJECT, {"properties": {"b": {}}}]},
        {"enum": [OBJECT]},
        {"default": OBJECT},
    ],
)
def test_a_schema_that_speaks_of_others_or_combines_parts_stays(schema: Any) -> None:
    assert closed(schema) == schema

"""What `response_format` may say, what a refusal names, and that no grammar stops the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from vlm_worker.annotations import MAX_GRAMMAR_BYTES
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import parse_chat
from vlm_worker.gateway.grammar import Grammar, of_response_format, validated
from vlm_worker.gateway.grammar_checks import MAX_VERDICTS, GrammarChecks
from vlm_worker.gateway.turns import at_once

SCHEMA = "response_format.json_schema.schema"


@pytest.fixture
def checks() -> Iterator[GrammarChecks]:
    made = GrammarChecks()
    yield made
    made.close()


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def of(schema: Any) -> Grammar:
    grammar = of_response_format(named(schema))
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_free_text_has_no_grammar(value: Any) -> None:
    assert of_response_format(value) is None


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("json_object", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, SCHEMA),
        (
            {"type": "json_schema", "json_schema": {"schema": {}}},
            "response_format.json_schema.name",
        ),
        (named({}, name="no spaces"), "response_format.json_schema.name"),
        (named({}, strict="yes"), "response_format.json_schema.strict"),
        (named({}, stric=True), "response_format.json_schema.stric"),
        (named(True), SCHEMA),
        (named([]), SCHEMA),
        (named({"x-guidance": {"lenient": True}}), f"{SCHEMA}.x-guidance"),
        (named({"description": "x" * MAX_GRAMMAR_BYTES}), SCHEMA),
    ],
)
def test_a_wrong_response_format_is_refused_by_name(value: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        of_response_format(value)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_the_end_of_answers_cannot_be_ignored_and_constrained() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    body |= {"response_format": {"type": "json_object"}, "ignore_eos": True}
    with pytest.raises(ApiError) as refused:
        at_once(parse_chat(body))
    assert refused.value.param == "ignore_eos"


@pytest.mark.parametrize("schema", [
    {}, {"type": "object"}, {"$schema": "http://json-schema.org/draft-07/schema#", "title": "x",
     "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}},
     "$ref": "#/$defs/n"},
    {"properties": {"not": {"type": "string"}, "x-guidance": {"type": "null"}}},
    {"anyOf": [{"type": "integer", "multipleOf": 3}, {"const": "ü"}, {"enum": [1, None, [2]]}]},
    {"type": "string", "pattern": "^[a-z]+$"}, {"type": "string", "format": "date-time"},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
])  # fmt: skip
async def test_what_can_be_enforced_is_accepted(checks: GrammarChecks, schema: Any) -> None:
    await checks.check(of(schema))


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"not": {}}, "not"),
        ({"properties": {"not": {"items": {"if": {}}}}}, "properties.not.items.if"),
        ({"anyOf": [{"type": "null"}, {"uniqueItems": True}]}, "anyOf.1.uniqueItems"),
        ({"$defs": {"a": {"contains": {}}}, "$ref": "#/$defs/a"}, "$defs.a.contains"),
        ({"properties": {"x": {"enum": [{"not": 1}]}, "y": {"not": {}}}}, "properties.y.not"),
        ({"propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"properties": {"a": {"format": "date"}, "b": {"format": "x"}}}, "properties.b.format"),
        ({"items": {"type": "strin"}}, "items.type"),
        ({"items": {"pattern": "(?=a)"}}, "items.pattern"),
        ({"$ref": "https://example.org/schema"}, "$ref"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "properties.a.$ref"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"enum": []}, "enum"),
        ({"properties": 3}, ""),
    ],
)  # fmt: skip
async def test_what_cannot_be_enforced_is_refused_by_keyword_and_path(
    checks: GrammarChecks, schema: Any, where: str
) -> None:
    with pytest.raises(ApiError) as refused:
        await checks.check(of(schema))
    error = refused.value
    assert (error.status, error.code) == (400, "invalid_json_schema")
    assert error.param == (f"{SCHEMA}.{where}" if where else SCHEMA)
    assert error.param in error.message


HOSTILE = {
    "an intersection of patterns": {
        "allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(30)]
    },
    "a product of alternatives": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(6)]}
            for i in range(9)
        ]
    },
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_schema_costs_the_child_alone(checks: GrammarChecks, name: str) -> None:
    grammar = of(HOSTILE[name])
    for _ in range(2):
        with pytest.raises(ApiError) as refused:
            await checks.check(grammar)
        assert refused.value.code == "invalid_json_schema"
    assert checks.num_checked == 1, "the verdict is kept"
    await checks.check(of({"type": "object"}))


async def test_the_event_loop_goes_on_while_the_child_works(checks: GrammarChecks) -> None:
    work = asyncio.create_task(checks.check(of(HOSTILE["an intersection of patterns"])))
    turns = 0
    while not work.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100
    with pytest.raises(ApiError):
        await work


async def test_a_child_that_was_killed_is_replaced(checks: GrammarChecks) -> None:
    await checks.check(of({"type": "object"}))
    assert checks._child is not None
    os.kill(checks._child.pid, signal.SIGKILL)
    checks._child.wait()
    await checks.check(of({"type": "array"}))
    assert (checks.num_checked, checks.num_refused) == (2, 0)


async def test_verdicts_are_bounded(checks: GrammarChecks) -> None:
    for number in range(MAX_VERDICTS + 9):
        checks._keep(str(number).encode(), "")
    assert len(checks._verdicts) == MAX_VERDICTS


UNSATISFIABLE: list[tuple[Any, str]] = [
    ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 5}, "exclusiveMinimum"),
    ({"anyOf": []}, "anyOf"),
    ({"type": "integer", "enum": ["a"]}, "enum"),
    ({"type": "object", "additionalProperties": False, "required": ["minimum ("]}, "required"),
    ({"properties": {"minimum (": {"not": {}}}, "minimum": 1}, "properties.minimum (.not"),
    ({"description": "multiple of", "type": "foo"}, "type"),
    ({"type": "string", "const": "multiple of", "enum": ["b"]}, ""),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, ""),
    ({"type": "string", "maxLength": -1}, "maxLength"),
    ({"minLength": 5, "maxLength": 3, "type": "string"}, "minLength"),
]


@pytest.mark.parametrize("index", range(len(UNSATISFIABLE)))
async def test_an_error_names_a_keyword_of_the_schema_or_none(
    checks: GrammarChecks, index: int
) -> None:
    schema, where = UNSATISFIABLE[index]
    with pytest.raises(ApiError) as refused:
        await checks.check(of(schema))
    assert refused.value.param == (f"{SCHEMA}.{where}" if where else SCHEMA)
    lark = f"start: call\ncall: %json {json.dumps(schema)}"
    with pytest.raises(ApiError) as refused:
        await checks.check(validated(lark, "tools", schema=schema))
    assert refused.value.param == (f"tools.{where}" if where else "tools")
    with pytest.raises(ApiError) as refused:
        await checks.check(validated(lark, "tool_choice"))
    assert refused.value.param == "tool_choice"


async def test_a_lark_text_is_checked_under_its_path(checks: GrammarChecks) -> None:
    arguments = json.dumps({"type": "object"})
    await checks.check(validated(f'start: "<call>" args\nargs: %json {arguments}', "tools"))
    with pytest.raises(ApiError) as refused:
        await checks.check(validated("start: nothing", "tools"))
    assert (refused.value.param, refused.value.code) == ("tools", "invalid_json_schema")
    with pytest.raises(ApiError):
        validated("x" * (MAX_GRAMMAR_BYTES + 1), "tools")

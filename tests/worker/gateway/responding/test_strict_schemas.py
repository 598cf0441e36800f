"""What the grammar of a strict tool accepts, the parser reads as arguments that keep the schema."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from worker.gateway.responding.test_tool_grammar import IDS, Bytes, Checked, ids_of, tokenizer
from worker.gateway.responding.written import WRITERS, parsed

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.tools import Tool, ToolUse
from vlm_worker.gateway.responding.builtin import builtin
from vlm_worker.gateway.responding.enforceable import GrammarError, Literals, read
from vlm_worker.gateway.responding.enforced import enforced
from vlm_worker.gateway.responding.message import AnswerForm
from vlm_worker.gateway.responding.tool_grammar import CallTool

OURS = ["qwen3_xml", "glm4", "gemma4"]
FORMS = pytest.mark.parametrize("form", OURS)
SNIPPETS = [
    "</parameter>", "\n</parameter>\n", "</function>\n</tool_call>", "</arg_value>", "</tool_call>",
    "<arg_key>", "<parameter=a>\n", "<parameter=b>", '<|"|>', '"', "\\", "{", "}", "[", "]", ",",
    ", ", ": ", ":", "a", "b", "c:", '"a": ', "\n", "\n\n", " ", "1", "0", "-", ".5", "12", "1e999",
    "true", "false", "null", "None", "x", "é", "\\u00e9", "</", "True", "<|tool_call>", "red",
    "<tool_call|>", "<a>",
]  # fmt: skip
CLOSERS = ['"', '<|"|>', "}", "]", "\n</parameter>\n", "</arg_value>", "</function>\n</tool_call>",
           "</tool_call>", "<tool_call|>", "1", "a", "x"]  # fmt: skip


def answer_of(text: str, all_control: Sequence[str], seed: int) -> str | None:
    """A random answer that the grammar accepts; None if the walk does not end."""
    draw = random.Random(seed)
    matcher = LLMatcher(tokenizer(), LLMatcher.grammar_from_lark(text))
    assert not matcher.is_error(), (matcher.get_error(), text)
    written: list[int] = []

    def write(ids: list[int]) -> bool:
        count = matcher.try_consume_tokens(ids)
        written.extend(ids[:count])
        return count > 0

    for turn in range(160):
        if matcher.is_accepting():
            return b"".join(Bytes.tokens[one] for one in written).decode(errors="replace")
        tried = CLOSERS if turn > 60 or draw.random() < 0.3 else SNIPPETS
        control = all_control if draw.random() < 0.8 else []
        if write(ids_of(draw.choice(tried), control)):
            continue
        allowed = [
            one for one, bias in enumerate(matcher.compute_logit_bias()) if bias and one != 256
        ]
        plain = [one for one in allowed if 32 <= one < 127 or one > 256] or allowed
        if not write([draw.choice(plain)]):
            return None
    return None


def check(form: str, schema: dict[str, Any], seed: int, *, with_control: bool = False) -> bool:
    """Whether the schema is enforced; if it is, an answer keeps it."""
    tool = CallTool("f", schema)
    try:
        checked = Checked(form, tools=[tool], parallel=False, with_control=with_control)
    except GrammarError:
        return False
    refused, messages = LLMatcher.validate_grammar_with_warnings(checked.text, tokenizer())
    if refused:  # bounds without a value
        assert "%json" in checked.text, messages
        return False
    text = answer_of(checked.text, checked.control, seed)
    if text is not None:
        content, _, calls = parsed(form, [text], tools={"f": schema})
        assert (content, [name for name, _ in calls]) == ("", ["f"]), (text, checked.text)
        given = json.loads(calls[0][1])
        try:
            jsonschema.validate(given, schema)
        except jsonschema.ValidationError as error:
            raise AssertionError((text, given, str(error)[:300])) from error
    return True


KINDS = ["string", "integer", "number", "boolean", "null", "array", "object"]
VALUES = st.sampled_from(
    ["red", "", "1", "null", "true", " x ", "</parameter>", '<|"|>', "\n", 1, 0, 2.5, 1.0, True,
     False, None, [1, "a"], {"a": 1}, '"red"', "</tool_call>"]
)  # fmt: skip
BOUNDS = st.fixed_dictionaries(
    {}, optional={
        "minimum": st.integers(-3, 3), "maximum": st.integers(4, 12),
        "exclusiveMinimum": st.integers(-3, 3), "multipleOf": st.sampled_from([2, 5]),
    },
)  # fmt: skip
NAMES = st.sampled_from(["a", "b", "long-name_2", "é", "<x>", "a b"])


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def built(properties: dict[str, Any], required: list[str], more: Any) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object", "properties": properties, **more}
        return schema | {"required": [name for name in required if name in properties]}

    more = st.fixed_dictionaries({}, optional={"additionalProperties": st.booleans() | inner})
    return st.builds(
        built,
        st.dictionaries(NAMES, inner, max_size=3),
        st.lists(NAMES, unique=True, max_size=3),
        more,
    )


BESIDE = [{}, {"type": "string"}, {"type": ["string", "integer"]}, {"minimum": 1}]
LIMITS = [{}, {"minItems": 1}, {"minItems": 2, "maxItems": 2}, {"maxItems": 0}]
LEAVES = (
    st.sampled_from([{}, {"description": "x"}, {"type": "string"}, {"$ref": "#/$defs/colour"},
                     {"$ref": "#/$defs/maybe"}, {"allOf": [{"$ref": "#/$defs/colour"}]},
                     {"type": "string", "maxLength": 2}, {"type": ["string", "null"]}])
    | st.builds(lambda kind, more: {"type": kind, **more}, st.sampled_from(KINDS[1:3]), BOUNDS)
    | st.builds(lambda kinds, more: {"type": kinds, **more},
                st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True), BOUNDS)
    | st.builds(lambda values, more: {"enum": values, **more},
                st.lists(VALUES, min_size=1, max_size=3), st.sampled_from(BESIDE))
    | st.builds(lambda value: {"const": value}, VALUES)
)  # fmt: skip
INNER = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(lambda choices, more: {"anyOf": choices, **more},
                  st.lists(inner, min_size=1, max_size=3),
                  st.sampled_from([{}, {}, {"maxLength": 1}]))
        | st.builds(lambda item, more: {"type": "array", "items": item, **more}, inner,
                    st.sampled_from(LIMITS))
        | objects(inner)
    ),
    max_leaves=4,
)  # fmt: skip
DEFS = {
    "colour": {"type": "string", "enum": ["red", "blue"]},
    "maybe": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}]},
}


@pytest.mark.parametrize("form", [*OURS, "hermes"])
@pytest.mark.parametrize("with_control", [False, True], ids=["text", "control tokens"])
@given(schema=objects(INNER), seed=st.integers(0, 2**32))
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
def test_an_accepted_answer_keeps_the_schema(
    form: str, with_control: bool, schema: dict[str, Any], seed: int
) -> None:
    check(form, {**schema, "$defs": DEFS}, seed, with_control=with_control)


ENFORCED: dict[str, Any] = {
    "enum behind a reference": {"$ref": "#/$defs/colour"},
    "enum behind allOf": {"allOf": [{"$ref": "#/$defs/colour"}], "description": "x"},
    "union of scalars": {"$ref": "#/$defs/maybe"},
    "string or null": {"type": ["string", "null"]},
    "string or number": {"anyOf": [{"type": "string"}, {"type": "number"}]},
    "enum or null": {"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}]},
    "bounds": {"type": "integer", "minimum": 2, "exclusiveMaximum": 5},
    "items": {"type": "array", "items": {"$ref": "#/$defs/colour"}, "minItems": 1, "maxItems": 2},
    "texts": {"type": "array", "items": {"type": "string"}},
    "members": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": [1]}},
                "required": ["b"]},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "any": {},
    "described": {"description": "any value"},
}  # fmt: skip
PROPERTY = "parameters.properties.a"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"type": "string", "maxLength": 2}, f"{PROPERTY}.maxLength"),
    "length behind a reference": ({"$ref": "#/$defs/short"}, "parameters.$defs.short.maxLength"),
    "pattern in items": ({"type": "array", "items": {"type": "string", "pattern": "a"}},
                         f"{PROPERTY}.items.pattern"),
    "beside a union": ({"anyOf": [{"type": "integer"}], "minimum": 3}, f"{PROPERTY}.minimum"),
    "beside a reference": ({"$ref": "#/$defs/maybe", "maximum": 3}, f"{PROPERTY}.maximum"),
    "several schemas": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, f"{PROPERTY}.allOf"),
    "one of": ({"oneOf": [{"type": "integer"}]}, f"{PROPERTY}.oneOf"),
    "nullable": ({"type": "string", "nullable": True}, f"{PROPERTY}.nullable"),
    "beside an enum": ({"enum": [1, 2], "minimum": 2}, f"{PROPERTY}.minimum"),
    "empty enum": ({"type": "string", "enum": [1]}, f"{PROPERTY}.enum"),
    "bounds without a type": ({"minimum": 3}, f"{PROPERTY}.minimum"),
    "itself": ({"$ref": "#/$defs/loop"}, "parameters.$defs.loop.items.$ref"),
    "missing part": ({"$ref": "#/$defs/none"}, f"{PROPERTY}.$ref"),
    "no value": (False, PROPERTY),  # type: ignore[dict-item]
    "keys": ({"type": "object", "patternProperties": {}}, f"{PROPERTY}.patternProperties"),
}  # fmt: skip


def tool_of(inner: Any) -> dict[str, Any]:
    defs = {**DEFS, "short": {"type": "string", "maxLength": 2},
            "loop": {"type": "array", "items": {"$ref": "#/$defs/loop"}}}  # fmt: skip
    return {"type": "object", "properties": {"a": inner}, "required": ["a"], "$defs": defs}


@FORMS
@pytest.mark.parametrize("name", ENFORCED)
def test_these_are_enforced(form: str, name: str) -> None:
    for seed in range(12):
        assert check(form, tool_of(ENFORCED[name]), seed)


@FORMS
@pytest.mark.parametrize("name", REFUSED)
def test_these_are_refused_at_their_place(form: str, name: str) -> None:
    inner, where = REFUSED[name]
    with pytest.raises(GrammarError) as refused:
        Checked(form, tools=[CallTool("f", tool_of(inner))])
    assert ".".join(refused.value.where) == where


@FORMS
def test_the_whole_schema_may_be_a_reference_and_names_only_properties(form: str) -> None:
    named = {"$ref": "#/$defs/args", "$defs": {"args": tool_of({"type": "integer"})}}
    assert check(form, named, 3)
    for schema in ({"required": ["b"], "properties": {"a": {}}}, {"required": ["b"]}):
        with pytest.raises(GrammarError, match="names a property") as refused:
            Checked(form, tools=[CallTool("f", schema)])
        assert refused.value.where == ("parameters", "required")


@FORMS
def test_what_other_values_break_is_not_accepted(form: str) -> None:
    schema = tool_of({"$ref": "#/$defs/colour"})
    checked = Checked(form, tools=[CallTool("f", schema)], parallel=False)
    assert checked.accepts(WRITERS[form]([("f", {"a": "red"})]))
    for value in ("green", " red", "red ", "\n\nred", 1, None):
        assert not checked.accepts(WRITERS[form]([("f", {"a": value})])), value


@FORMS
def test_the_error_names_the_tool_and_the_fix(form: str) -> None:
    bad = tool_of({"type": "array", "items": {"type": "string", "format": "date"}})
    tools = (Tool("f"), Tool("g", parameters=bad), Tool("h", parameters=bad, strict=True))
    answers = AnswerForm(builtin(form), {}, "", None, frozenset())
    for choice in ("auto", "required"):
        with pytest.raises(ApiError) as refused:
            enforced(ToolUse(tools, choice=choice), None, answers, {})
        error = refused.value
        assert error.param == "tools[2].function.parameters.properties.a.items.format"
        assert error.code == "invalid_json_schema"
        assert "leave it out, or send 'strict': false" in error.message
    assert enforced(ToolUse(tools[:2], choice="required"), None, answers, {}) is not None


@pytest.mark.parametrize("form", WRITERS)
def test_white_space_has_at_most_four_characters(form: str) -> None:
    """docs/openai.md says so."""
    number = {"type": "array", "items": {"type": "integer"}}
    checked = Checked(form, tools=[CallTool("f", tool_of(number))], parallel=False)
    text = WRITERS[form]([("f", {"a": [1, 2]})])
    assert checked.accepts(text)
    if form != "gemma4":  # it has none
        assert checked.accepts(text.replace(", 2", "," + " " * 4 + "2"))
    assert not checked.accepts(text.replace(", 2", "," + " " * 5 + "2").replace(",2", ",     2"))


def test_control_tokens_of_the_test_are_those_of_the_formats() -> None:
    texts = itertools.chain(*(region.texts for region in builtin("gemma4").regions))
    assert set(IDS) & set(texts)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/default"}}, "default": {"type": 5}},
        {"properties": {"a": {"$ref": "#/default"}}, "default": {"properties": [1]}},
        {"properties": {"a": {"$ref": "#/default"}}, "default": {"type": "object", "required": 5}},
        {"properties": {"a": {"$ref": "#/default"}}, "default": {"type": "string", "enum": 5}},
        {"properties": {"a": {"$ref": "#/default"}}, "default": {"type": [{}]}},
    ],
)
def test_a_reference_to_what_is_no_schema_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        read(schema)


def test_an_integer_beyond_every_float_is_an_integer() -> None:
    huge = 10**400
    node = read({"properties": {"a": {"type": "integer", "enum": [huge]}}})
    assert node.members[0].value == Literals((huge,))

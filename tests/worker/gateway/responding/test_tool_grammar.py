"""Grammars of calls accept what templates write and the parser reads, and nothing else."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from worker.gateway.responding.written import WRITERS, Call, parsed

from vlm_worker.gateway.api.tools import Tool, ToolUse
from vlm_worker.gateway.responding.builtin import builtin
from vlm_worker.gateway.responding.calls import types_of
from vlm_worker.gateway.responding.enforceable import GrammarError
from vlm_worker.gateway.responding.tool_grammar import (
    CallTool,
    content_grammar,
    grammar_of,
    tool_grammar,
)

CONTROL = ["<|tool_call>", "<tool_call|>", '<|"|>', "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
IDS = {token: 257 + number for number, token in enumerate(CONTROL)}
EOS = 256

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"type": "string", "enum": ["C", "°F"]},
        "places": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer"}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "no-arguments_2": NOTHING}
TOOLS = [CallTool(name, schema) for name, schema in SCHEMAS.items()]


class Bytes:
    """A tokenizer of bytes and control tokens."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>", *(t.encode() for t in CONTROL)]  # noqa: RUF012
    special_token_ids = [EOS, *IDS.values()]  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=len(Bytes.tokens))


def ids_of(text: str, control: Sequence[str]) -> list[int]:
    for token in control:
        before, found, after = text.partition(token)
        if found:
            return [*ids_of(before, control), IDS[token], *ids_of(after, control)]
    return list(text.encode())


class Checked:
    """A grammar, and whether it accepts texts."""

    def __init__(self, form: str, *, with_control: bool = False, **options: Any) -> None:
        self.control = CONTROL if with_control else []
        asked = {"mode": "required", "parallel": True, "tools": TOOLS, **options}
        self.text = tool_grammar(
            builtin(form), control_ids={token: IDS[token] for token in self.control}, **asked
        )
        LLMatcher.validate_grammar(self.text, tokenizer())

    def taken(self, text: str) -> tuple[int, bool]:
        """The bytes or tokens that may be written, and whether the answer may end there."""
        matcher = LLMatcher(tokenizer(), LLMatcher.grammar_from_lark(self.text))
        assert not matcher.is_error(), (matcher.get_error(), self.text)
        ids = ids_of(text, self.control)
        count = matcher.try_consume_tokens(ids)
        return count - len(ids), count == len(ids) and matcher.is_accepting()

    def accepts(self, text: str) -> bool:
        return self.taken(text) == (0, True)


CALLS: list[Call] = [
    ("get_weather", {"city": "Zürich", "days": 3, "unit": "°F", "places": ["a", "b"]}),
    ("no-arguments_2", {}),
    ("get_weather", {"city": "x y"}),
]
FORMS = pytest.mark.parametrize("form", WRITERS)


@FORMS
@pytest.mark.parametrize("with_control", [False, True], ids=["text", "control tokens"])
def test_what_a_template_writes_is_accepted(form: str, with_control: bool) -> None:
    grammar = Checked(form, with_control=with_control)
    for calls in (CALLS, CALLS[:1], CALLS[1:2], CALLS[2:]):
        text = WRITERS[form](calls)
        assert grammar.accepts(text), (text, grammar.taken(text), grammar.text)
        _, _, read = parsed(form, [text], tools=SCHEMAS)
        assert [(name, json.loads(arguments)) for name, arguments in read] == calls


@FORMS
@pytest.mark.parametrize(
    "call",
    [("other", {}), ("get_weather", {"days": 3}), ("get_weather", {"city": "x", "days": "soon"}),
     ("get_weather", {"city": "x", "unit": "K"}), ("get_weather", {"city": "x", "more": 1}),
     ("get_weather", {"city": "x", "places": [1]})],
    ids=["name", "required", "type", "enum", "more", "items"],
)  # fmt: skip
def test_what_a_schema_forbids_is_not_accepted(form: str, call: Call) -> None:
    assert not Checked(form).accepts(WRITERS[form]([call]))


@FORMS
def test_text_is_not_accepted_where_a_call_is_required(form: str) -> None:
    grammar = Checked(form)
    assert not grammar.accepts("I cannot do that.")
    assert not grammar.accepts("")
    text = WRITERS[form](CALLS[:1])
    for cut in range(len(text)):
        assert not grammar.taken(text[:cut])[1] or cut == 0


@FORMS
def test_one_call_is_accepted_if_they_are_not_parallel(form: str) -> None:
    grammar = Checked(form, parallel=False)
    assert grammar.accepts(WRITERS[form](CALLS[:1]))
    assert not grammar.accepts(WRITERS[form](CALLS[:2]))


@FORMS
def test_only_the_named_tool_is_accepted(form: str) -> None:
    grammar = Checked(form, tools=TOOLS[:1])
    assert grammar.accepts(WRITERS[form](CALLS[:1]))
    assert not grammar.accepts(WRITERS[form](CALLS[1:2]))


@pytest.mark.parametrize("form", [form for form in WRITERS if form != "llama3_json"])
@pytest.mark.parametrize("with_control", [False, True], ids=["text", "control tokens"])
def test_text_and_valid_calls_are_accepted_if_they_are_not_required(
    form: str, with_control: bool
) -> None:
    grammar = Checked(form, mode="auto", with_control=with_control)
    assert grammar.accepts("No call <b>.")
    assert grammar.accepts(f"I'll look.{WRITERS[form](CALLS[:1])}")
    assert grammar.accepts(WRITERS[form](CALLS[:1]))
    assert not grammar.accepts(f"I'll look.{WRITERS[form]([('other', {})])}")


def test_calls_that_begin_as_text_does_must_be_required() -> None:
    with pytest.raises(GrammarError, match="send 'required'"):
        Checked("llama3_json", mode="auto")


@FORMS
def test_reasoning_may_precede_calls(form: str) -> None:
    text = WRITERS[form](CALLS[:1])
    grammar = Checked(form)
    assert grammar.accepts(f"<think>\nHm <b>.\n</think>\n\n{text}")
    begun = Checked(form, in_reasoning=True)
    assert begun.accepts(f"Hm <b>.\n</think>\n\n{text}")
    assert not begun.accepts(text)


@pytest.mark.parametrize("form", ["qwen3_xml", "glm4"])
def test_no_text_of_a_tool_without_a_schema_ends_its_call(form: str) -> None:
    grammar = Checked(form, tools=[CallTool("f", None)])
    for text in ("</tool_call>", "</function>\n</tool_call>", "</parameter>", "</arg_value>"):
        answer = WRITERS[form]([("f", {"x": f"a{text}b"})])
        content, _, calls = parsed(form, [answer], tools={"f": None})
        if content or len(calls) != 1 or json.loads(calls[0][1]) != {"x": f"a{text}b"}:
            assert not grammar.accepts(answer), text


@FORMS
@pytest.mark.parametrize("with_control", [False, True], ids=["text", "control tokens"])
def test_a_tool_without_a_schema_takes_any_object(form: str, with_control: bool) -> None:
    grammar = Checked(form, tools=[CallTool("f", None)], with_control=with_control)
    for given in ({}, {"x": [1, "a"], "y": {"z": True, "s": ""}, "t": "a b"}):
        assert grammar.accepts(WRITERS[form]([("f", given)]))
    assert not grammar.accepts(WRITERS[form]([("g", {})]))


F, G = Tool("f", parameters=WEATHER, strict=True), Tool("g", parameters=WEATHER)


@pytest.mark.parametrize(
    ("use", "kept", "calls"),
    [
        (ToolUse((G,)), "", None),
        (ToolUse((F,), choice="none"), "", None),
        (ToolUse((G, F), choice="required"), "", ["f", "g", "gg", "g!"]),
        (ToolUse((G, F), choice="required"), "g", ["f", "g", "gg"]),
        (ToolUse((G, F), choice="required", parallel=False), "", ["f", "g", "g!"]),
        (ToolUse((G, F), choice="required", named="g"), "", ["g", "g!"]),
        (ToolUse((G, F), choice="required", named="g"), "g", ["g"]),
        (ToolUse((G, F)), "", ["", "f", "g", "gg", "g!"]),
    ],
)
def test_what_a_request_asks_for_is_enforced(
    use: ToolUse, kept: str, calls: list[str] | None
) -> None:
    """`kept` names tools that are not strict. `!` is a call that its schema forbids."""
    text = grammar_of(
        use, builtin("hermes"), control_ids={}, in_reasoning=False, kept=frozenset(kept)
    )
    assert (text is None) == (calls is None)
    if text is None or calls is None:
        return
    grammar = Checked("hermes")
    grammar.text = text
    for asked in ("", "f", "g", "gg", "f!", "g!"):
        given = {"days": "x"} if "!" in asked else {"city": "x"}
        listed = [(name, given) for name in asked.strip("!")]
        assert grammar.accepts(WRITERS["hermes"](listed)) == (asked in calls), asked


@pytest.mark.parametrize("form", ["qwen3_xml", "glm4", "gemma4"])
@pytest.mark.parametrize(
    "inner", [{"type": "string", "pattern": "a+"}, {"type": "string", "maxLength": 3}]
)
def test_what_a_format_cannot_enforce_is_refused(form: str, inner: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": inner}}
    with pytest.raises(GrammarError, match="leave it out") as refused:
        Checked(form, tools=[CallTool("f", schema)])
    assert refused.value.where == ("parameters", "properties", "a", list(inner)[-1])


def test_twenty_tools_are_a_small_grammar() -> None:
    many = [CallTool(f"f{number}", WEATHER) for number in range(20)]
    for form in WRITERS:
        assert len(Checked(form, tools=many).text) < 64 * 1024


COLOUR = {"type": "object", "properties": {"c": {"enum": ["red"]}}, "required": ["c"],
          "additionalProperties": False}  # fmt: skip


@FORMS
def test_beside_a_format_an_answer_is_calls_or_a_text_of_it(form: str) -> None:
    if form == "llama3_json":
        with pytest.raises(GrammarError, match="begin as text does"):
            Checked(form, content=COLOUR)
        return
    grammar = Checked(form, content=COLOUR)
    assert grammar.accepts('{"c": "red"}')
    assert grammar.accepts('<think>\nHm.\n</think>\n\n{"c": "red"}')
    assert grammar.accepts(WRITERS[form](CALLS[:1]))
    assert not grammar.accepts('{"c": "blue"}')
    assert not grammar.accepts("red")


@pytest.mark.parametrize("in_reasoning", [False, True])
def test_a_format_begins_behind_the_reasoning(in_reasoning: bool) -> None:
    text = content_grammar(builtin(None), COLOUR, control_ids={}, in_reasoning=in_reasoning)

    def accepts(answer: str) -> bool:
        matcher = LLMatcher(tokenizer(), LLMatcher.grammar_from_lark(text))
        ids = list(answer.encode())
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert accepts('{"c": "red"}') is not in_reasoning
    begun = "" if in_reasoning else "<think>"
    assert accepts(begun + 'It is {"c": 1}.\n</think>\n\n{"c": "red"}')
    assert not accepts(begun + "It is red.</think>red")


@FORMS
def test_rules_that_are_too_large_are_refused_while_they_are_written(form: str) -> None:
    schema = {"properties": {f"property_{n}": {"type": "integer"} for n in range(3_500)}}
    tools = [CallTool(f"f{number}", schema, f"tools[{number}]") for number in range(9)]
    with pytest.raises(GrammarError, match="its rules have more than") as refused:
        tool_grammar(builtin(form), tools, mode="required", parallel=True, control_ids={})
    assert refused.value.where[0] != "tools[8]", "others were not written"


@pytest.mark.parametrize("form", ["qwen3_xml", "glm4", "gemma4"])
def test_values_of_an_enum_count_by_characters(form: str) -> None:
    """Escapes would make six of each."""
    schema = {"properties": {"a": {"enum": ["日" * 50_000]}}, "additionalProperties": False}
    tools = [CallTool("f", schema)]
    text = tool_grammar(builtin(form), tools, mode="required", parallel=True, control_ids={})
    assert "日" * 50_000 in text


@pytest.mark.parametrize("form", ["qwen3_xml", "glm4", "gemma4"])
def test_references_cost_no_more_than_the_schema(form: str) -> None:
    """Each of ten definitions names the next one often: written out, they are 10^10."""
    names = [f"n{number}" for number in range(10)]
    links = {name: [{"$ref": f"#/$defs/{after}"}] * 10
             for name, after in zip(names, [*names[1:], "n0"], strict=True)}  # fmt: skip
    start = {"properties": {"a": {"$ref": "#/$defs/n0"}}}
    unions = {**start, "$defs": {name: {"anyOf": refs} for name, refs in links.items()}}
    assert types_of(unions["properties"]["a"], unions) == ()
    trees = {
        name: {"type": "object", "properties": {str(i): ref for i, ref in enumerate(refs)}}
        for name, refs in links.items()
    }
    trees["n9"] = {"type": "integer"}
    choices = {**unions["$defs"], "n9": {"enum": ["x" * 64]}}
    enums = {"n0": {"anyOf": [{"$ref": "#/$defs/n9"}] * 999}, "n9": {"enum": ["x" * 9999]}}
    for defs in (trees, choices, enums):
        with pytest.raises(GrammarError, match="references written out"):
            Checked(form, tools=[CallTool("f", {**start, "$defs": defs})])

"""Every way to cut an answer gives the same content, reasoning and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.responding.written import CALLS, TOOLS, WRITERS, Call, parsed

from vlm_worker.gateway.responding import builtin as builtins
from vlm_worker.gateway.responding.builtin import builtin
from vlm_worker.gateway.responding.template import load_template

FORMATS = pytest.mark.parametrize("form", WRITERS)
FORMS = pytest.mark.parametrize("form", WRITERS)
REASONING = "First </th then <tool_call>."
BEFORE, AFTER = "I'll look: 日本 <b>.", "Then <tool_cal"


@FORMS
@pytest.mark.parametrize("around", [False, True], ids=["alone", "with text and reasoning"])
@pytest.mark.parametrize("calls", [CALLS, CALLS[1:2], []], ids=["several", "no arguments", "none"])
def test_an_answer_is_the_same_at_every_cut(form: str, around: bool, calls: list[Call]) -> None:
    text = WRITERS[form](calls)
    if around:
        text = f"<think>\n{REASONING}\n</think>\n\n{BEFORE}{text}\n{AFTER}"
    content, reasoning, read = whole = parsed(form, [text])
    assert [(name, json.loads(arguments)) for name, arguments in read] == calls
    assert reasoning == (REASONING if around else "")
    assert content == (f"{BEFORE}\n{AFTER}" if around else "")
    assert parsed(form, list(text)) == whole
    for cut in range(len(text)):
        assert parsed(form, [text[:cut], text[cut:]]) == whole


NAME = st.from_regex("[a-z_]{1,6}", fullmatch=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[\x00"), max_size=10)
ARGUMENTS = st.fixed_dictionaries(
    {}, optional={
        "city": TEXT, "days": st.integers(-9, 9), "exact": st.booleans(),
        "places": st.lists(TEXT, max_size=3),
        "options": st.dictionaries(NAME, JSON, max_size=3),
    },
)  # fmt: skip


@FORMATS
@given(
    st.lists(st.tuples(st.just("get_weather"), ARGUMENTS), min_size=1, max_size=3),
    st.lists(st.integers(0, 10_000), max_size=6),
)
def test_any_calls_are_read_as_they_are_written(
    form: str, calls: list[Call], cuts: list[int]
) -> None:
    text = WRITERS[form](calls)
    places = sorted({cut % (len(text) + 1) for cut in cuts})
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, None], strict=True)]
    content, _, read = parsed(form, pieces)
    if "tag_pattern" not in str(builtins.CALLS[form]):
        assert [(name, json.loads(arguments)) for name, arguments in read] == calls
        assert content == ""
    assert parsed(form, [text]) == (content, "", read)


PIECES = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=get_weather>", "<", "1",
         "</function>", "<parameter=city>", "</parameter>", "<arg_key>", "</arg_key>", "null",
         "<arg_value>", "</arg_value>", "get_weather", "\n", " ", "x", '{"name": "get_weather", ',
         '"arguments": {', '"parameters": {', '"city": "', '"', "}", "]", "[", "{", ",", ":", "é",
         "[TOOL_CALLS]", "[ARGS]", '<|"|>', "city", "<|tool_call>", "call:", "<tool_call|>", "\\",
         "<|python_tag|>", ";"]
    ),
    max_size=14,
)  # fmt: skip


@FORMATS
@given(PIECES)
def test_any_text_is_the_same_at_every_cut(form: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = parsed(form, [text])
    assert parsed(form, pieces) == whole
    assert parsed(form, list(text)) == whole


@FORMATS
@given(PIECES)
def test_without_calls_every_character_is_kept(form: str, pieces: list[str]) -> None:
    """No text is lost: what is no call is content."""
    text = "".join(pieces)
    content, _, calls = parsed(builtin(form, reasoning=None), [text])
    if not calls:
        assert content == text.strip()


@FORMATS
def test_without_tools_calls_are_content(form: str) -> None:
    text = WRITERS[form](CALLS)
    assert parsed(form, list(text), tools={}) == (text.strip(), "", [])


@FORMATS
def test_a_call_of_an_unknown_tool_is_content(form: str) -> None:
    text = WRITERS[form]([("other", {"city": "x"})])
    assert parsed(form, list(text)) == (text.strip(), "", [])


@FORMATS
def test_only_the_first_call_is_taken_if_they_may_not_be_parallel(form: str) -> None:
    text = "Text." + WRITERS[form](CALLS)
    content, _, calls = parsed(form, list(text), max_calls=1)
    assert (content, [name for name, _ in calls]) == ("Text.", ["get_weather"])
    assert json.loads(calls[0][1]) == CALLS[0][1]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"name": "get_weather"</tool_call>', "all", []),
        ('<tool_call>{"name": "get_weather", "arguments": 5}</tool_call>', "all", []),
        ('<tool_call>{"arguments": {"days": 1}, "name": "get_weather"}</tool_call>', "",
         [("get_weather", '{"days": 1}')]),
        ('<tool_call>{"name": "get_weather"}</tool_call>', "", [("get_weather", "{}")]),
        ('<tool_call>{"name": "get_weather", "arguments": null}', "", [("get_weather", "{}")]),
        ('<tool_call>{"name": "get_weather", "arguments": "{\\"days\\": 1}"}</tool_call>', "",
         [("get_weather", '{"days": 1}')]),
        ('<tool_call>{"name": "get_weather", "arguments": {"days": 1}} no end', "no end",
         [("get_weather", '{"days": 1}')]),
        # A call that began keeps what follows up to its end.
        ('<tool_call>{"name": "get_weather", "arguments": {"days": oh}}</tool_call> x', "x",
         [("get_weather", '{"days": oh}}')]),
        ('<tool_call>{"name": "get_weather", "arguments": {"city": "Zü', "",
         [("get_weather", '{"city": "Zü')]),
        ('<tool_call>[{"name": "get_weather", "arguments": {}}]</tool_call>', "all", []),
        ("<tool_call>", "all", []),
        ('<tool_call><tool_call>{"name": "get_weather"}</tool_call>', "<tool_call>",
         [("get_weather", "{}")]),
    ],
)  # fmt: skip
def test_what_is_no_call_stays_content(
    text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    expected = (text if content == "all" else content, "", calls)
    assert parsed("hermes", [text]) == expected
    assert parsed("hermes", list(text)) == expected


def test_a_string_may_hold_the_anchor_that_ends_a_call() -> None:
    calls: list[Call] = [("get_weather", {"city": "</tool_call>"})]
    for form in ("hermes", "gemma4", "mistral", "llama3_json"):
        text = WRITERS[form](calls)
        assert parsed(form, list(text))[2] == [("get_weather", '{"city": "</tool_call>"}')] or (
            form == "gemma4" and json.loads(parsed(form, list(text))[2][0][1]) == calls[0][1]
        )


def test_the_type_of_a_tag_may_be_a_reference() -> None:
    schema = {"properties": {"n": {"$ref": "#/$defs/count"}, "loop": {"$ref": "#/$defs/loop"}},
              "$defs": {"count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                        "loop": {"$ref": "#/$defs/loop"}}}  # fmt: skip
    text = WRITERS["qwen3_xml"]([("f", {"n": 3, "loop": "x"})])
    assert parsed("qwen3_xml", [text], tools={"f": schema})[2] == [("f", '{"n": 3, "loop": "x"}')]


def test_a_string_of_a_tag_is_passed_on_before_it_ends() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nZür"
    assert parsed("qwen3_xml", [text])[2] == [("get_weather", '{"city": "Zür')]


def test_the_prompt_may_have_begun_the_reasoning() -> None:
    prompt = "<|im_start|>user\n<think> </think><|im_end|>\n<|im_start|>assistant\n<think>\n"
    template = builtin("hermes")
    assert template.opening(prompt) == "<think>\n"
    said = parsed(template, ["so\n</thi", "nk>\n\nYes"], opening=template.opening(prompt))
    assert said == ("Yes", "so", [])
    closed = parsed(template, ["Yes"], opening="<think>\n\n</think>\n\n")
    assert closed == ("Yes", "", [])


def theirs(template: dict[str, Any], text: str) -> Any:
    from transformers.utils.chat_parsing import parse_response

    tools = [
        {"type": "function", "function": {"name": n, "parameters": p}} for n, p in TOOLS.items()
    ]
    return parse_response(text, template, prefix="", tools=tools)


@pytest.mark.parametrize("form", [form for form in WRITERS if not form.startswith("mistral")])
@pytest.mark.parametrize("reasoning", ["", "<think>\nWell.\n</think>\n\n"])
def test_transformers_reads_the_same_of_the_same_template(form: str, reasoning: str) -> None:
    """Mistral's have no end: transformers reads one list, and no call behind another."""
    template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {},
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            "tool_calls": dict(builtins.CALLS[form]),
        },
    }
    calls = [(name, {k: v for k, v in given.items() if k != "places"}) for name, given in CALLS]
    if form == "llama3_json":
        calls = calls[:1]
    text = f"{reasoning}{WRITERS[form](calls)}"
    read = theirs(template, text)
    content, thought, ours = parsed(load_template(template), list(text))
    assert thought == read.get("reasoning_content", "")
    assert content == read.get("content", "")
    assert [
        {"type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
        for name, arguments in ours
    ] == read["tool_calls"]

"""A request of `/v1/responses` is the chat that somebody would write by hand; pure."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.image_files import data_url, png

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import ChatRequest, parse_chat
from vlm_worker.gateway.responses_api.dialect import ResponsesDialect
from vlm_worker.gateway.responses_api.paths import Paths
from vlm_worker.gateway.responses_api.translation import translated
from vlm_worker.gateway.turns import at_once

IMAGE = data_url(png())
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER = {"role": "user", "content": "hi"}
FLAT = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
NESTED = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
}


def request(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "input": "hi", **changes}


def chat(**changes: Any) -> dict[str, Any]:
    """The chat of a request with these fields."""
    return at_once(translated(request(**changes), Paths())).chat


def refused(**changes: Any) -> ApiError:
    """The error of a request, as its client sees it."""
    dialect = ResponsesDialect()
    with pytest.raises(ApiError) as caught:
        at_once(parse_chat(at_once(dialect.translate(request(**changes)))))
    assert caught.value.status == 400
    return dialect.renamed(caught.value)


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": arguments}


def chat_call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def output(call_id: str, value: Any = "sunny") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def said(text: str) -> dict[str, Any]:
    """A message as an answer has it."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [part]}  # fmt: skip


def thought(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content,
            "encrypted_content": None, "status": "completed"}  # fmt: skip


INPUTS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "a string": ("hi", [USER]),
    "messages": (
        [USER, {"type": "message", "role": "developer", "content": "x"},
         {"role": "system", "content": [{"type": "input_text", "text": "y"}]}],
        [USER, {"role": "developer", "content": "x"},
         {"role": "system", "content": [{"type": "text", "text": "y"}]}],
    ),
    "an image": (
        [{"role": "user", "content": [
            {"type": "input_text", "text": "What?"},
            {"type": "input_image", "image_url": IMAGE, "detail": "low", "file_id": None}]}],
        [{"role": "user", "content": [
            {"type": "text", "text": "What?"},
            {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}]}],
    ),
    "a conversation": (
        [USER, thought("hm"), said("red"), {"role": "user", "content": "Sure?"}],
        [USER, {"role": "assistant", "content": "red", "reasoning_content": "hm"},
         {"role": "user", "content": "Sure?"}],
    ),
    "a refusal": (
        [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER],
        [USER, {"role": "assistant", "content": "No."}, USER],
    ),
    "two messages of the assistant": (
        [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
    ),
    "parallel calls": (
        [USER, thought("hm"), said("I'll look."), call("1"), call("2"), output("1"), output("2")],
        [USER, {"role": "assistant", "content": "I'll look.", "reasoning_content": "hm",
                "tool_calls": [chat_call("1"), chat_call("2")]},
         {"role": "tool", "tool_call_id": "1", "content": "sunny"},
         {"role": "tool", "tool_call_id": "2", "content": "sunny"}],
    ),
    "calls in turn": (
        [USER, call("1"), output("1", [{"type": "input_text", "text": "a"}]), call("2"),
         output("2"), said("Sunny.")],
        [USER, {"role": "assistant", "content": None, "tool_calls": [chat_call("1")]},
         {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}]},
         {"role": "assistant", "content": None, "tool_calls": [chat_call("2")]},
         {"role": "tool", "tool_call_id": "2", "content": "sunny"},
         {"role": "assistant", "content": "Sunny."}],
    ),
    "text around a call": (
        [USER, said("a"), call("1"), said("b"), output("1")],
        [USER, {"role": "assistant", "content": "ab", "tool_calls": [chat_call("1")]},
         {"role": "tool", "tool_call_id": "1", "content": "sunny"}],
    ),
    "reasoning that was cut": (
        [USER, thought("hm"), USER],
        [USER, {"role": "assistant", "content": "", "reasoning_content": "hm"}, USER],
    ),
    "reasoning without its text": (
        [USER, {"type": "reasoning", "id": "rs_1", "summary": []}, said("red"), USER],
        [USER, {"role": "assistant", "content": "red"}, USER],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
def test_items_are_the_messages_of_the_chat_written_by_hand(name: str) -> None:
    given_input, messages = INPUTS[name]
    parsed = at_once(parse_chat(chat(input=given_input)))
    by_hand = at_once(parse_chat({"model": "m", "messages": messages}))
    assert parsed == by_hand
    with_instructions = chat(input=given_input, instructions="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert with_instructions["messages"] == [system, *chat(input=given_input)["messages"]]


LOGPROBS = "message.output_text.logprobs"
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_output_tokens": 7}, {"max_completion_tokens": 7}),
    ({"include": [LOGPROBS]}, {"logprobs": True}),
    ({"include": [LOGPROBS, "reasoning.encrypted_content"], "top_logprobs": 3},
     {"logprobs": True, "top_logprobs": 3}),
    ({"include": [], "top_logprobs": 0}, {}),
    ({"text": {"format": {"type": "text"}, "verbosity": "medium"}},
     {"response_format": {"type": "text"}}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
     {"response_format": {"type": "json_schema",
                          "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}}),
    ({"tools": [FLAT]}, {"tools": [NESTED]}),
    ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}, {}),
    ({"tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False},
     {"tools": [NESTED], "tool_choice": "required", "parallel_tool_calls": False}),
    ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "f"}},
     {"tools": [NESTED], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ({"tools": [{"type": "function", "name": "g"}, FLAT],
      "tool_choice": {"type": "allowed_tools", "mode": "required",
                      "tools": [{"type": "function", "name": "f"}]}},
     {"tools": [NESTED], "tool_choice": "required"}),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
    ({"stream": True, "stream_options": {"include_obfuscation": False}},
     {"stream": True, "stream_options": {}}),
    ({"store": False, "background": False, "truncation": "disabled", "service_tier": "auto"}, {}),
    ({"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "c",
      "temperature": 0.5, "top_p": 0.5, "seed": 1, "stop": "x", "visual": "low", "top_k": 3},
     {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "c",
      "temperature": 0.5, "top_p": 0.5, "seed": 1, "stop": "x", "visual": "low", "top_k": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("given_fields", "by_hand"), FIELDS)
def test_fields_are_those_of_the_chat(
    given_fields: dict[str, Any], by_hand: dict[str, Any]
) -> None:
    written = chat(**given_fields)
    assert written == {"model": "m", "messages": [USER], **by_hand}
    assert isinstance(at_once(parse_chat(written)), ChatRequest)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": "x", "phase": "commentary"}]}, "input[0].phase"),
    ({"input": [{"role": "user", "content": "x", "nme": 1}]}, "input[0].nme"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
    ({"input": [USER, {"role": "user", "content": [{"type": "input_text"}]}]},
     "input[1].content[0].text"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
     "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
     "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
     "input[0].content[0].file_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].image_url"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": 5}]}]},
     "input[0].content[0].image_url"),
    ({"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": IMAGE, "detail": "huge"}]}]},
     "input[0].content[0].detail"),
    ({"input": [USER, {"role": "system", "content": [
        {"type": "input_image", "image_url": IMAGE}]}]}, "input[1].content[0]"),
    ({"input": [{"role": "assistant", "content": [
        {"type": "output_text", "text": "x", "annotations": [{"type": "url_citation"}]}]}]},
     "input[0].content[0].annotations"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [USER, said("x"), {"type": "function_call", "call_id": "1", "arguments": "{}"}]},
     "input[2].name"),
    ({"input": [USER, call("1", "[")]}, "input[1].arguments"),
    ({"input": [USER, output("1")]}, "input[1].call_id"),
    ({"input": [USER, call("1"), output("1", None)]}, "input[2].output"),
    ({"input": [USER, call("1"), output("1", 5)]}, "input[2].output"),
    ({"input": [USER, call("1"), output("1", [{"type": "input_image", "image_url": IMAGE}])]},
     "input[2].output[0].type"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}]},
     "input[0].summary"),
    ({"instructions": 5}, "instructions"),
    ({"instructions": [USER]}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"include": [LOGPROBS, "x"]}, "include[1]"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}},
     "text.format.schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"reasoning": {"effort": "max"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [NESTED]}, "tools[0].function"),
    ({"tools": [FLAT, {"type": "function", "name": "a b"}]}, "tools[1].name"),
    ({"tools": [FLAT, {"type": "function", "name": "g", "parameters": {"type": "array"}}]},
     "tools[1].parameters.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [FLAT], "tool_choice": "f"}, "tool_choice"),
    ({"tools": [FLAT], "tool_choice": 5}, "tool_choice"),
    ({"tools": [FLAT], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
    ({"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "auto",
                                       "tools": [{"type": "function", "name": "g"}]}},
     "tool_choice.tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}, FLAT],
      "tool_choice": {"type": "allowed_tools", "mode": "auto",
                      "tools": [{"type": "function", "name": "f"}]}}, "tools[0].name"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"messages": [USER]}, "messages"),
    ({"n": 2}, "n"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"temprature": 1}, "temprature"),
    ({"temperature": 3}, "temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "param"), REFUSED)
def test_an_error_names_the_field_that_the_client_sent(changes: dict[str, Any], param: str) -> None:
    error = refused(**changes)
    assert error.param == param
    assert f"'{param}'" in error.message
    known = ("'messages", "function.", "response_format", "max_completion", "reasoning_effort")
    assert param == "messages" or not any(name in error.message for name in known)


def test_an_error_behind_the_parser_has_the_names_of_the_items_too() -> None:
    dialect = ResponsesDialect()
    tools = [{"type": "function", "name": "g"}, FLAT]
    allowed = {"type": "allowed_tools", "mode": "auto",
               "tools": [{"type": "function", "name": "f"}]}  # fmt: skip
    at_once(dialect.translate(request(tools=tools, tool_choice=allowed, instructions="x")))
    names = {
        "tools[0].function.parameters.properties.a": "tools[1].parameters.properties.a",
        "messages[0].content": "instructions",
        "messages[1].content": "input",
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema.schema.$defs.x": "text.format.schema.$defs.x",
        "response_format": "text.format",
        "X-Request-Timeout": "X-Request-Timeout",
    }
    for chat_name, ours in names.items():
        error = dialect.renamed(ApiError(400, f"'{chat_name}' is wrong.", param=chat_name))
        assert (error.param, error.message) == (ours, f"'{ours}' is wrong.")


def test_an_answer_repeats_its_request() -> None:
    result = at_once(translated(request(), Paths())).repeated
    shown = {name: json.loads(bytes(text)) for name, text in result.fields.items()}
    assert shown == {
        "instructions": None, "max_output_tokens": None, "metadata": {},
        "parallel_tool_calls": True, "prompt_cache_key": None, "safety_identifier": None,
        "reasoning": {"effort": None, "summary": None}, "text": {"format": {"type": "text"}},
        "tool_choice": "auto", "tools": [], "top_logprobs": 0, "user": None,
    }  # fmt: skip
    large = at_once(translated(request(instructions="x" * 100_000, tools=[FLAT]), Paths())).repeated
    assert json.loads(bytes(large.fields["tools"])) == [FLAT]
    assert large.num_bytes == sum(len(bytes(text)) for text in large.fields.values()) > 100_000


KEYS = st.sampled_from(
    ["type", "role", "content", "text", "image_url", "detail", "call_id", "name", "arguments",
     "output", "summary", "refusal", "id", "status", "function", "strict", "parameters", "format",
     "schema", "effort", "mode", "tools", "annotations", "url"]
)  # fmt: skip
WORDS = st.sampled_from(
    ["message", "function_call", "function_call_output", "reasoning", "input_text", "output_text",
     "input_image", "reasoning_text", "refusal", "user", "assistant", "system", "f", "{}", "auto",
     "required", "function", "allowed_tools", "json_schema", "json_object", "text", "1", "",
     IMAGE, LOGPROBS]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)
PART = st.fixed_dictionaries(
    {"type": WORDS}, optional={"text": WORDS, "refusal": WORDS, "image_url": WORDS, "detail": WORDS}
)
ITEM = JSON | st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]),
        "role": WORDS,
        "content": WORDS | st.lists(PART, max_size=3) | JSON,
        "call_id": st.sampled_from(["1", "2"]),
        "name": st.just("f"),
        "arguments": st.sampled_from(["{}", '{"a": 1}', "["]),
        "output": WORDS | st.lists(PART, max_size=2),
        "summary": st.just([]) | JSON,
    },
)
BODY = st.fixed_dictionaries(
    {"model": st.just("m"), "input": st.lists(ITEM, max_size=5) | JSON},
    optional={
        "instructions": WORDS | JSON, "tools": st.lists(st.just(FLAT) | JSON, max_size=2) | JSON,
        "tool_choice": WORDS | JSON, "parallel_tool_calls": st.booleans() | JSON,
        "text": JSON, "reasoning": JSON, "include": st.lists(WORDS, max_size=2) | JSON,
        "top_logprobs": JSON, "stream_options": JSON, "metadata": JSON, "max_output_tokens": JSON,
    },
)  # fmt: skip


@given(BODY)
def test_whatever_is_sent_it_is_a_chat_or_a_400_that_names_a_field_of_the_client(
    body: dict[str, Any],
) -> None:
    dialect, before = ResponsesDialect(), copy.deepcopy(body)
    try:
        written = at_once(dialect.translate(body))
        request_ = at_once(parse_chat(written))
    except ApiError as caught:
        error = dialect.renamed(caught)
        assert error.status == 400
        top = (error.param or "").partition(".")[0].partition("[")[0]
        assert top in {*body, "input", "stream"}, error.message
        return
    assert body == before
    assert isinstance(request_, ChatRequest)
    msgspec.json.encode(written)


def test_a_long_name_of_the_client_in_an_error_costs_no_more_than_its_length() -> None:
    """A path of a schema has names that the client chose; a quadratic search would time out."""
    name = ".'x.y' [" * 250_000
    paths = Paths()
    path = f"response_format.json_schema.schema.properties.{name}"
    error = paths.renamed(ApiError(400, f"'{path}' is not supported.", param=path))
    assert error.param == f"text.format.schema.properties.{name}"
    assert error.message.startswith("'text.format.schema.properties.")
    assert error.message.endswith(f"{name[-100:]}' is not supported.")

"""docs/openai.md, the tables of `/v1/responses` and the openai client's own parameters agree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseOutputMessageParam,
    ResponseReasoningItemParam,
    ResponseStreamEvent,
    response_create_params,
)
from openai.types.responses.response_input_item_param import FunctionCallOutput, Message
from worker.gateway.parameter_tables import DOCS, documented, printed

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import ChatRequest, parse_chat
from vlm_worker.gateway.api.schema import CHAT, EXTRA, Parameter, Support
from vlm_worker.gateway.responses_api.dialect import ResponsesDialect
from vlm_worker.gateway.responses_api.fields import (
    FUNCTION_CALL,
    FUNCTION_CALL_OUTPUT,
    FUNCTION_TOOL,
    MESSAGE,
    OF_CHAT,
    REASONING,
    RESPONSES,
)
from vlm_worker.gateway.turns import at_once

BODY: dict[str, Any] = {"model": "m", "input": "hi"}
TOOL = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "x"}
# A good value of each supported parameter, with what it needs.
GIVEN: dict[str, dict[str, Any]] = {
    "instructions": {"instructions": "x"},
    "max_output_tokens": {"max_output_tokens": 5},
    "temperature": {"temperature": 1},
    "top_p": {"top_p": 1},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {}},
    "text": {"text": {"format": {"type": "json_object"}}},
    "tools": {"tools": [TOOL]},
    "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
    "reasoning": {"reasoning": {"effort": "low"}},
    "include": {"include": ["message.output_text.logprobs"]},
    "top_logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "prompt_cache_key": {"prompt_cache_key": "c"},
    "user": {"user": "u"},
    "safety_identifier": {"safety_identifier": "s"},
    "metadata": {"metadata": {"a": "b"}},
    "seed": {"seed": 1},
    "stop": {"stop": ["x"]},
    "frequency_penalty": {"frequency_penalty": 1},
    "presence_penalty": {"presence_penalty": 1},
    "logit_bias": {"logit_bias": {"7": 1}},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "ignore_eos": {"ignore_eos": True},
    "min_tokens": {"min_tokens": 2},
    "stop_token_ids": {"stop_token_ids": [3]},
    "priority": {"priority": -5},
    "visual": {"visual": "low"},
}


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("## Responses API: `/v1/responses`", (*RESPONSES, *OF_CHAT)),
        ("### Items of the input",
         (*MESSAGE, *FUNCTION_CALL, *FUNCTION_CALL_OUTPUT, *REASONING)),
        ("### Tools of a response", FUNCTION_TOOL),
    ],
)  # fmt: skip
def test_the_page_prints_the_tables_of_the_code(heading: str, table: Sequence[Parameter]) -> None:
    assert documented(heading) == printed(table)


def test_every_parameter_of_the_client_has_its_row() -> None:
    params = set(response_create_params.ResponseCreateParamsBase.__annotations__)
    params |= set(response_create_params.ResponseCreateParamsStreaming.__annotations__)
    assert {row.name for row in RESPONSES} == params
    fields: list[tuple[Sequence[Parameter], tuple[Any, ...]]] = [
        (MESSAGE, (EasyInputMessageParam, Message, ResponseOutputMessageParam)),
        (FUNCTION_CALL, (ResponseFunctionToolCallParam,)),
        (FUNCTION_CALL_OUTPUT, (FunctionCallOutput,)),
        (REASONING, (ResponseReasoningItemParam,)),
        (FUNCTION_TOOL, (FunctionToolParam,)),
    ]
    for table, types in fields:
        assert {row.name for row in table} == {n for one in types for n in get_type_hints(one)}


def test_every_other_parameter_of_a_chat_is_named() -> None:
    """So that nobody has to guess what a chat's parameter is called here."""
    absent = {row.name for row in CHAT} - {row.name for row in (*RESPONSES, *OF_CHAT)}
    refused = {row.name for row in CHAT if row.support in (Support.REFUSED, Support.NEUTRAL)}
    assert absent <= refused


def parse(table: Sequence[Parameter], changes: dict[str, Any]) -> ChatRequest:
    items = {
        id(MESSAGE): [{"role": "user", "content": "x"}],
        id(FUNCTION_CALL): [CALL],
        id(FUNCTION_CALL_OUTPUT): [CALL, OUTPUT],
        id(REASONING): [{"role": "user", "content": "x"}, {"type": "reasoning"}],
    }
    if id(table) in items:
        *before, last = items[id(table)]
        body = BODY | {"input": [*before, {**last, **changes}]}
    elif table is FUNCTION_TOOL:
        body = BODY | {"tools": [TOOL | changes]}
    else:
        body = BODY | changes
    return at_once(parse_chat(at_once(ResponsesDialect().translate(body))))


NAMES = {"responses": RESPONSES, "of a chat": OF_CHAT, "message": MESSAGE, "call": FUNCTION_CALL,
         "output": FUNCTION_CALL_OUTPUT, "reasoning": REASONING, "tool": FUNCTION_TOOL}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "row"),
    [
        pytest.param(table, row, id=f"{name}.{row.name}")
        for name, table in NAMES.items()
        for row in table
        if row.support in (Support.NEUTRAL, Support.REFUSED)
    ],
)
def test_only_a_neutral_value_is_taken(table: Sequence[Parameter], row: Parameter) -> None:
    for value in (None, *row.neutral):
        parse(table, {row.name: value})
    for value in ("something", 17, [1], {"x": 1}, *([] if False in row.neutral else [False])):
        with pytest.raises(ApiError) as refused:
            parse(table, {row.name: value})
        assert (refused.value.status, refused.value.code) == (400, "unsupported_parameter")
        assert str(refused.value.param).endswith(row.name)
        assert row.note in refused.value.message


@pytest.mark.parametrize(
    "row",
    [row for row in (*RESPONSES, *OF_CHAT, *EXTRA)
     if row.support in (Support.SUPPORTED, Support.LOGGED) and row.name in GIVEN],
    ids=lambda row: row.name,
)  # fmt: skip
def test_a_supported_parameter_has_an_effect_and_is_checked(row: Parameter) -> None:
    changes = GIVEN[row.name]
    bare = parse(RESPONSES, {name: v for name, v in changes.items() if name != row.name})
    if row.name != "stream_options":
        assert parse(RESPONSES, changes) != bare
    with pytest.raises(ApiError):
        parse(RESPONSES, changes | {row.name: [[]]})


def test_every_supported_parameter_is_tried() -> None:
    names = {row.name for row in (*RESPONSES, *OF_CHAT) if row.support is Support.SUPPORTED}
    assert names - set(GIVEN) == {"input", "model"}


def test_the_page_names_every_event_that_is_sent() -> None:
    events = get_args(get_args(ResponseStreamEvent)[0])
    known = {get_args(event.model_fields["type"].annotation)[0] for event in events}
    section = DOCS.read_text().split("### The response object\n", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"`(response\.[a-z_.]+)`", section)) - {"response.error"}
    assert named <= known
    assert len(named) >= 12

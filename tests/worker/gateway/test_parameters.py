"""docs/openai.md, the code and the openai client's own parameters say the same."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import (
    completion_create_params as chat_create_params,
)
from worker.gateway.parameter_tables import DOCS, documented, printed

from vlm_worker.gateway.api.completions import parse_completion
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import SamplingOptions, parse_chat
from vlm_worker.gateway.api.schema import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    EXTRA,
    MESSAGE,
    TOKENIZE,
    Parameter,
    Support,
)
from vlm_worker.gateway.orchestrate.attempt import IMAGE_CODES
from vlm_worker.gateway.turns import at_once

CHAT_BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
GATEWAY = Path(__file__).parents[3] / "worker" / "vlm_worker" / "gateway"
COMPLETION_BODY: dict[str, Any] = {"model": "m", "prompt": "hi"}
VALUES: dict[str, Any] = {
    "model": "m", "temperature": 1, "top_p": 1, "seed": 1, "stop": ["x"], "stream": True,
    "max_tokens": 5, "max_completion_tokens": 5, "user": "u", "safety_identifier": "s",
    "metadata": {"a": "b"}, "messages": CHAT_BODY["messages"], "prompt": "hi",
    "role": "user", "content": "hi", "n": 2, "frequency_penalty": 0.5, "presence_penalty": -2,
    "logit_bias": {"7": -100, "9": 1.5}, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1,
    "ignore_eos": True, "priority": -5, "best_of": 1, "visual": "low", "reasoning_effort": "low",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "response_format": {"type": "json_object"}, "prompt_cache_key": "c",
    "stop_token_ids": [3], "min_tokens": 2, "name": "ada", "echo": True,
}  # fmt: skip
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# What goes only with something else, or has another form at the other endpoint.
TOGETHER: dict[tuple[str, str], Any] = {
    ("chat", "stream_options"): {"stream": True, "stream_options": {}},
    ("completion", "stream_options"): {"stream": True, "stream_options": {}},
    ("chat", "logprobs"): {"logprobs": True},
    ("chat", "top_logprobs"): {"logprobs": True, "top_logprobs": 20},
    ("completion", "logprobs"): {"logprobs": 0},
    ("chat", "tool_choice"): {"tools": VALUES["tools"], "tool_choice": "required"},
    ("chat", "parallel_tool_calls"): {"tools": VALUES["tools"], "parallel_tool_calls": False},
    ("message", "tool_calls"): {"role": "assistant", "tool_calls": [CALL]},
    ("message", "tool_call_id"): {"role": "tool", "tool_call_id": "c1"},
    ("message", "reasoning_content"): {"role": "assistant", "reasoning_content": "hm"},
}


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("## Chat: `/v1/chat/completions`", CHAT),
        ("### Fields of a message", MESSAGE),
        ("## Completions: `/v1/completions`", COMPLETION),
        ("### `/tokenize`", TOKENIZE),
        ("### `/detokenize`", DETOKENIZE),
        ("## Beyond OpenAI's", EXTRA),
    ],
)
def test_the_page_prints_the_table_of_the_code(heading: str, table: Sequence[Parameter]) -> None:
    assert documented(heading) == printed(table)


def test_every_parameter_of_the_client_has_its_row() -> None:
    chat = set(chat_create_params.CompletionCreateParamsStreaming.__annotations__)
    chat |= set(chat_create_params.CompletionCreateParamsBase.__annotations__)
    assert {row.name for row in CHAT} == chat
    completion = set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    assert {row.name for row in COMPLETION} == completion | {"stream"}
    messages = (
        ChatCompletionAssistantMessageParam,
        ChatCompletionSystemMessageParam,
        ChatCompletionUserMessageParam,
        ChatCompletionToolMessageParam,
    )
    fields = {name for message in messages for name in message.__annotations__}
    assert {row.name for row in MESSAGE} == fields | {
        "annotations", "reasoning_content", "parsed",
    }  # fmt: skip


def test_every_part_of_the_client_is_documented() -> None:
    parts = get_args(ChatCompletionContentPartParam)
    kinds = {get_args(get_type_hints(part)["type"])[0] for part in parts}
    assert len(kinds) == len(parts) >= 4
    assert all(f"`{kind}`" in DOCS.read_text() for kind in kinds)


def parse(table: Sequence[Parameter], changes: dict[str, Any]) -> Any:
    if table is MESSAGE:
        called = {"role": "assistant", "tool_calls": [CALL]}
        message = {"role": "user", "content": "x"} | changes
        return at_once(parse_chat({**CHAT_BODY, "messages": [called, message]}))
    if table is CHAT:
        return at_once(parse_chat(CHAT_BODY | changes))
    return parse_completion(COMPLETION_BODY | changes)


TABLES = (("chat", CHAT), ("message", MESSAGE), ("completion", COMPLETION))
# Of completions alone: test_prompt_logprobs.py
OF_COMPLETIONS = ("prompt_logprobs",)
OTHERS = tuple(row for row in EXTRA if row.name not in OF_COMPLETIONS)
BEYOND = (("chat", CHAT, EXTRA), ("completion", COMPLETION, OTHERS))
ROWS = [
    pytest.param(name, table, row, id=f"{name}.{row.name}")
    for name, table, rows in (*((name, table, table) for name, table in TABLES), *BEYOND)
    for row in rows
]


@pytest.mark.parametrize(("name", "table", "row"), ROWS)
def test_the_code_does_what_the_table_says(
    name: str, table: Sequence[Parameter], row: Parameter
) -> None:
    parse(table, {row.name: None} if row.name not in VALUES else {})
    if row.support in (Support.NEUTRAL, Support.REFUSED):
        for value in row.neutral:
            parse(table, {row.name: value})
        for value in ("something", 17, [1], {"x": 1}, *([] if False in row.neutral else [False])):
            with pytest.raises(ApiError) as refused:
                parse(table, {row.name: value})
            assert refused.value.status == 400
            assert refused.value.code == "unsupported_parameter"
            assert str(refused.value.param).endswith(row.name)
        return
    if row.support is Support.UNREAD:
        for value in ("something", 17, [1], {"x": 1}, False):
            given = {"role": "assistant", row.name: value}
            assert parse(table, given) == parse(table, {"role": "assistant"})
        return
    changes = TOGETHER.get((name, row.name)) or {row.name: VALUES[row.name]}
    parsed = parse(table, changes)
    if row.support is Support.LOGGED:
        assert parsed.options.logged == changes
    # What is acted on is also checked: no such value goes through unseen.
    with pytest.raises(ApiError):
        parse(table, changes | {row.name: [[]]})


SAMPLING = {
    "n": (0, 9, 1.5),
    "temperature": (-0.1, 2.1, math.nan),
    "top_p": (-0.1, 1.1, math.inf),
    "min_p": (-0.1, 1.1, math.nan),
    "top_k": (-2, 2**31, 0.5),
    "frequency_penalty": (-2.1, 2.1, math.nan),
    "presence_penalty": (-2.1, 2.1, "1"),
    "repetition_penalty": (0, -1, 10.1),
    "seed": (2**63, -(2**63) - 1, 1.0),
    "priority": (-1001, 1001, True),
    "min_tokens": (-1, 2**21 + 1, 1.5, True, "1"),
    "stop_token_ids": ([-1], [2**31], [True], ["3"], [1.0], list(range(65)), 3),
    "logit_bias": ({"7": 101}, {"x": 1}, {"-1": 1}, {"07": 1, "7": 1}, {"7": "1"}, {"7": math.nan},
                   {"7": True}, {str(i): 1 for i in range(1025)}, {"9" * 11: 1}, {"\u0667": 1}),
}  # fmt: skip


@pytest.mark.parametrize("parameter", SAMPLING)
def test_what_is_out_of_bounds_is_named(parameter: str) -> None:
    for value in SAMPLING[parameter]:
        for table in (CHAT, COMPLETION):
            with pytest.raises(ApiError) as refused:
                parse(table, {parameter: value})
            assert (refused.value.status, refused.value.param) == (400, parameter)


@pytest.mark.parametrize(
    "changes", [{"top_logprobs": 2}, {"logprobs": False, "top_logprobs": 2},
                {"logprobs": True, "top_logprobs": 21}]
)  # fmt: skip
def test_likeliest_tokens_need_log_probabilities(changes: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        parse(CHAT, changes)
    assert refused.value.param == "top_logprobs"


@pytest.mark.parametrize("changes", [{"best_of": 2}, {"n": 2, "best_of": 1}])
def test_choices_that_are_not_returned_are_refused(changes: dict[str, Any]) -> None:
    assert parse(COMPLETION, {"n": 2, "best_of": 2}).options.num_choices == 2
    with pytest.raises(ApiError) as refused:
        parse(COMPLETION, changes)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "best_of")


def test_sampling_is_taken_as_it_is_meant() -> None:
    said = {"temperature": 0.5, "top_k": -1, "priority": -5, "logit_bias": {"9": 1, "7": -2.5},
            "repetition_penalty": 1.25, "frequency_penalty": None}  # fmt: skip
    options = parse(CHAT, said | {"logprobs": True, "n": 3}).options
    assert options.num_choices == 3
    assert options.sampling == SamplingOptions(
        {"temperature": 0.5, "top_k": 0, "repetition_penalty": 1.25},
        logit_bias=((7, -2.5), (9, 1.0)), num_logprobs=0, priority=5,
    )  # fmt: skip
    assert parse(CHAT, {"logprobs": True, "top_logprobs": 3}).options.sampling.num_logprobs == 3
    assert parse(COMPLETION, {"logprobs": 4}).options.sampling.num_logprobs == 4
    assert parse(COMPLETION, {}).options.sampling == SamplingOptions()


def test_the_page_names_every_code_of_an_error() -> None:
    sources = "".join(source.read_text() for source in GATEWAY.rglob("*.py"))
    codes = {*re.findall(r'code="(\w+)"', sources), *IMAGE_CODES}
    assert len(codes) > 20
    section = DOCS.read_text().split("## Errors\n", 1)[1]
    assert not [code for code in sorted(codes) if f"`{code}`" not in section]


def test_arguments_that_the_client_has_read_are_taken_with_their_text() -> None:
    read = {**CALL, "function": {**CALL["function"], "parsed_arguments": {"x": [1]}}}
    messages = [
        [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "x"}]
        for call in (CALL, read)
    ]
    plain, given_back = (at_once(parse_chat({**CHAT_BODY, "messages": one})) for one in messages)
    assert plain == given_back


def test_a_tool_s_message_names_the_function_of_its_call_or_none() -> None:
    message = {"role": "tool", "tool_call_id": "c1"}
    assert parse(MESSAGE, message | {"name": "f"}) == parse(MESSAGE, message)
    for name in ("g", "", "x" * 65):
        with pytest.raises(ApiError) as refused:
            parse(MESSAGE, message | {"name": name})
        assert refused.value.param == "messages[1].name"

"""docs/openai.md, the code and the openai client's own parameters say the same."""

from __future__ import annotations

import json
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

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.parameters import CHAT, COMPLETION, MESSAGE, Parameter, Support
from vlm_worker.gateway.api.requests import parse_chat, parse_completion

DOCS = Path(__file__).parents[3] / "docs" / "openai.md"
CHAT_BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION_BODY: dict[str, Any] = {"model": "m", "prompt": "hi"}
VALUES: dict[str, Any] = {
    "model": "m", "temperature": 1, "top_p": 1, "seed": 1, "stop": ["x"], "stream": True,
    "max_tokens": 5, "max_completion_tokens": 5, "user": "u", "safety_identifier": "s",
    "metadata": {"a": "b"}, "messages": CHAT_BODY["messages"], "prompt": "hi",
    "role": "user", "content": "hi",
}  # fmt: skip
EXTRA: dict[str, Any] = {"stream_options": {"stream": True, "stream_options": {}}}


def documented(heading: str) -> list[tuple[str, str, str]]:
    section = DOCS.read_text().split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\| `(\w+)` \| ([a-z ]+) \| (.*) \|$", section, re.MULTILINE)


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("## Chat: `/v1/chat/completions`", CHAT),
        ("### Fields of a message", MESSAGE),
        ("## Completions: `/v1/completions`", COMPLETION),
    ],
)
def test_the_page_prints_the_table_of_the_code(heading: str, table: Sequence[Parameter]) -> None:
    rows = []
    for row in table:
        taken = ", ".join(f"`{json.dumps(value)}`" for value in row.neutral)
        what = f"{row.note}; taken: {taken}" if row.neutral else row.note
        rows.append((row.name, row.support.value, what))
    assert documented(heading) == rows


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
    assert {row.name for row in MESSAGE} == fields | {"annotations"}


def test_every_part_of_the_client_is_documented() -> None:
    parts = get_args(ChatCompletionContentPartParam)
    kinds = {get_args(get_type_hints(part)["type"])[0] for part in parts}
    assert len(kinds) == len(parts) >= 4
    assert all(f"`{kind}`" in DOCS.read_text() for kind in kinds)


def parse(table: Sequence[Parameter], changes: dict[str, Any]) -> Any:
    if table is MESSAGE:
        return parse_chat({**CHAT_BODY, "messages": [{"role": "user", "content": "x"} | changes]})
    if table is CHAT:
        return parse_chat(CHAT_BODY | changes)
    return parse_completion(COMPLETION_BODY | changes)


ROWS = [
    pytest.param(table, row, id=f"{name}.{row.name}")
    for name, table in (("chat", CHAT), ("message", MESSAGE), ("completion", COMPLETION))
    for row in table
]


@pytest.mark.parametrize(("table", "row"), ROWS)
def test_the_code_does_what_the_table_says(table: Sequence[Parameter], row: Parameter) -> None:
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
    changes = EXTRA.get(row.name) or {row.name: VALUES[row.name]}
    parsed = parse(table, changes)
    if row.support is Support.LOGGED:
        assert parsed.options.logged == changes
    # What is acted on is also checked: no such value goes through unseen.
    with pytest.raises(ApiError):
        parse(table, changes | {row.name: [[]]})

"""Required, named and strict calls through real workers; formats together with tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from worker.gateway.responding.templates import HERMES
from worker.gateway.responding.test_tool_calls import accumulated
from worker.gateway.stack import EPD, MODEL, Stack, client, stack

from vlm_worker.settings import ModelSource

PAINT: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "coats": {"enum": [1, 2, 3]}},
    "required": ["color", "coats"],
    "additionalProperties": False,
}
COUNT: dict[str, Any] = {
    "type": "object",
    "properties": {"count": {"enum": [1, 2]}},
    "required": ["count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": COUNT}}
NAMED = {"type": "function", "function": {"name": "paint"}}


def offered(*, strict: bool = True) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}
        for name, schema in {"paint": PAINT, "other": COUNT}.items()
    ]


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": "shapes",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": offered(),
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "temperature": 1.0,
        "seed": 7,
        **changes,
    }


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Stack]:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    # without reasoning: the arithmetic of these workers would think until its last token
    template = HERMES.replace("<think>", "").replace("</think>", "")
    (model / "chat_template.jinja").write_text(template)
    async with stack(*EPD, model=ModelSource(str(model))) as one:
        yield one
        await one.until_idle()


def call_of(choice: Any) -> tuple[str, dict[str, Any]]:
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls
    return call.function.name, json.loads(call.function.arguments)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
async def test_a_required_call_keeps_the_schema_of_its_tool(served: Stack, strict: bool) -> None:
    schemas, tools = {"paint": PAINT, "other": COUNT}, offered(strict=strict)
    async with client(served) as api:
        whole = await api.chat.completions.create(**body(n=4, tools=tools))
        named = await api.chat.completions.create(**body(tool_choice=NAMED, n=2, tools=tools))
        stream = await api.chat.completions.create(**body(stream=True, tools=tools))
        chunks = [one async for one in stream]
    for choice in whole.choices:
        name, given = call_of(choice)
        jsonschema.validate(given, schemas[name])
        assert not choice.message.content
    for choice in named.choices:
        name, given = call_of(choice)
        assert name == "paint"
        jsonschema.validate(given, PAINT)
    content, _, calls, reason = accumulated(chunks)
    assert (content, reason) == ("", "tool_calls")
    first = whole.choices[0].message.tool_calls[0].function
    assert [(one["name"], one["arguments"]) for one in calls] == [(first.name, first.arguments)]


async def test_a_tool_that_is_not_strict_is_called_whatever_its_schema(served: Stack) -> None:
    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    tools = [{"type": "function", "function": {"name": "paint", "parameters": bad}}]
    async with client(served) as api:
        reply = await api.chat.completions.create(**body(tool_choice=NAMED, tools=tools))
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments[:1]) == ("paint", "{")


async def test_with_a_format_an_answer_is_a_call_or_a_text_of_the_format(served: Stack) -> None:
    found = set()
    async with client(served) as api:
        for seed in range(8):
            choice = await api.chat.completions.create(
                **body(tool_choice="auto", response_format=FORMAT, seed=seed, n=2)
            )
            for one in choice.choices:
                if one.message.tool_calls:
                    call_of(one)
                    found.add("call")
                else:
                    jsonschema.validate(json.loads(one.message.content), COUNT)
                    found.add("text")
    assert found == {"call", "text"}


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"ignore_eos": True}, "ignore_eos", "invalid_value"),
        ({"min_tokens": 2}, "min_tokens", "invalid_value"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True,
              "parameters": {"type": "object", "properties": {}, "not": {}}}}]},
            "tools[0].function.parameters.not",
            "invalid_json_schema",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_enforced_is_a_400(
    served: Stack, changes: dict[str, Any], param: str, code: str
) -> None:
    is_extension = {"ignore_eos", "min_tokens"} & changes.keys()
    extra = {"extra_body": changes} if is_extension else changes
    async with client(served) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.chat.completions.create(**body(**extra))
    assert refused.value.body["param"] == param  # type: ignore[index]
    assert refused.value.code == code

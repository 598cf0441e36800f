"""Tool calls over HTTP: the openai client, a gateway, and workers that answer given tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer
from worker.gateway.responding.templates import HERMES
from worker.gateway.responding.written import CALLS, TOOLS, hermes
from worker.gateway.stack import EPD, MODEL, Stack, client, stack

from vlm_worker.settings import ModelSource
from vlm_worker.types import Role

TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
END = "###"
"""The runner of the tests has no token that ends an answer."""
OFFERED = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in TOOLS.items()
]
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Stack]:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "chat_template.jinja").write_text(HERMES)
    async with stack(*EPD, model=ModelSource(str(model))) as one:
        yield one


def tell(served: Stack, text: str) -> None:
    """Let every answer be this text."""
    script = TOKENIZER.encode(text + END, add_special_tokens=False).ids
    for worker in served.of(Role.PREFILL) + served.of(Role.DECODE):
        worker.runner.script = script


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "shapes", "messages": USER, "tools": OFFERED, "max_tokens": 900,
            "stop": [END], **changes}  # fmt: skip


def accumulated(chunks: list[Any], index: int = 0) -> tuple[str, str, list[dict[str, Any]], str]:
    """Content, reasoning, calls and finish reason of a choice of a stream."""
    content, reasoning, reason = "", "", ""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            content += choice.delta.content or ""
            reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                if part.index == len(calls):
                    assert (part.type, part.function.arguments) == ("function", "")
                    calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
                else:
                    assert (part.index, part.id) == (len(calls) - 1, None)
                    calls[-1]["arguments"] += part.function.arguments
    return content, reasoning, calls, reason


def as_calls(message: Any) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in message.tool_calls or []
    ]


async def test_calls_are_answered_whole_and_streamed_alike(served: Stack) -> None:
    tell(served, f"<think>\nHm 日本.\n</think>\n\nI'll look.{hermes(CALLS)}")
    async with client(served) as api:
        whole = await api.chat.completions.create(**body())
        stream = await api.chat.completions.create(**body(stream=True))
        chunks = [chunk async for chunk in stream]
        counting = {"stream": True, "stream_options": {"include_usage": True}}
        counted = [c async for c in await api.chat.completions.create(**body(**counting))][-1].usage
        async with api.chat.completions.stream(**body()) as helper:
            final = await helper.get_final_completion()
    (choice,) = whole.choices
    calls = as_calls(choice.message)
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
    assert len({call["id"] for call in calls}) == len(CALLS)
    assert all(call["id"].startswith("call_") for call in calls)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I'll look.")
    assert choice.message.model_extra["reasoning_content"] == "Hm 日本."
    num_reasoning = whole.usage.completion_tokens_details.reasoning_tokens
    assert 0 < num_reasoning <= len(TOKENIZER.encode("\nHm 日本.\n").ids)
    assert counted.completion_tokens_details.reasoning_tokens == num_reasoning
    content, reasoning, streamed, reason = accumulated(chunks)
    assert (content, reasoning, reason) == ("I'll look.", "Hm 日本.", "tool_calls")
    said = [(call["name"], call["arguments"]) for call in calls]
    assert [(call["name"], call["arguments"]) for call in streamed] == said
    fragments = [c for c in chunks if c.choices[0].delta.tool_calls]
    assert len(fragments) > 20
    helped = as_calls(final.choices[0].message)
    assert [(call["name"], call["arguments"]) for call in helped] == said
    assert whole.usage.completion_tokens == len(served.of(Role.DECODE)[0].runner.script)
    await served.until_idle()


async def test_an_answer_of_calls_alone_has_no_content(served: Stack) -> None:
    tell(served, hermes(CALLS[:1]))
    async with client(served) as api:
        whole = await api.chat.completions.create(**body())
    assert whole.choices[0].message.content is None


async def test_a_call_that_is_cut_ends_by_length(served: Stack) -> None:
    tell(served, hermes(CALLS[:1]))
    async with client(served) as api:
        whole = await api.chat.completions.create(**body(max_tokens=60))
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    (call,) = as_calls(choice.message)
    assert json.dumps(CALLS[0][1], ensure_ascii=False).startswith(call["arguments"])
    assert len(call["arguments"]) > 3


async def test_every_choice_has_its_calls(served: Stack) -> None:
    tell(served, hermes(CALLS[:1]))
    async with client(served) as api:
        whole = await api.chat.completions.create(**body(n=3))
        stream = await api.chat.completions.create(**body(n=3, stream=True))
        chunks = [chunk async for chunk in stream]
    ids = [as_calls(choice.message)[0]["id"] for choice in whole.choices]
    assert len(set(ids)) == 3
    for index in range(3):
        _, _, calls, reason = accumulated(chunks, index)
        assert [json.loads(call["arguments"]) for call in calls] == [CALLS[0][1]]
        assert reason == "tool_calls"


async def test_the_answer_ends_after_its_first_call_if_they_are_not_parallel(
    served: Stack,
) -> None:
    tell(served, hermes(CALLS))
    async with client(served) as api:
        both = await api.chat.completions.create(**body())
        one = await api.chat.completions.create(**body(parallel_tool_calls=False))
    assert [call["name"] for call in as_calls(one.choices[0].message)] == ["get_weather"]
    assert one.choices[0].finish_reason == "tool_calls"
    assert one.usage.completion_tokens < both.usage.completion_tokens
    await served.until_idle()


async def test_without_tools_a_call_is_content(served: Stack) -> None:
    text = hermes(CALLS[:1]).strip()
    tell(served, text)
    async with client(served) as api:
        none = await api.chat.completions.create(**body(tool_choice="none"))
        absent = await api.chat.completions.create(**body(tools=openai.NOT_GIVEN))
    for answer in (none, absent):
        assert answer.choices[0].message.content == text
        assert answer.choices[0].finish_reason == "stop"
    assert none.usage.prompt_tokens == absent.usage.prompt_tokens


async def test_tools_are_a_part_of_the_prompt_and_of_its_digests(served: Stack) -> None:
    """So no pod is chosen, and no block is found, for another set of tools."""
    tell(served, "ok")
    long = [{"role": "user", "content": "red " * 40}]
    async with client(served) as api:
        first = await api.chat.completions.create(**body(messages=long))
        again = await api.chat.completions.create(**body(messages=long))
        other = await api.chat.completions.create(**body(messages=long, tools=OFFERED[1:]))
        bare = await api.chat.completions.create(**body(messages=long, tools=openai.NOT_GIVEN))
    assert first.usage.prompt_tokens > other.usage.prompt_tokens > bare.usage.prompt_tokens
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in (again, other, bare)]
    assert cached[0] >= first.usage.prompt_tokens - 8
    assert cached[1] < other.usage.prompt_tokens - 80
    assert cached[2] < 8


async def test_the_results_of_calls_are_the_next_turn(served: Stack) -> None:
    tell(served, hermes(CALLS))
    async with client(served) as api:
        first = await api.chat.completions.create(**body())
        message = first.choices[0].message
        turns = [
            *USER,
            message.model_dump(),
            *(
                {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
                for call in message.tool_calls
            ),
        ]
        tell(served, "It is sunny.")
        second = await api.chat.completions.create(**body(messages=turns))
    assert second.choices[0].message.content == "It is sunny."
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


async def test_log_probabilities_have_all_tokens_of_the_answer(served: Stack) -> None:
    text = f"Look.{hermes(CALLS[:1])}"
    tell(served, text)
    async with client(served) as api:
        whole = await api.chat.completions.create(**body(logprobs=True))
        stream = await api.chat.completions.create(**body(logprobs=True, stream=True))
        chunks = [chunk async for chunk in stream]
    tokens = whole.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == text
    listed = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert [token.token for some in listed for token in some] == [t.token for t in tokens]


async def test_a_request_of_many_texts_in_tools_exceeds_the_context(served: Stack) -> None:
    large = {"name": "f", "description": "x" * 60_000}
    async with client(served) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.chat.completions.create(
                **body(tools=[{"type": "function", "function": large}])
            )
    assert refused.value.code == "context_length_exceeded"

"""The unmodified openai client against a gateway and real workers, in every topology."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from worker.gateway.image_files import ask, png
from worker.gateway.stack import ONE_PROCESS, TOPOLOGIES, Stack, stack_of


@pytest.fixture(params=[*TOPOLOGIES, ONE_PROCESS])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with stack_of(request.param) as one:
        yield one


def client(served: Stack, **options: object) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60, **options
    )


async def test_an_image_is_answered_whole_and_streamed_alike(served: Stack) -> None:
    messages = [ask(png(), "What is this?")]
    async with client(served) as api:
        whole = await api.chat.completions.create(
            model="shapes", messages=messages, max_tokens=12, temperature=0
        )
        stream = await api.chat.completions.create(
            model="shapes",
            messages=messages,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert whole.choices[0].finish_reason == "length" == chunks[-2].choices[0].finish_reason
    usage = whole.usage
    assert usage is not None
    assert usage.prompt_tokens_details.image_tokens == 12
    assert usage.prompt_tokens == 12 + usage.prompt_tokens_details.text_tokens
    assert usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == usage.prompt_tokens
    timing = whole.model_extra["timing"]
    assert timing["ttft_ms"] == pytest.approx(sum(timing["stages"].values()), abs=0.01)
    await served.until_idle()


async def test_the_synchronous_client_works_as_well(served: Stack) -> None:
    def ask_and_stream() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as api:
            body = {"model": "shapes", "messages": [ask(png(), "What?")], "max_tokens": 8}
            whole = api.chat.completions.create(**body)
            stream = api.chat.completions.create(**body, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content, text

    whole, streamed = await asyncio.to_thread(ask_and_stream)
    assert whole == streamed

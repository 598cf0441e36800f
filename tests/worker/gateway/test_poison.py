"""Logits that are not finite cost the request that they belong to, and nobody else anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from worker.gateway.image_files import ask, png
from worker.gateway.stack import TOPOLOGIES, Stack, stack

WORD = "zebra"
NEIGHBOURS = [
    [{"role": "user", "content": "What is red?"}],
    [{"role": "user", "content": "And what is blue, by the way?"}],
    [ask(png(), "What is this?")],
    [ask(png((3, 200, 7)), "And this?")],
]
VICTIM = [ask(png((9, 9, 200)), f"Is it a {WORD}?")]


@pytest.fixture(params=TOPOLOGIES)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with stack(*TOPOLOGIES[request.param]) as one:
        yield one


async def test_poison_stays_with_its_request_and_in_no_cache(served: Stack) -> None:
    tokenizer = served.gateway.context.prompt_builder.tokenizer
    (poison, *_) = sorted(_ids(tokenizer, f" a {WORD}?") - _ids(tokenizer, " a red thing?"))
    options = {"base_url": f"{served.url}/v1", "api_key": "none", "max_retries": 0}
    async with openai.AsyncOpenAI(**options) as api:

        async def said(messages: list[dict[str, object]]) -> str | None:
            answer = await api.chat.completions.create(
                model="shapes", messages=messages, max_tokens=12, temperature=0
            )
            return answer.choices[0].message.content

        _poison(served, poison)
        sick, *told = await asyncio.gather(
            *(said(messages) for messages in (VICTIM, *NEIGHBOURS)), return_exceptions=True
        )
        assert isinstance(sick, openai.InternalServerError), sick
        assert set(sick.body) == {"message", "type", "param", "code"}  # type: ignore[arg-type]
        await served.until_idle()
        _poison(served, None)
        assert [await said(messages) for messages in NEIGHBOURS] == told
        well = await said(VICTIM)
    await served.until_idle()
    async with stack(*TOPOLOGIES["colocated"]) as fresh:
        options["base_url"] = f"{fresh.url}/v1"
        async with openai.AsyncOpenAI(**options) as api:
            assert await said(VICTIM) == well  # no cache kept any of it


def _ids(tokenizer: object, text: str) -> set[int]:
    return set(tokenizer.encode(text).ids)  # type: ignore[attr-defined]


def _poison(served: Stack, token_id: int | None) -> None:
    for worker in served.workers:
        worker.runner.faults.poison_token = token_id

"""The bytes of a stream, stop strings, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from worker.gateway.image_files import ask, png
from worker.gateway.stack import EPD, Stack, stack

from vlm_worker.types import Role


@pytest.fixture
async def served() -> AsyncIterator[Stack]:
    async with stack(*EPD) as one:
        yield one


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": "shapes",
        "messages": [ask(png(), "What is this?")],
        "max_tokens": 10,
        "temperature": 0,
        **changes,
    }


async def lines(served: Stack, **changes: Any) -> list[bytes]:
    """The lines of a streamed answer, as they stand."""
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json=body(stream=True, **changes))
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        return answer.content.split(b"\n")


async def test_the_bytes_of_a_stream_are_openai_s(served: Stack) -> None:
    found = await lines(served)
    assert found[1::2] == [b""] * (len(found) // 2)
    assert found[-3] == b"data: [DONE]"
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in found[:-4:2]]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:])
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert all("usage" not in c for c in chunks)
    assert "timing" in chunks[-1]


async def test_usage_comes_once_in_a_chunk_of_its_own_when_asked_for(served: Stack) -> None:
    found = await lines(served, stream_options={"include_usage": True})
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in found[:-4:2]]
    assert all(c["usage"] is None for c in chunks[:-1])
    last = chunks[-1]
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 10
    assert usage["prompt_tokens_details"]["image_tokens"] == 12
    assert usage["prompt_tokens_details"]["audio_tokens"] == 0


async def test_each_chunk_has_the_usage_so_far_if_asked_for(served: Stack) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = await lines(served, stream_options=options, n=2)
    usages = [json.loads(line.removeprefix(b"data: "))["usage"] for line in found[:-4:2]]
    counts = [one["completion_tokens"] for one in usages]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 20)
    assert all(
        one["total_tokens"] == usages[0]["prompt_tokens"] + n
        for one, n in zip(usages, counts, strict=True)
    )
    assert {one["prompt_tokens_details"]["image_tokens"] for one in usages} == {12}


async def test_an_answer_ends_before_a_stop_string_and_frees_everything(served: Stack) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0
    ) as api:
        whole = await api.chat.completions.create(**body(max_tokens=40))
        text = whole.choices[0].message.content
        assert text
        stop = text[len(text) // 2 : len(text) // 2 + 5]
        cut = await api.chat.completions.create(**body(max_tokens=40, stop=[stop]))
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 40
    await served.until_idle()


async def test_the_same_seed_draws_the_same_answer(served: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as api:
        drawn = [
            (await api.chat.completions.create(**body(temperature=1.0, seed=seed)))
            .choices[0]
            .message.content
            for seed in (7, 7, 8)
        ]
    assert drawn[0] == drawn[1] != drawn[2]


async def test_one_token_needs_no_decode() -> None:
    async with stack(*EPD, patience_seconds=0.5) as served:
        (decode,) = served.of(Role.DECODE)
        await decode.kill()
        registry = served.gateway.context.registry
        assert await registry.waiters.wait_until(
            lambda: len(registry.candidates()) == 2, timeout=15
        )
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            one = await client.post("/v1/chat/completions", json=body(max_tokens=1))
            two = await client.post("/v1/chat/completions", json=body(max_tokens=2))
    assert one.json()["choices"][0]["finish_reason"] == "length"
    assert one.json()["usage"]["completion_tokens"] == 1
    assert two.status_code == 503


async def test_turns_find_the_prefix_of_the_turn_before_in_the_cache(served: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as api:
        first = await api.chat.completions.create(**body())
        turns = [ask(png(), "What is this?"), {"role": "assistant", "content": "red"}, ask("Sure?")]
        second = await api.chat.completions.create(**body(messages=turns))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 12


async def test_a_plain_prompt_is_completed(served: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as api:
        whole = await api.completions.create(model="shapes", prompt="red circle")
        stream = await api.completions.create(model="shapes", prompt="red circle", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.usage.completion_tokens == 16
    assert whole.choices[0].text == text


STAGES = ["media", "encoder_queue", "encode", "embed_transfer", "decode_reserve", "prefill_queue",
          "prefill", "kv_transfer"]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_frees_every_hop_at_any_stage(stage: str) -> None:
    async with stack(*EPD, worker_delays={stage: 3.0}) as served:
        context = served.gateway.context
        async with httpx.AsyncClient(base_url=served.url) as client:
            try:
                async with asyncio.timeout(0.7):
                    await client.post("/v1/chat/completions", json=body(max_tokens=500))
            except TimeoutError:
                pass
            else:
                pytest.fail("the request was over before the client left")
        async with asyncio.timeout(60):
            await context.idle.wait()
        await served.until_idle()
        assert b'triptych_requests_total{outcome="cancelled"} 1.0' in context.meters.exposition(
            num_inflight=0, accepting=True
        )

"""Across workers, an image goes into the prompt while the next one is still being encoded."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest
from worker.gateway.image_files import png
from worker.server.serving import FAMILY, Serving, serving

from vlm_worker.core.step_values import StepInputs, StepOutput
from vlm_worker.testing import IMAGE_TOKEN
from vlm_worker.types import ImageItem, Request, RequestKey, SamplingParams, Source
from vlm_worker.wire.messages import (
    Decoded,
    EncodeCall,
    EncodeItem,
    FirstToken,
    ItemReady,
    PrefillCall,
)

TIMEOUT = 60.0
KEY = RequestKey("r-1", 1)
SIDES = (448, 56)  # the first is large enough for a call of its own


def encode_call(files: list[bytes]) -> EncodeCall:
    items = [
        EncodeItem(
            transfer_id=f"e-{number}",
            num_bytes=len(data),
            width=side,
            height=side,
            num_tokens=FAMILY.geometry(side, side).num_tokens,
            max_pixels=0,
            format="PNG",
        )
        for number, (data, side) in enumerate(zip(files, SIDES, strict=True))
    ]
    return EncodeCall(KEY, tuple(items), bytes(32))


def prefill_call(decoded: Decoded, encoder: Serving) -> PrefillCall:
    token_ids = [1]
    places = []
    for item in decoded.items:
        places.append(ImageItem(item.image_key, len(token_ids), item.num_tokens, item.grid_thw))
        token_ids += [IMAGE_TOKEN] * item.num_tokens + [2]
    request = Request(KEY, tuple(token_ids), len(token_ids), SamplingParams(4), tuple(places))
    sources = tuple(
        Source(
            encoder.client.address,
            encoder.server.state.boot_id,
            f"e-{number}",
            encoder.runner.embed_layout.fingerprint,
        )
        for number in range(len(places))
    )
    return PrefillCall(request, "kv-1", sources)


async def test_prefill_of_the_first_image_starts_before_the_second_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second_may_begin = threading.Event()
    files = [png(size=(side, side)) for side in SIDES]
    async with serving("encoder") as encoder, serving("prefill") as prefill:
        loop, computed, ready = asyncio.get_running_loop(), asyncio.Event(), []
        encode, execute = encoder.runner.encode, prefill.runner.execute

        def encode_in_turn(images: list) -> list:  # type: ignore[type-arg]
            if encoder.runner.batch_sizes:
                assert second_may_begin.wait(TIMEOUT)
            return encode(images)

        def execute_and_tell(inputs: StepInputs) -> StepOutput:
            output = execute(inputs)
            if inputs.image_rows:
                loop.call_soon_threadsafe(computed.set)
            return output

        monkeypatch.setattr(encoder.runner, "encode", encode_in_turn)
        monkeypatch.setattr(prefill.runner, "execute", execute_and_tell)
        async with asyncio.timeout(TIMEOUT):
            replies = encoder.client.encode(encode_call(files), files, timeout=TIMEOUT)
            async with aclosing(replies):
                decoded = (await anext(replies)).event
                assert isinstance(decoded, Decoded)
                prefilling = asyncio.create_task(finish(prefill, prefill_call(decoded, encoder)))
                ready.append((await anext(replies)).event)
                await computed.wait()
                assert encoder.runner.batch_sizes == [1], "the second image is encoded already"
                second_may_begin.set()
                ready.append((await anext(replies)).event)
            assert [(type(event), event.item) for event in ready] == [
                (ItemReady, 0),
                (ItemReady, 1),
            ]
            assert await prefilling
        for worker in (encoder, prefill):
            await worker.client.cancel(KEY)


async def finish(prefill: Serving, call: PrefillCall) -> bool:
    """Follow a prefill to its end; whether its first token came."""
    events = [reply.event async for reply in prefill.client.prefill(call, timeout=TIMEOUT)]
    return any(isinstance(event, FirstToken) for event in events)

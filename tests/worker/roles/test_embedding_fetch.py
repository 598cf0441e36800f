"""The leases of a prompt's images end with the call that holds them, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest
from worker.idle import assert_idle
from worker.server.pairs import IMAGES, TENTH, about, encoding, until
from worker.server.serving import serving

from vlm_worker.errors import IncompatibleError
from vlm_worker.roles.prefill import EmbeddingFetcher
from vlm_worker.wire.messages import PrefillCall

MAX_TURNS = 4


@pytest.mark.parametrize("num_turns", range(MAX_TURNS))
async def test_a_call_that_is_cancelled_twice_releases_its_leases(num_turns: int) -> None:
    """Its caller hangs up and sends a Cancel: both end it, any number of turns apart."""
    async with serving("encoder", TENTH) as encoder, serving("prefill", TENTH) as prefill:
        encoder.runner.gate.clear()
        source, encode = encoding(encoder, IMAGES[0])
        await until(lambda: len(encoder.components.context.attempts.leases))
        call = PrefillCall(about(IMAGES[:1]), "t-1", (source,))
        embeddings = EmbeddingFetcher(prefill.components.context, call)
        fetching = asyncio.create_task(fetch(embeddings))
        await until(lambda: encoder.server._service.live["FetchEmbedding"] == 1)
        assert prefill.components.context.peers.num_held == 1
        fetching.cancel()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        fetching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await fetching
        await until(lambda: prefill.components.context.peers.num_held == 0)
        encoder.runner.gate.set()
        await encode
        await assert_idle(prefill.server)
        await assert_idle(encoder.server)


async def test_a_prompt_with_a_refused_source_holds_no_lease() -> None:
    async with serving("encoder", TENTH) as encoder, serving("prefill", TENTH) as prefill:
        source, encode = encoding(encoder, IMAGES[0])
        await until(lambda: len(encoder.components.context.attempts.leases))
        refused = dataclasses.replace(source, address="224.0.0.1:1", transfer_id="t-2")
        call = PrefillCall(about(IMAGES[:1]), "t-1", (source, refused))
        with pytest.raises(IncompatibleError) as error:  # keeps the frames, and what they refer to
            await fetch(EmbeddingFetcher(prefill.components.context, call))
        assert prefill.components.context.peers.num_held == 0
        assert "224.0.0.1" in str(error.value)
        await encode
        await assert_idle(prefill.server)
        await assert_idle(encoder.server)


async def fetch(embeddings: EmbeddingFetcher) -> None:
    """Hold and fetch an image, as a call does that waits for it."""
    async with embeddings:
        embeddings.need([0])
        await asyncio.Event().wait()

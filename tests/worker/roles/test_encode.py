"""An image that is announced is there for whoever comes for it, however soon."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from worker.idle import assert_idle
from worker.server.pairs import IMAGES, KEY, TENTH, encode
from worker.server.serving import serving

from vlm_worker.wire.messages import Decoded, ItemReady

IMAGE = IMAGES[0]


async def test_what_is_announced_may_be_fetched_before_its_call_goes_on() -> None:
    """The announcement travels while a worker without its share of a core stands still."""
    async with serving("encoder", TENTH) as worker:
        async with aclosing(encode(worker, IMAGE, transfer_id="e-1")) as replies:
            assert isinstance((await anext(replies)).event, Decoded)
            attempts = worker.components.context.attempts
            outgoing = attempts.local("e-1", KEY.request_id, content=IMAGE.image_key)
            fetching = asyncio.create_task(outgoing.whole(IMAGE.num_tokens))
            [ready] = [reply.event async for reply in replies]
            assert isinstance(ready, ItemReady)
            assert (await fetching).nbytes == ready.num_bytes
        await worker.client.cancel(KEY)
        await assert_idle(worker.server)


async def test_a_caller_that_leaves_at_the_announcement_leaves_nothing() -> None:
    async with serving("encoder", TENTH) as worker:
        async with aclosing(encode(worker, IMAGE)) as replies:
            await anext(replies)
            assert worker.components.context.attempts.by_key[KEY].producers
        await assert_idle(worker.server)
        assert not worker.components.context.attempts.by_key

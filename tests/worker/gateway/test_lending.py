"""A gateway before an encoder that lends: text may be answered there, an image never is."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import httpx
from worker.gateway.image_files import ask, png
from worker.gateway.stack import (
    COLOCATED,
    D,
    E,
    P,
    Stack,
    gateway_settings,
    serving,
    stack,
    started,
)

from vlm_worker.types import Role
from vlm_worker.wire.messages import LOAD, Load

ALL = (E, P, D)


@contextlib.asynccontextmanager
async def lending(*, decode: bool) -> AsyncIterator[Stack]:
    """A gateway before one encoder that lends, and a decode worker."""
    async with contextlib.AsyncExitStack() as exits:
        workers = [await exits.enter_async_context(started(Role.ENCODER, ALL, max_lent=2))]
        if decode:
            workers.append(await exits.enter_async_context(started(Role.DECODE, (P, D))))
        settings = gateway_settings(workers, patience_seconds=0.0)
        gateway = await exits.enter_async_context(serving(settings))
        encoder = gateway.context.registry.peers[workers[0].address]
        async with asyncio.timeout(30):
            while encoder.load is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield Stack(workers, gateway)


async def answer(url: str, *contents: object) -> httpx.Response:
    body = {"model": "shapes", "max_tokens": 12, "temperature": 0, "messages": [ask(*contents)]}
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{url}/v1/chat/completions", json=body)


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


async def test_an_answer_of_an_encoder_is_that_of_a_decode_worker() -> None:
    async with stack(*COLOCATED) as own:
        wanted = text_of(await answer(own.url, "what is a circle?"))
    async with lending(decode=False) as lent:
        replies = await asyncio.gather(*(answer(lent.url, "what is a circle?") for _ in range(2)))
        assert [text_of(reply) for reply in replies] == [wanted] * 2
        registry = lent.gateway.context.registry
        assert registry.num_lent_total == 2
        (candidate,) = registry.candidates()
        assert candidate.num_lent == 0, "every loan is returned"
        await lent.until_idle()
        page = lent.gateway.context.meters.exposition(
            num_inflight=0, accepting=True, num_lent=registry.num_lent_total
        )
        assert b"triptych_lent_requests_total 2.0" in page


async def test_an_image_is_never_answered_by_an_encoder() -> None:
    async with lending(decode=False) as lent:
        refused = await answer(lent.url, "what is this?", png())
        assert refused.status_code == 503, refused.text
        assert lent.gateway.context.registry.num_lent_total == 0


async def test_the_decode_pods_answer_while_they_are_idle() -> None:
    async with stack(*COLOCATED) as own:
        wanted = [text_of(await answer(own.url, *what)) for what in (["hi"], ["what?", png()])]
    async with lending(decode=True) as lent:
        found = [text_of(await answer(lent.url, *what)) for what in (["hi"], ["what?", png()])]
        assert found == wanted
        assert lent.gateway.context.registry.num_lent_total == 0
        (encoder,) = (
            c for c in lent.gateway.context.registry.candidates() if c.role is Role.ENCODER
        )
        assert encoder.num_images == 0, "every image is counted off"


async def test_a_worker_that_does_not_lend_reports_the_same_bytes_as_before() -> None:
    load = Load(1, 2, 0.5, 64, 128, True, bytes(16))
    lends = dataclasses.replace(load, max_lent=2, num_lent=1, num_images=3, lent_queued_seconds=0.5)
    wire = LOAD.encode(load).SerializeToString()
    assert {field.number for field, _ in LOAD.encode(load).ListFields()} == set(range(1, 8))
    assert LOAD.encode(lends).SerializeToString().startswith(wire)
    assert LOAD.decode(LOAD.encode(lends)) == lends
    async with started(Role.ENCODER, ALL) as worker:
        reported = worker.components.load(worker.server.state)
        assert (reported.max_lent, reported.num_lent, reported.num_images) == (0, 0, 0)
        assert reported.lent_queued_seconds == 0

"""A request whose delivered tokens end its answer: its pod was lost before it could say so."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing

import pytest
from worker.idle import assert_idle
from worker.server.pairs import TIMEOUT, pair, request_of
from worker.server.serving import Serving, serving

from vlm_worker.types import FinishReason, Request, RequestKey, Source
from vlm_worker.wire.messages import Accepted, DecodeCall, Finished, PrefillCall, ReserveCall

STOP = 90


def complete_request(key: RequestKey) -> Request:
    """Two tokens are delivered, of which the last is a stop token."""
    request = request_of(key=key)
    return dataclasses.replace(
        request,
        token_ids=(*request.token_ids, 91, STOP),
        sampling=dataclasses.replace(request.sampling, stop_token_ids=(STOP,)),
    )


async def decode(worker: Serving, call: DecodeCall) -> list[object]:
    async with aclosing(worker.client.decode(call, timeout=TIMEOUT)) as replies:
        return [reply.event async for reply in replies]


async def prefill(worker: Serving, request: Request, accepted: asyncio.Future[Accepted]) -> None:
    call = PrefillCall(request, f"{request.key.request_id}.kv", ())
    async with aclosing(worker.client.prefill(call, timeout=TIMEOUT)) as replies:
        async for reply in replies:
            if isinstance(reply.event, Accepted):
                accepted.set_result(reply.event)


@pytest.mark.parametrize("is_early", [False, True])
async def test_a_pull_ends_with_the_answer_and_frees_its_blocks(is_early: bool) -> None:
    async with pair() as both:
        request = complete_request(RequestKey("pulled", 1))
        reserve = ReserveCall(request.key, len(request.token_ids) + 1)
        reservation = await both.decode.client.reserve(reserve)
        accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            prefilling = group.create_task(prefill(both.prefill, request, accepted))
            if not is_early:
                await prefilling
            call = DecodeCall(
                request,
                reservation.reservation_id,
                both.source(await accepted),
                reservation.boot_id,
            )
            assert await decode(both.decode, call) == [Finished(FinishReason.STOP, 2)]
        await both.idle()


async def test_the_same_process_ends_the_answer_without_kv() -> None:
    async with serving("decode", "--stages=prefill,decode", "--timer-scale=0.1") as worker:
        request = complete_request(RequestKey("adopted", 1))
        accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        await prefill(worker, request, accepted)
        held = accepted.result()
        kv = Source(worker.client.address, held.boot_id, held.transfer_id, held.layout_fingerprint)
        call = DecodeCall(request, held.transfer_id, kv, held.boot_id)
        assert await decode(worker, call) == [Finished(FinishReason.STOP, 2)]
        await assert_idle(worker.server)

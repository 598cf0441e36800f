"""The call Prefetch over gRPC: it is no call in flight, and a request ends it."""

from __future__ import annotations

import asyncio

import pytest
from worker.server.serving import request_of, serving

from vlm_worker.errors import DrainingError, IncompatibleError
from vlm_worker.types import RequestKey
from vlm_worker.wire.messages import PrefillCall
from vlm_worker.wire.prefetch_messages import PrefetchCall, PrefetchOutcome, PrefetchResult


async def test_a_prefetch_is_computed_once_and_found_by_the_next_prompt() -> None:
    call = PrefetchCall(request_of(40, RequestKey("p", 1)))
    async with serving("prefill") as worker:
        first = await worker.client.prefetch(call, timeout=5)
        assert first.outcome is PrefetchOutcome.COMPUTED
        assert first.num_computed_tokens > 0
        again = await worker.client.prefetch(call, timeout=5)
        assert again == PrefetchResult(PrefetchOutcome.CACHED, first.num_computed_tokens)
        request = request_of(44, RequestKey("r", 1))
        prefill = PrefillCall(request, "t", (), handoff=False)
        replies = [r async for r in worker.client.prefill(prefill, timeout=5)]
        (cached,) = [
            reply.event.num_cached_tokens
            for reply in replies
            if hasattr(reply.event, "num_cached_tokens")
        ]
        assert cached == first.num_computed_tokens
        await worker.until_idle()


async def test_a_prefetch_is_not_in_flight_and_a_request_ends_it() -> None:
    async with serving("prefill") as worker:
        components, runner = worker.components, worker.runner
        runner.gate.clear()
        call = PrefetchCall(request_of(400, RequestKey("p", 1)))
        prefetch = asyncio.create_task(worker.client.prefetch(call, timeout=5))
        while not runner.num_steps:  # noqa: ASYNC110  a runner has no event
            await asyncio.sleep(0.001)
        assert components.load(worker.server.state).num_inflight == 0
        assert components.load(worker.server.state).num_waiting == 0
        prefill = PrefillCall(request_of(44, RequestKey("r", 1)), "t", (), handoff=False)
        replies = asyncio.create_task(_all(worker.client.prefill(prefill, timeout=5)))
        while not components.context.num_inflight:  # noqa: ASYNC110  nor has a count
            await asyncio.sleep(0.001)
        runner.gate.set()
        assert (await prefetch).outcome is PrefetchOutcome.YIELDED
        await replies
        await worker.until_idle()


async def test_a_caller_that_leaves_ends_its_prefetch() -> None:
    async with serving("prefill") as worker:
        runner, state = worker.runner, worker.components.engine._thread.state
        runner.gate.clear()
        call = PrefetchCall(request_of(400, RequestKey("p", 1)))
        prefetch = asyncio.create_task(worker.client.prefetch(call, timeout=5))
        while not runner.num_steps:  # noqa: ASYNC110  a runner has no event
            await asyncio.sleep(0.001)
        prefetch.cancel()
        await asyncio.gather(prefetch, return_exceptions=True)
        while worker.server._service.live["Prefetch"]:  # noqa: ASYNC110  nor has a count
            await asyncio.sleep(0.001)
        runner.gate.set()
        await worker.until_idle()
        other = PrefetchCall(request_of(40, RequestKey("q", 1)))
        assert (await worker.client.prefetch(other, timeout=5)).outcome is not PrefetchOutcome.BUSY
        assert state.sequences.pool.num_used == 0
        assert runner.num_steps == 1, "the second chunk was not computed"


async def test_a_worker_without_prefill_and_a_draining_one_refuse_it() -> None:
    call = PrefetchCall(request_of(40, RequestKey("p", 1)))
    async with serving("encoder") as worker:
        with pytest.raises(IncompatibleError, match="prefill"):
            await worker.client.prefetch(call, timeout=5)
    async with serving("prefill") as worker:
        worker.components.context.accepting = False
        with pytest.raises(DrainingError):
            await worker.client.prefetch(call, timeout=5)


async def _all(replies: object) -> list[object]:
    return [reply async for reply in replies]  # type: ignore[attr-defined]

"""What a gateway in a worker's process is told of a Decode, over gRPC and past it: the same."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest
from worker.server.pairs import KEY, request_of, until
from worker.server.serving import TIMEOUT, Serving, serving

from vlm_worker.client import WorkerClient
from vlm_worker.errors import (
    CancelledError,
    DrainingError,
    EngineError,
    PeerLostError,
    WorkerError,
)
from vlm_worker.server.state import CallOutcome
from vlm_worker.types import FinishReason, Request, RequestKey, Source
from vlm_worker.wire.messages import (
    Accepted,
    DecodeCall,
    DecodeEvent,
    Finished,
    PrefillCall,
    Reply,
    Tokens,
)

WAYS = ("over gRPC", "in process")
STEP_SECONDS = 0.01
LONG = 400
"""Tokens of an answer that does not end by itself in what a test does meanwhile."""


@contextlib.asynccontextmanager
async def colocated(*flags: str) -> AsyncIterator[tuple[Serving, dict[str, WorkerClient]]]:
    """A worker of prefill and decode, and its clients by the way of tokens."""
    async with serving("decode", "--stages=prefill,decode", *flags) as worker:
        worker.runner.faults.step_seconds = STEP_SECONDS
        address, timers = worker.client.address, worker.client.timers
        async with worker.server.connect(address, timers=timers) as local:
            yield worker, dict(zip(WAYS, (worker.client, local), strict=True))


@contextlib.asynccontextmanager
async def prefilled(worker: Serving, request: Request) -> AsyncIterator[DecodeCall]:
    """The call that continues a prompt, which is being computed or was."""
    call = PrefillCall(request, f"{request.key.request_id}.kv", ())
    async with aclosing(worker.client.prefill(call, timeout=TIMEOUT)) as replies:
        accepted = (await anext(replies)).event
        assert isinstance(accepted, Accepted)
        kv = Source(
            worker.client.address,
            accepted.boot_id,
            accepted.transfer_id,
            accepted.layout_fingerprint,
        )
        yield DecodeCall(request, accepted.transfer_id, kv, accepted.boot_id)


async def told(client: WorkerClient, call: DecodeCall) -> list[DecodeEvent]:
    async with aclosing(client.decode(call, timeout=TIMEOUT)) as replies:
        return [reply.event async for reply in replies]


@contextlib.asynccontextmanager
async def answering(
    worker: Serving, client: WorkerClient, number: int = 1
) -> AsyncIterator[AsyncGenerator[Reply[DecodeEvent]]]:
    """The replies of a long answer, after their first."""
    async with (
        prefilled(worker, one(number, max_tokens=LONG)) as call,
        aclosing(client.decode(call, timeout=TIMEOUT)) as replies,
    ):
        await anext(replies)
        yield replies


def one(number: int, *, max_tokens: int = 8) -> Request:
    return request_of(key=RequestKey(f"r-{number}", 1), max_tokens=max_tokens)


async def test_tokens_and_the_last_word_are_those_that_go_over_grpc() -> None:
    async with colocated() as (worker, clients):
        live, outcomes = worker.server._service.live, worker.server.state.outcomes
        said = []
        for number, way in enumerate(WAYS):
            request = one(number)
            sampling = dataclasses.replace(request.sampling, temperature=0.7, num_logprobs=2)
            async with prefilled(worker, dataclasses.replace(request, sampling=sampling)) as call:
                await until(lambda: not live["Prefill"])
                said.append(await told(clients[way], call))
                await until(lambda: not live["Decode"])
                assert outcomes == {CallOutcome.OK: 2 * (number + 1)}
        over_grpc, in_process = said
        assert in_process == over_grpc
        assert in_process[-1] == Finished(FinishReason.LENGTH, 8)
        tokens = [event for event in in_process if isinstance(event, Tokens)]
        assert [token.first_index for token in tokens] == [*range(1, 8)]
        assert all(len(token.logprobs) == 1 for token in tokens)
        await worker.until_idle()


async def test_errors_are_those_that_come_over_grpc() -> None:
    """A process that is another one now, a prompt that is not held, the same attempt once more."""
    async with colocated() as (worker, clients):
        said: dict[str, list[tuple[type[WorkerError], str]]] = {}
        for number, way in enumerate(WAYS):
            request = one(number)
            async with prefilled(worker, request) as call:
                lost = dataclasses.replace(
                    call, request=one(10 + number), boot_id=b"another process!"
                )
                gone = dataclasses.replace(
                    call,
                    request=one(20 + number),
                    kv=dataclasses.replace(call.kv, transfer_id="nobody"),
                )
                await told(clients[way], call)
                for wrong in (lost, gone, call):
                    with pytest.raises(WorkerError) as caught:
                        await told(clients[way], wrong)
                    said.setdefault(way, []).append((caught.type, str(caught.value)))
        assert said["in process"] == said["over gRPC"]
        assert len(set(said["in process"])) == 3
        await worker.until_idle()


@pytest.mark.parametrize("way", WAYS)
async def test_a_step_that_fails_ends_an_answer_with_the_same_error(way: str) -> None:
    async with colocated() as (worker, clients):
        async with answering(worker, clients[way]) as replies:
            worker.runner.faults.crash_steps = 2
            with pytest.raises(EngineError, match="the step was told to crash"):
                _ = [reply async for reply in replies]
        await until(lambda: worker.server.state.outcomes[CallOutcome.ERROR] == 1)
        await worker.until_idle()


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_answer_leaves_nothing(way: str) -> None:
    async with colocated() as (worker, clients):
        for number in range(8):
            async with answering(worker, clients[way], number):
                pass
        await worker.until_idle()
        assert worker.server.state.outcomes[CallOutcome.CANCELLED] >= 8


async def test_an_answer_that_is_cancelled_by_its_key_is_told_so() -> None:
    async with colocated() as (worker, clients):
        client = clients["in process"]
        async with answering(worker, client) as replies:
            await client.cancel(KEY, timeout=TIMEOUT)
            with pytest.raises(CancelledError):
                _ = [reply async for reply in replies]
        await worker.until_idle()


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_that_takes_too_long_is_a_lost_peer(way: str) -> None:
    async with colocated() as (worker, clients):
        async with prefilled(worker, one(1)) as call:
            worker.runner.gate.clear()
            async with aclosing(clients[way].decode(call, timeout=0.2)) as replies:
                with pytest.raises(PeerLostError):
                    _ = [reply async for reply in replies]
            worker.runner.gate.set()
        await worker.until_idle()


@pytest.mark.parametrize("way", WAYS)
async def test_a_client_that_is_closed_loses_its_answers(way: str) -> None:
    async with serving("decode", "--stages=prefill,decode") as worker:
        worker.runner.faults.step_seconds = STEP_SECONDS
        connect = {"over gRPC": WorkerClient, "in process": worker.server.connect}[way]
        client = connect(worker.client.address, timers=worker.client.timers)
        async with answering(worker, client) as replies:
            await client.close()
            with pytest.raises(PeerLostError):
                _ = [reply async for reply in replies]
        await worker.until_idle()


async def test_a_worker_that_is_not_ready_says_so() -> None:
    async with colocated() as (worker, clients), prefilled(worker, one(1)) as call:
        service = worker.server._service
        components, service.components = service.components, None
        with pytest.raises(DrainingError, match="not ready"):
            await told(clients["in process"], call)
        service.components = components

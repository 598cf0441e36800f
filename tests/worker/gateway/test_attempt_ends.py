"""An attempt that ends while a token is delivered: it is sent, or the request fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from worker.gateway.candidates import decode, prefill

from vlm_worker.errors import PeerLostError
from vlm_worker.gateway.discovery import KnownPod
from vlm_worker.gateway.orchestrate.attempt import Attempt
from vlm_worker.gateway.orchestrate.prepared_request import DeliveredTokens, PreparedRequest
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.pod_caches import RequestDigests
from vlm_worker.gateway.pod_registry import PodConnection, Registry
from vlm_worker.gateway.prompts import Prompt
from vlm_worker.route import Choice, Route
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.types import FinishReason, SamplingParams
from vlm_worker.wire.messages import (
    Accepted,
    DecodeCall,
    Finished,
    FirstToken,
    PrefillCall,
    Reply,
    Reservation,
    ReserveCall,
)

PROMPT = Prompt((5, 6, 7))
TURNS_OF_THE_LOOP = 50
FINISHED = Finished(FinishReason.STOP, 1)


class Worker:
    """A prefill and a decode pod. Decode ends its stream with `last` after `decoded` is set."""

    timers = PRODUCTION

    def __init__(self, last: Finished | PeerLostError) -> None:
        self.decoded = asyncio.Event()
        self._last = last

    async def reserve(self, call: ReserveCall) -> Reservation:
        return Reservation("reserved", b"d", lease_seconds=30.0)

    async def prefill(self, call: PrefillCall, *, timeout: float) -> AsyncGenerator[Reply[Any]]:
        yield Reply(Accepted(call.transfer_id, b"p", b"kv", lease_seconds=30.0), (), 0.0)
        yield Reply(FirstToken(0, 100, 0, None), (), 0.0)

    async def decode(self, call: DecodeCall, *, timeout: float) -> AsyncGenerator[Reply[Any]]:
        await self.decoded.wait()
        if isinstance(self._last, PeerLostError):
            raise self._last
        yield Reply(self._last, (), 0.0)

    async def cancel(self, key: Any, *, timeout: float) -> None:
        """Nothing is held here."""

    async def close(self) -> None:
        """Nothing is open."""


class Client:
    """Reads a token once `reads` is set."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.asked, self.reads = asyncio.Event(), asyncio.Event()
        self.got: list[int] = []
        self._failure = failure

    async def emit(self, token_id: int, _: Any) -> bool:
        self.asked.set()
        await self.reads.wait()
        if self._failure is not None:
            raise self._failure
        self.got.append(token_id)
        return True


@contextlib.asynccontextmanager
async def running(worker: Worker, client: Client) -> AsyncGenerator[asyncio.Task[FinishReason]]:
    """An attempt whose first token is being delivered while its decode call ends."""
    registry = Registry(served_name="m")
    pods = prefill(), decode()
    for pod in pods:
        known = KnownPod(pod.name, pod.address)
        registry.peers[pod.name] = PodConnection(known, worker)  # type: ignore[arg-type]
    digests = RequestDigests.of(PROMPT, (), salt=b"", block_size=4)
    attempt = Attempt(
        PreparedRequest("r", (), lambda _: PROMPT, SamplingParams(5), b"", False, 0.0, digests),
        Route(None, *(Choice(pod, "") for pod in pods)),
        number=1,
        delivered=DeliveredTokens(client.emit),
        trace=Trace(received=0.0, clock=lambda: 1.0),
        registry=registry,
        on_admitted=lambda: None,
    )
    task = asyncio.create_task(attempt.run())
    await client.asked.wait()
    worker.decoded.set()
    for _ in range(TURNS_OF_THE_LOOP):
        await asyncio.sleep(0)
    yield task
    await asyncio.gather(task, return_exceptions=True)
    await registry.close()


async def test_a_token_is_sent_that_is_being_delivered_when_the_decode_pod_is_lost() -> None:
    client = Client()
    async with running(Worker(PeerLostError("lost")), client) as task:
        client.reads.set()
        with pytest.raises(PeerLostError):
            await task
    assert client.got == [100]


async def test_a_token_is_sent_that_is_being_delivered_when_the_answer_ends() -> None:
    client = Client()
    async with running(Worker(FINISHED), client) as task:
        client.reads.set()
        assert await task is FinishReason.STOP
    assert client.got == [100]


@pytest.mark.parametrize("last", [FINISHED, PeerLostError("lost")])
async def test_a_token_that_cannot_be_sent_fails_the_request(
    last: Finished | PeerLostError,
) -> None:
    client = Client(failure=ConnectionError("the client is gone"))
    async with running(Worker(last), client) as task:
        client.reads.set()
        with pytest.raises(ConnectionError):
            await task


async def test_a_request_that_is_cancelled_does_not_wait_for_its_client() -> None:
    client = Client()
    async with running(Worker(PeerLostError("lost")), client) as task:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert client.got == []

"""Pods that die, drain or are full: the answer goes on identically, or ends in one error."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from worker.gateway.image_files import ask, broken_inside, png
from worker.gateway.stack import NOBODY, D, E, P, Stack, Worker, stack

from vlm_worker.client import WorkerClient
from vlm_worker.errors import OverloadedError
from vlm_worker.gateway.discovery import KnownPod
from vlm_worker.gateway.pod_registry import Registry
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.types import RequestKey, Role

TWO_EACH = (
    (Role.ENCODER, (E,)),
    (Role.ENCODER, (E,)),
    (Role.PREFILL, (P,)),
    (Role.PREFILL, (P,)),
    (Role.DECODE, (D,)),
    (Role.DECODE, (D,)),
)
NUM_TOKENS = 60


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": "shapes",
        "messages": [ask(png(), "What is this?")],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "stream": True,
        **changes,
    }


def client(served: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60
    )


async def answer(
    served: Stack, *, after: int = -1, act: Callable[[], Awaitable[None]] | None = None
) -> str:
    """A streamed answer; `act` happens when so many chunks with text have come."""
    text, seen = "", 0
    async with client(served) as api:
        async for chunk in await api.chat.completions.create(**body()):
            text += chunk.choices[0].delta.content or ""
            seen += 1
            if seen == after and act is not None:
                await act()
    return text


def slow(served: Stack) -> None:
    """Let a decode step take so long that a fault falls between two tokens."""
    for worker in served.of(Role.DECODE):
        worker.runner.faults.step_seconds = 0.01


def busy(served: Stack, role: Role) -> Worker:
    """The worker of a role that serves the one request there is."""
    found = [worker for worker in served.of(role) if worker.alive and worker.num_held]
    assert len(found) == 1
    return found[0]


@pytest.fixture
async def served() -> AsyncIterator[Stack]:
    async with stack(*TWO_EACH) as one:
        yield one


@pytest.mark.parametrize("after", [1, 2, 17])
async def test_an_answer_continues_identically_if_its_decode_pod_is_lost(
    served: Stack, after: int
) -> None:
    expected = await answer(served)
    slow(served)
    victim: list[Worker] = []

    async def kill() -> None:
        victim.append(busy(served, Role.DECODE))
        await victim[0].kill()

    assert await answer(served, after=after, act=kill) == expected
    assert len(victim) == 1
    assert not victim[0].alive
    await served.until_idle()


async def test_an_answer_goes_on_identically_when_its_decode_pod_drains(served: Stack) -> None:
    expected = await answer(served)
    slow(served)

    async def drain() -> None:
        worker = busy(served, Role.DECODE)
        worker.components.context.accepting = False
        assert await worker.components.engine.drain() == 1

    assert await answer(served, after=5, act=drain) == expected
    await served.until_idle()


async def test_requests_of_one_moment_spread_over_the_decode_pods(served: Stack) -> None:
    slow(served)
    pods = served.of(Role.DECODE)
    asking = [asyncio.create_task(answer(served)) for _ in range(8)]
    async with asyncio.timeout(60):
        while sum(pod.components.engine.stats().inflight for pod in pods) < 8:
            assert not any(task.done() for task in asking)
            await asyncio.sleep(0.005)
    assert [pod.components.engine.stats().inflight for pod in pods] == [4, 4]
    assert len(set(await asyncio.gather(*asking))) == 1
    await served.until_idle()


async def test_a_pod_that_becomes_ready_is_asked_at_once(served: Stack) -> None:
    patient = dataclasses.replace(PRODUCTION, retry=60.0, max_retry=60.0)
    registry = Registry(served_name="shapes", timers=patient)
    [address] = [worker.address for worker in served.of(Role.DECODE)[:1]]
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(registry.close)
        registry.apply([KnownPod(name="late", address=NOBODY, ready=False)])
        peer = registry.peers["late"]
        async with asyncio.timeout(60):
            while not peer.unusable_reason:  # noqa: ASYNC110  it has no event
                await asyncio.sleep(0.005)
        peer.client = WorkerClient(address)  # the same pod, at last listening
        registry.apply([KnownPod(name="late", address=NOBODY, ready=True)])
        assert await registry.waiters.wait_until(lambda: bool(registry.candidates()), timeout=10)


@pytest.mark.parametrize("role", [Role.ENCODER, Role.PREFILL])
async def test_a_request_moves_if_a_pod_is_lost_before_the_first_token(role: Role) -> None:
    stage = {Role.ENCODER: "encode", Role.PREFILL: "prefill"}[role]
    async with stack(*TWO_EACH, worker_delays={stage: 0.5}) as served:
        expected = await answer(served)
        asking = asyncio.create_task(answer(served))
        async with asyncio.timeout(60):
            while not any(worker.num_held for worker in served.of(role)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await busy(served, role).kill()
        assert await asking == expected
        await served.until_idle()


async def test_one_well_formed_error_ends_a_stream_that_no_pod_can_continue() -> None:
    events: list[bytes] = []
    async with (
        stack(*TWO_EACH, patience_seconds=0.5) as served,
        httpx.AsyncClient(base_url=served.url, timeout=60) as http,
        http.stream("POST", "/v1/chat/completions", json=body()) as response,
    ):
        slow(served)
        async for line in response.aiter_lines():
            if line:
                events.append(line.encode())
            if len(events) == 5 and all(w.alive for w in served.of(Role.DECODE)):
                await asyncio.gather(*(worker.kill() for worker in served.of(Role.DECODE)))
        await served.until_idle()
    assert response.status_code == 200
    error = json.loads(events[-1].removeprefix(b"data: "))["error"]
    assert error["type"] == "server_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert sum(b'"error"' in line for line in events) == 1


async def test_without_room_on_one_decode_pod_another_is_asked(served: Stack) -> None:
    expected = await answer(served)
    full = served.of(Role.DECODE)[0]
    await fill(full)
    assert await answer(served) == expected


async def test_without_room_anywhere_a_request_waits_until_there_is(served: Stack) -> None:
    expected = await answer(served)
    held = [await fill(worker) for worker in served.of(Role.DECODE)]
    asking = asyncio.create_task(answer(served))
    registry = served.gateway.context.registry
    async with asyncio.timeout(10):
        while not registry.held_for:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not asking.done()
    encoders = served.of(Role.ENCODER)
    assert not any(worker.num_held for worker in encoders), "it holds nothing on an encoder"
    for key in held[0]:
        await served.of(Role.DECODE)[0].components.engine.release(key)
    assert await asking == expected


async def test_a_request_that_may_not_wait_gets_a_retry_time(tmp_path: Any) -> None:
    config = tmp_path / "gateway.json"
    config.write_text('{"admission": {"max_queue_seconds": 0.1, "on_exceeded": "Reject"}}')
    async with stack((Role.PREFILL, (P,)), (Role.DECODE, (D,)), config=config) as served:
        await fill(served.of(Role.DECODE)[0])
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
            messages = [{"role": "user", "content": "hi"}]
            refused = await http.post("/v1/chat/completions", json=body(messages=messages))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"


async def fill(worker: Worker) -> list[RequestKey]:
    """Reserve all free KV blocks, so that not even a short prompt fits."""
    keys: list[RequestKey] = []
    size = 4000
    while size > 4:
        key = RequestKey("filler", len(keys) + 1)
        try:
            await worker.components.engine.reserve(key, size)
            keys.append(key)
        except OverloadedError:
            size //= 2
    assert keys
    return keys


async def test_an_image_that_only_the_decoder_finds_broken_is_named(served: Stack) -> None:
    async with client(served) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.chat.completions.create(
                **body(messages=[ask("look:", png(), broken_inside(png()))], stream=False)
            )
    assert refused.value.param == "messages[0].content[2].image_url"
    await served.until_idle()


async def test_a_broken_image_is_left_out_where_the_service_says_so(tmp_path: Any) -> None:
    config = tmp_path / "gateway.json"
    config.write_text('{"limits": {"on_corrupt": "Skip"}}')
    async with stack((Role.DECODE, (E, P, D)), config=config) as served, client(served) as api:
        answers = [
            await api.chat.completions.create(**body(messages=[ask(*components)], stream=False))
            for components in (
                ("look:", png(), broken_inside(png())),
                ("look:", png(), png()[:30]),
                ("look:", png()),
            )
        ]
        await served.until_idle()
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert {answer.usage.prompt_tokens_details.image_tokens for answer in answers} == {12}

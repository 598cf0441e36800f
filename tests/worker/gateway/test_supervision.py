"""Health says when a task of the gateway fails again and again; a lost worker is followed anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx
from worker.gateway.stack import D, E, P, gateway_settings, serving, started

from vlm_worker.client import WorkerClient
from vlm_worker.supervision import MAX_FAILURES, STEADY_SECONDS, AtEnd, Supervisor
from vlm_worker.types import Role
from vlm_worker.wire.messages import Load


async def fails() -> None:
    raise KeyError("a defect")


class Time:
    """Passes by sleeping alone; stands still once a task has failed too often."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_slept = 0
        self.hopeless = asyncio.Event()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.num_slept += 1
        if self.num_slept == MAX_FAILURES:
            self.hopeless.set()
            await asyncio.get_running_loop().create_future()


async def test_health_tells_of_a_task_that_fails_again_and_again() -> None:
    time = Time()
    async with serving(gateway_settings([])) as gateway, httpx.AsyncClient() as client:
        usual = gateway.context.tasks
        gateway.context.tasks = Supervisor(clock=time, sleep=time.sleep)
        assert (await client.get(f"{gateway.url}/healthz")).status_code == 200
        gateway.context.tasks.start(fails, name="watch", at_end=AtEnd.RESTART)
        async with asyncio.timeout(30):
            await time.hopeless.wait()
        answer = await client.get(f"{gateway.url}/healthz")
        assert (answer.status_code, "watch" in answer.text) == (503, True)
        time.now += STEADY_SECONDS
        assert (await client.get(f"{gateway.url}/healthz")).status_code == 200
        await gateway.context.tasks.close()
        gateway.context.tasks = usual


class Defective(WorkerClient):
    """Fails once while it follows the load, with what no worker says."""

    num_followed = 0

    async def watch_load(self) -> AsyncGenerator[Load]:
        self.num_followed += 1
        if self.num_followed == 1:
            raise KeyError("a defect")
        async with aclosing(super().watch_load()) as loads:
            async for load in loads:
                yield load


async def test_a_defect_in_following_a_worker_does_not_lose_it_for_ever() -> None:
    async with (
        started(Role.DECODE, (E, P, D)) as worker,
        serving(gateway_settings([worker]), Defective) as gateway,
    ):
        (peer,) = gateway.context.registry.peers.values()
        assert isinstance(peer.client, Defective)
        async with asyncio.timeout(30):
            while peer.load is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert peer.client.num_followed == 2

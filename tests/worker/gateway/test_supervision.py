"""Tasks that never end are started again when they do; health says when that is no help."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.stack import D, E, P, gateway_settings, serving, started

from vlm_worker.client import WorkerClient
from vlm_worker.gateway.supervision import (
    MAX_DELAY_SECONDS,
    MAX_FAILURES,
    STEADY_SECONDS,
    Failures,
    Supervisor,
)
from vlm_worker.types import Role
from vlm_worker.wire.calls import Load


@given(st.lists(st.floats(0, 200), min_size=1, max_size=30))
def test_delays_grow_in_a_row_and_a_steady_run_ends_the_row(runs: list[float]) -> None:
    failures, in_a_row = Failures(), 0
    for seconds in runs:
        before = failures
        failures = failures.after(seconds)
        in_a_row = 1 if seconds >= STEADY_SECONDS else in_a_row + 1
        assert failures.too_many == (in_a_row >= MAX_FAILURES)
        assert 0 < failures.delay_seconds <= MAX_DELAY_SECONDS
        if in_a_row > 1:
            assert failures.delay_seconds >= before.delay_seconds


@dataclasses.dataclass
class Failing:
    """A task that fails, or ends, some times; then it runs."""

    times: int
    ends: bool = False
    num_runs: int = 0
    running: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def __call__(self) -> None:
        self.num_runs += 1
        if self.num_runs <= self.times:
            if self.ends:
                return
            raise KeyError("a defect")
        self.running.set()
        await asyncio.get_running_loop().create_future()


class Time:
    """Passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_task_that_ends_is_logged_and_started_again(
    ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    time, task = Time(), Failing(3, ends)
    supervisor = Supervisor(time, time.sleep)
    supervisor.start("watch", task)
    async with asyncio.timeout(30):
        await task.running.wait()
    assert [record.task for record in caplog.records] == ["watch"] * 3  # type: ignore[attr-defined]
    assert all(record.levelno == logging.ERROR for record in caplog.records)
    assert supervisor.unhealthy_because is None
    await supervisor.close()


async def test_health_tells_of_a_task_that_fails_again_and_again() -> None:
    time, task = Time(), Failing(MAX_FAILURES)
    async with serving(gateway_settings([])) as gateway, httpx.AsyncClient() as client:
        usual, gateway.service.tasks = gateway.service.tasks, Supervisor(time, time.sleep)
        assert (await client.get(f"{gateway.url}/healthz")).status_code == 200
        gateway.service.tasks.start("watch", task)
        async with asyncio.timeout(30):
            await task.running.wait()
        answer = await client.get(f"{gateway.url}/healthz")
        assert (answer.status_code, "watch" in answer.text) == (503, True)
        time.now += STEADY_SECONDS
        assert (await client.get(f"{gateway.url}/healthz")).status_code == 200
        await gateway.service.tasks.close()
        gateway.service.tasks = usual


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
        (peer,) = gateway.service.registry.by_name.values()
        assert isinstance(peer.client, Defective)
        async with asyncio.timeout(30):
            while peer.load is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert peer.client.num_followed == 2

"""How long a request waits for a pod after its pool has lost the last one; no real time passes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest

from vlm_worker.gateway.orchestrate.generation import NoRouteError, RetryPolicy, Routing
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.pod_caches import RequestDigests
from vlm_worker.gateway.pod_registry import Registry
from vlm_worker.gateway.prompts import Prompt
from vlm_worker.route import Candidate, Choice, NoRoute, Route
from vlm_worker.settings import GatewaySettings, ServeSettings, parse
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.types import Role, SamplingParams, Stage

RESTART_SECONDS = 12.0
"""From SIGKILL of the only decode or prefill pod until it is found again: 11 and 12 s, measured on
the local cluster with two busy cores and a model of a few MB."""
NONE = NoRoute(Stage.DECODE, "no decode pod")
POD = Candidate(
    "p", "127.0.0.1:1", Role.DECODE, frozenset(Stage), b"b", b"k", b"e", 4096, 4096
)  # fmt: skip


def default_patience() -> float:
    settings = parse(["gateway", "--model=m", "--served-name=m", "--worker=127.0.0.1:1"], {})
    assert isinstance(settings, GatewaySettings)
    served = parse(["serve", "m"], {})
    assert isinstance(served, ServeSettings)
    assert served.gateway.patience_seconds == settings.patience_seconds
    return settings.patience_seconds


class Request:
    """One request of a gateway whose decode pool was lost at 0 s and is back at `back` seconds.

    Each heartbeat lets a second pass.
    """

    def __init__(self, *, patience: float, comes: float = 0.0, back: float | None) -> None:
        self.now = comes
        self._back = back
        timers = PRODUCTION.scaled(0.001)
        self._registry = Registry(served_name="m", timers=timers, clock=lambda: self.now)
        self._registry._lost_at[Stage.DECODE] = 0.0
        prompt = Prompt((1,))
        digests = RequestDigests.of(prompt, (), salt=b"", block_size=4)
        prepared = PreparedRequest(
            "r", (), lambda _: prompt, SamplingParams(5), b"", False, 0.0, digests
        )
        self._routing = Routing(
            prepared,
            trace=Trace(received=comes, clock=lambda: self.now),
            registry=self._registry,
            retry_policy=RetryPolicy(
                patience_seconds=patience, max_waiting=8, clock=lambda: self.now
            ),
            heartbeat=self._heartbeat,
        )

    async def _heartbeat(self) -> None:
        self.now += 1.0

    def _choose(self) -> Route | NoRoute:
        if self._back is None or self.now < self._back:
            return NONE
        choice = Choice(POD, "")
        return Route(None, choice, choice)

    async def end(self) -> tuple[bool, float]:
        """Whether it is served, and when it knows."""
        try:
            await self._routing.find(self._choose)
        except NoRouteError:
            return False, self.now
        return True, self.now


async def test_the_default_outlasts_the_restart_of_the_only_pod() -> None:
    """With a delay of the gateway's next Hello, and a second of doubt."""
    back = RESTART_SECONDS + PRODUCTION.max_retry + 1.0
    assert await Request(patience=default_patience(), back=back).end() == (True, back)


@pytest.mark.parametrize("comes", [0.0, 5.0, 19.0])
async def test_all_requests_learn_at_the_same_time_that_the_pool_stays_empty(comes: float) -> None:
    patience = default_patience()
    assert await Request(patience=patience, comes=comes, back=None).end() == (False, patience)


async def test_a_request_after_the_deadline_does_not_wait() -> None:
    patience = default_patience()
    late = patience + 1.0
    assert await Request(patience=patience, comes=late, back=None).end() == (False, late)


@pytest.mark.parametrize("wake", [0.0, 60.0])
async def test_an_older_request_is_first_after_its_heartbeat(wake: float) -> None:
    """The heartbeat of the older one comes when the younger one waits already."""

    def clock() -> float:
        return 0.0

    registry = Registry(served_name="m", timers=PRODUCTION.scaled(0.001), clock=clock)
    registry._lost_at[Stage.DECODE] = 0.0
    choice, served, has_beaten = Choice(POD, ""), list[str](), asyncio.Event()
    route: Route | NoRoute = NONE

    async def request(name: str, heartbeat: Callable[[], Awaitable[None]]) -> None:
        prompt = Prompt((1,))
        digests = RequestDigests.of(prompt, (), salt=b"", block_size=4)
        prepared = PreparedRequest(
            name, (), lambda _: prompt, SamplingParams(5), b"", False, 0.0, digests,
            wake_timeout_seconds=wake,
        )  # fmt: skip
        routing = Routing(
            prepared,
            trace=Trace(received=0.0, clock=clock),
            registry=registry,
            retry_policy=RetryPolicy(patience_seconds=60, max_waiting=8, clock=clock),
            heartbeat=heartbeat,
        )
        await routing.find(lambda: route)
        served.append(name)

    async def younger_comes() -> None:
        registry.timers = dataclasses.replace(registry.timers, heartbeat=60.0)
        tasks.append(asyncio.create_task(request("younger", younger_comes)))
        for _ in range(5):
            await asyncio.sleep(0)
        has_beaten.set()

    tasks = [asyncio.create_task(request("older", younger_comes))]
    async with asyncio.timeout(30):
        await has_beaten.wait()
        [queue] = registry.waiters._groups.values()
        assert len(queue) == 2
        route = Route(None, choice, choice)
        registry.waiters.notify()
        await asyncio.gather(*tasks)
    assert served == ["older", "younger"]

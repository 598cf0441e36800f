"""A whole service goes to zero, and its next request is answered by pods that start for it.

idle ─▶ no worker pod, Ready=ScaledToZero ─▶ requests are held ─▶ pods start ─▶ true answers
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from served import ANSWER, Served, condition, elapsed, example, in_url, place, stats_of

from vlm_local.client import Object
from vlm_local.controlplane import ControlPlane
from vlm_local.demo.line import MODEL
from vlm_local.waiting import until
from vlm_operator import names
from vlm_operator.names import POOL_ROLES, Role

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(900)]
NAME = "shapes"
NAMESPACE = "zero"
IDLE_SECONDS = 10
SLEEPS_SECONDS = 120.0
CLIENTS = 4


def manifest() -> Object:
    """The quickstart with three pools of mode Auto that may sleep."""
    found = example("quickstart")
    spec = found["spec"]
    spec["slo"] = {"ttftP95Milliseconds": 4000, "windowSeconds": 10}
    spec["autoscaling"] = {"intervalSeconds": 1}
    spec["scaleToZero"] = {"idleSeconds": IDLE_SECONDS, "wakeTimeoutSeconds": 300}
    for pool in spec["pools"].values():
        pool["scaling"] = {"mode": "Auto", "minReplicas": 1, "maxReplicas": 2}
    return found


@pytest.fixture
async def served(operator: ControlPlane) -> AsyncIterator[Served]:
    with place(operator, NAMESPACE, MODEL):
        async with operator.client() as api:
            one = Served(operator, api, NAMESPACE, NAME)
            await one.apply(manifest())
            await one.ready()
            yield one


async def workers(served: Served) -> list[Object]:
    pods = await served.pods(leaving=True)
    return [pod for pod in pods if pod["metadata"]["labels"][names.LABEL_ROLE] != Role.GATEWAY]


async def until_asleep(served: Served) -> None:
    async def asleep() -> bool:
        return not await workers(served)

    await until(asleep, seconds=SLEEPS_SECONDS, awaited="all worker pods to be gone", every=0.2)
    ready = condition(await served.service(), "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "ScaledToZero")


async def test_an_idle_service_goes_to_zero_and_the_next_requests_bring_it_back(served: Served):
    assert await served.ask() == ANSWER
    began = time.monotonic()
    await until_asleep(served)
    print(f"asleep {elapsed(began)} after the last answer, idleSeconds {IDLE_SECONDS}")
    [gateway] = await served.pods()
    assert condition(gateway, "Ready")["status"] == "True"
    columns = (await served.kubectl("get", "vlm", NAME)).splitlines()[-1].split()
    assert columns[:2] == [NAME, "True"]
    assert columns.count("0/0") == len(POOL_ROLES)
    await models_answer(gateway)
    for wave in ("first", "second"):
        await wakes(served, wave)
        await until_asleep(served)


async def models_answer(gateway: Object) -> None:
    url = f"http://{in_url(gateway['status']['podIP'])}:{names.PORT_GATEWAY}"
    async with httpx.AsyncClient() as client:
        models = await client.get(f"{url}/v1/models")
        ready = await client.get(f"{url}/readyz")
    assert models.json()["data"][0]["id"] == NAME
    assert (ready.status_code, ready.text.startswith("ok, but no ready pod for")) == (200, True)


async def wakes(served: Served, wave: str) -> None:
    """Requests at a service at zero: all are held, one start answers all of them."""
    began = time.monotonic()
    held = [asyncio.create_task(served.ask()) for _ in range(CLIENTS)]

    async def waking() -> bool:
        return condition(await served.service(), "Ready")["reason"] == "Waking"

    await until(waking, seconds=30, awaited="the service to wake", every=0.05)
    seen = elapsed(began)
    told = (await served.service())["status"]["pools"]
    assert {pool["lastDecision"]["reason"] for pool in told.values()} == {"WokenByRequest"}
    assert await asyncio.gather(*held) == [ANSWER] * CLIENTS
    print(f"{wave} wake-up: seen after {seen}, {CLIENTS} requests answered after {elapsed(began)}")
    began = time.monotonic()
    assert await served.ask() == ANSWER
    print(f"a request of the awake service: {elapsed(began)}")
    [gateway] = await served.pods(Role.GATEWAY)
    assert (await stats_of(gateway))["wake"]["waiting_requests"] == 0
    await served.ready()

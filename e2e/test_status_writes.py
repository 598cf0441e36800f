"""How often a real API server is asked to write a status while requests are answered."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
from served import ANSWER, Served, example, place

from vlm_local.client import Client, Object
from vlm_local.controlplane import ControlPlane
from vlm_local.demo.line import MODEL
from vlm_operator import names
from vlm_operator.status.build import MEASURED_SECONDS, meaning

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700)]
NAMESPACE = "status-writes"


@pytest.mark.parametrize("seconds", [45, pytest.param(300, marks=pytest.mark.full)])
async def test_traffic_writes_a_status_for_each_change_of_meaning_and_once_in_30_seconds(
    operator: ControlPlane, seconds: int
):
    with place(operator, NAMESPACE, MODEL):
        async with operator.client() as api:
            manifest = example("quickstart")
            served = Served(operator, api, NAMESPACE, manifest["metadata"]["name"])
            await served.apply(manifest)
            await served.ready()
            statuses: list[Object] = []
            watching = asyncio.create_task(_watch(api, served, statuses))
            try:
                num_before = _status_writes(operator)
                num_answers = await _ask(served, seconds=seconds)
                num_writes = _status_writes(operator) - num_before
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
    pairs = itertools.pairwise(statuses)
    changed = sum(meaning(before) != meaning(after) for before, after in pairs)
    print(f"{num_answers} answers, {num_writes} writes, {changed} changes of meaning")
    assert num_answers >= seconds / 5
    assert statuses[0] != statuses[-1], "the measured figures did not move: nothing was shown"
    assert num_writes <= changed + seconds / MEASURED_SECONDS + 1


async def _ask(served: Served, *, seconds: float) -> int:
    """Ask one question after the other for so long; returns how many were answered."""
    loop, answered = asyncio.get_running_loop(), 0
    until = loop.time() + seconds
    while loop.time() < until:
        assert await served.ask() == ANSWER
        answered += 1
    return answered


async def _watch(api: Client, served: Served, statuses: list[Object]) -> None:
    """Note every status that the service gets."""
    group = f"/apis/{names.API_VERSION}"
    async for thing in _services(api, served.path(names.PLURAL_SERVICE, group=group)):
        if not statuses or thing["status"] != statuses[-1]:
            statuses.append(thing["status"])


async def _services(api: Client, path: str) -> AsyncIterator[Object]:
    async for event, thing in api.watch(path):
        for item in thing["items"] if event == "SYNC" else [thing]:
            yield item


def _status_writes(cluster: ControlPlane) -> int:
    """Writes of this service's status in the API server's audit log."""
    count = 0
    for entry in cluster.audited()[0]:
        about = entry.get("objectRef", {})
        count += (
            entry["verb"] in ("patch", "update")
            and about.get("resource") == names.PLURAL_SERVICE
            and about.get("subresource") == "status"
            and about.get("namespace") == NAMESPACE
        )
    return count

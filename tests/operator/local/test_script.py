"""A scripted pod writes its status and ends, even if the API server fails for a moment."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

from vlm_local.agent.script import ScriptedPod
from vlm_local.client import ApiError, Client, Object
from vlm_local.waiting import until

POD: Object = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u"},
    "spec": {"containers": [{"name": "main", "image": "any"}]},
}


class Away:
    """An API server that cannot be reached at the first request of each kind."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.status: Mapping[str, Any] = {}

    async def patch(self, _: str, body: Object, *, kind: str) -> None:
        self._ask(kind)
        self.status = body["status"]

    async def delete(self, _: str, __: Object) -> None:
        self._ask("delete")

    def _ask(self, kind: str) -> None:
        self.asked.append(kind)
        if self.asked.count(kind) == 1:
            raise ApiError(0, "Unreachable", "away")


async def test_a_status_and_a_deletion_that_were_lost_are_asked_for_again():
    api = Away()
    played = ScriptedPod(POD, client=cast("Client", api), pod_ip="127.1.1.1", host_ip="127.1.0.1")
    playing = asyncio.create_task(played.run())

    async def running() -> bool:
        return api.status.get("phase") == "Running"

    await until(running, seconds=5, awaited="the status to be written")
    played.update(
        {**POD, "metadata": {**POD["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    )
    await playing
    assert api.asked.count("delete") == 2

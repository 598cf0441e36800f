"""A pod whose beginning meets a defect says so and goes on asking."""

import asyncio
from pathlib import Path
from typing import Any, cast

import aiohttp

from vlm_operator.local.agent.cgroups import Cgroups
from vlm_operator.local.agent.command import Facts
from vlm_operator.local.agent.container import Backoff
from vlm_operator.local.agent.events import Recorder
from vlm_operator.local.agent.pod import Pod
from vlm_operator.local.client import Client, Object
from vlm_operator.local.waiting import until

POD: Object = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u"},
    "spec": {
        "containers": [{"name": "main", "image": "any"}],
        "volumes": [{"name": "v", "projected": {"sources": [{"unheardOf": {}}]}}],
    },
}


class Api:
    """Takes every status and every event."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def patch(self, *_: Any, **__: Any) -> None:
        pass

    async def record(self, _: Object, reason: str, message: str, *, warning: bool) -> None:
        self.events.append(f"{reason} {message} {warning}")


async def test_a_volume_that_nobody_foresaw_is_told_while_the_pod_waits(tmp_path: Path):
    api = Api()
    pod = Pod(
        POD,
        Facts("127.1.1.1", "127.1.0.1", "node"),
        client=cast("Client", api),
        recorder=cast("Recorder", api),
        http=cast("aiohttp.ClientSession", None),
        images={},
        base_environment={},
        cgroups=Cgroups(tmp_path),
        backoff=Backoff(),
        folder=tmp_path / "u",
    )
    living = asyncio.create_task(pod.run())

    async def told() -> bool:
        return any("FailedMount" in event for event in api.events)

    await until(told, seconds=10, awaited="the failed mount to be told")
    assert not living.done()
    pod.gone()
    await living

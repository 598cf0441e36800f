"""A pod that cannot start reports the reason and retries."""

import asyncio
from pathlib import Path
from typing import Any, cast

import aiohttp

from vlm_local.agent.cgroups import Cgroups
from vlm_local.agent.command import Facts
from vlm_local.agent.container import Backoff
from vlm_local.agent.events import Recorder
from vlm_local.agent.pod import Pod
from vlm_local.agent.runs import Machine
from vlm_local.client import Client, Object
from vlm_local.waiting import until

POD: Object = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u"},
    "spec": {
        "containers": [{"name": "main", "image": "any"}],
        "volumes": [{"name": "v", "projected": {"sources": [{"unheardOf": {}}]}}],
    },
}


class Api:
    """Keeps the pod's status, as an API server merges it, and every event."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.status: Object = {}

    async def patch(self, _: str, body: Object, **__: Any) -> Object:
        self.merge(body["status"])
        return self.pod

    def merge(self, status: Object) -> None:
        """A strategic merge: a condition replaces the one of its type."""
        kept = {one["type"]: one for one in self.status.get("conditions", [])}
        given = {one["type"]: one for one in status.get("conditions", [])}
        self.status = {**self.status, **status, "conditions": [*{**kept, **given}.values()]}

    @property
    def pod(self) -> Object:
        return {**POD, "status": self.status}

    def holds(self, kind: str) -> str | None:
        """The verdict of one condition."""
        found = {one["type"]: one["status"] for one in self.status.get("conditions", [])}
        return found.get(kind)

    async def is_initialized(self) -> bool:
        return self.holds("Initialized") == "True"

    async def record(self, _: Object, reason: str, message: str, *, warning: bool) -> None:
        self.events.append(f"{reason} {message} {warning}")


def made(api: Api, folder: Path) -> Pod:
    return Pod(
        POD,
        Facts("127.1.1.1", "127.1.0.1", "node"),
        Machine(
            images={},
            environment={},
            backoff=Backoff(),
            folder=folder,
            cgroups=Cgroups(folder),
            identities=True,
            http=cast("aiohttp.ClientSession", None),
        ),
        client=cast("Client", api),
        recorder=cast("Recorder", api),
    )


async def test_what_another_writes_over_a_nodes_verdict_is_written_back(tmp_path: Path):
    api = Api()
    pod = made(api, tmp_path)
    living = asyncio.create_task(pod.run())

    await until(api.is_initialized, seconds=30, awaited="the first status")
    api.merge({"conditions": [{"type": "Initialized", "status": "False"}]})
    assert api.holds("Initialized") == "False"
    pod.update(api.pod)
    await until(api.is_initialized, seconds=30, awaited="the status to be written back")
    pod.gone()
    await living


async def test_the_status_is_written_after_an_unexpected_error(tmp_path: Path):
    class Broken(Api):
        num_failures = 0

        async def patch(self, path: str, body: Object, **more: Any) -> Object:
            if not self.num_failures:
                self.num_failures += 1
                raise RuntimeError("unexpected")
            return await super().patch(path, body, **more)

    api = Broken()
    pod = made(api, tmp_path)
    living = asyncio.create_task(pod.run())

    await until(api.is_initialized, seconds=30, awaited="the first status")
    assert api.num_failures == 1
    pod.gone()
    await living


async def test_an_unexpected_volume_error_is_reported_while_the_pod_waits(tmp_path: Path):
    api = Api()
    pod = made(api, tmp_path)
    living = asyncio.create_task(pod.run())

    async def told() -> bool:
        return any("FailedMount" in event for event in api.events)

    await until(told, seconds=10, awaited="the failed mount to be told")
    assert not living.done()
    # as with kubelet: the operator knows by the missing address that volumes are not mounted
    assert pod.facts.pod_ip
    assert "podIP" not in api.pod["status"]
    pod.gone()
    await living

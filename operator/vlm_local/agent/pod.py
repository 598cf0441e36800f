"""One pod from its binding to its end: volumes, init containers, containers, status, removal.

bound ─▶ volumes ─▶ init containers, one by one ─▶ containers, together ─▶ done
  │                 └ a sidecar: until it has started; it ends after the containers
  └ deletionTimestamp: preStop, SIGTERM, grace, SIGKILL ─▶ last status ─▶ object deleted
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlm_local.client import STRATEGIC, ApiError, Client, Object

from . import command, probes, status
from .container import Container
from .events import Recorder
from .process import Process
from .runs import Machine, RunMaker
from .volumes import VolumeError, Volumes

logger = logging.getLogger(__name__)
RETRY_SECONDS = 0.2
LONGEST_RETRY_SECONDS = 5.0
HOOK_SECONDS = 2.5  # more than `container.AFTER_HOOK_SECONDS`


class Pod:
    """One pod on one node, from its binding. `update` passes each new state of its object."""

    def __init__(
        self,
        pod: Object,
        facts: command.Facts,
        machine: Machine,
        *,
        client: Client,
        recorder: Recorder,
    ) -> None:
        self.pod = pod
        self.facts = facts
        self._client = client
        self._recorder = recorder
        self._machine = machine
        self._folder = machine.folder / pod["metadata"]["uid"]
        self._volumes = Volumes(pod, facts, client, self._folder / "volumes")
        self._runs = RunMaker(facts, self._volumes, machine, self._folder)
        self._started_at = time.time()
        self._dirty = asyncio.Event()
        self._deleted = asyncio.Event()
        self._gone = False
        self._mounted = False  # a kubelet mounts the volumes before a pod gets its address
        self._writing = asyncio.Lock()
        self._written: Object = {"conditions": []}
        spec = pod["spec"]
        self.init_containers = [self._container(one) for one in spec.get("initContainers") or []]
        self.containers = [self._container(one) for one in spec["containers"]]

    @property
    def _all_containers(self) -> list[Container]:
        """Init containers come first."""
        return [*self.init_containers, *self.containers]

    def update(self, pod: Object) -> None:
        """Set the newest state of the object: readiness gates, deletion, a shorter grace."""
        self.pod = self._volumes.pod = pod
        if "deletionTimestamp" in pod["metadata"]:
            self._deleted.set()
        self._dirty.set()

    def gone(self) -> None:
        """The object was deleted: end now, and write no status."""
        self._gone = True
        self._deleted.set()
        for container in self._all_containers:
            container.kill()

    async def run(self) -> None:
        """Run the pod to its end. If cancelled, end all its processes."""
        publishing = asyncio.create_task(self._publish())
        living = asyncio.create_task(self._live())
        try:
            await self._deleted.wait()
            await self._terminate(living)
            if not self._gone:
                await self._finish()
        finally:
            for container in self._all_containers:
                container.kill()
            for task in (living, publishing):
                task.cancel()
            await asyncio.gather(living, publishing, return_exceptions=True)
            shutil.rmtree(self._folder, ignore_errors=True)

    def view(self) -> status.PodView:
        """The state that the status reports."""
        return status.PodView(
            containers=[one.view for one in self.containers],
            init_containers=[one.view for one in self.init_containers],
            pod_ip=self.facts.pod_ip if self._mounted else None,
            host_ip=self.facts.host_ip,
            started_at=self._started_at,
            terminating=self._deleted.is_set(),
        )

    def container(self, name: str) -> Container | None:
        return next((one for one in self._all_containers if one.view.name == name), None)

    async def _live(self) -> None:
        self._dirty.set()
        self._runs.binds = await self._mount()
        self._mounted = True
        self._dirty.set()
        refreshing = asyncio.create_task(self._volumes.refresh())
        sidecars: list[asyncio.Task[None]] = []
        try:
            for container in self.init_containers:
                if container.view.sidecar:
                    sidecars.append(asyncio.create_task(container.run()))
                    await _any_done(sidecars[-1], asyncio.create_task(container.started.wait()))
                    continue
                await container.run()
                ended = container.view.state
                if not (isinstance(ended, status.Terminated) and ended.exit_code == 0):
                    return
            await asyncio.gather(*(container.run() for container in self.containers))
        except Exception:
            logger.exception("pod failed", extra={"pod": path_of(self.pod)})
            raise
        finally:
            refreshing.cancel()
            grace = self._grace_seconds if self._deleted.is_set() else 0.0
            for container in reversed([one for one in self.init_containers if one.view.sidecar]):
                await container.stop(grace)
            await asyncio.gather(refreshing, *sidecars, return_exceptions=True)

    async def _mount(self) -> dict[str, Path]:
        """Return the volumes when all are available; none if the pod is deleted first.

        While one is missing, record an event with the reason and retry.
        """
        wait = RETRY_SECONDS
        while not self._deleted.is_set():
            try:
                return await self._volumes.prepare()
            except (VolumeError, command.ConfigError, OSError) as error:
                problem = str(error)
            except Exception as error:  # an unexpected error
                logger.exception("volumes failed", extra={"pod": path_of(self.pod)})
                problem = repr(error)
            if wait > 1:  # right after the binding, a missing volume is normal
                await self._record("FailedMount", problem, warning=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._deleted.wait()
            wait = min(wait * 2, LONGEST_RETRY_SECONDS)
        return {}

    async def _terminate(self, living: asyncio.Task[None]) -> None:
        """End all containers within the grace, which a second deletion may shorten."""
        began = time.monotonic()
        if not self._gone:
            for container in self._all_containers:
                if container.process is not None and container.process.running:
                    await self._record("Killing", f"Stopping container {container.view.name}")
        grace = self._grace_seconds
        stops = [
            asyncio.create_task(container.stop(grace))
            for container in self._all_containers
            if not container.view.sidecar  # `_live` ends sidecars after the others
        ]
        while not living.done():
            await asyncio.wait([living], timeout=RETRY_SECONDS)
            if self._gone or time.monotonic() - began > self._grace_seconds + HOOK_SECONDS:
                for container in self._all_containers:
                    container.kill()
        await asyncio.gather(*stops)

    @property
    def _grace_seconds(self) -> float:
        return float(self.pod["metadata"].get("deletionGracePeriodSeconds", 30))

    async def _finish(self) -> None:
        """Write the final status, then delete the object."""
        with contextlib.suppress(ApiError):
            await self._write_status()
        await delete_ended(self._client, self.pod)

    async def _publish(self) -> None:
        """Write the status after each change."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._write_status()
            except ApiError as error:
                if error.status not in (404, 409):
                    logger.info(
                        "status not written", extra={"pod": path_of(self.pod), "error": str(error)}
                    )
                    self._dirty.set()
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:  # a status that is never written again would stall the whole pod
                logger.exception("status not written", extra={"pod": path_of(self.pod)})
                self._dirty.set()
                await asyncio.sleep(RETRY_SECONDS)

    async def _write_status(self) -> None:
        async with self._writing:
            conditions = self._written["conditions"]
            computed = status.pod_status(self.pod, self.view(), conditions, now=time.time())
            if computed != self._written or status.overwritten(self.pod, computed):
                body = {"metadata": {"uid": self.pod["metadata"]["uid"]}, "status": computed}
                stored = await self._client.patch(
                    f"{path_of(self.pod)}/status", body, kind=STRATEGIC
                )
                self.pod = {**self.pod, "status": stored.get("status", {})}
                self._written = computed

    def _container(self, spec: Mapping[str, Any]) -> Container:
        init = spec in (self.pod["spec"].get("initContainers") or [])
        sidecar = init and spec.get("restartPolicy") == "Always"
        policy = self.pod["spec"].get("restartPolicy", "Always")
        if init and policy == "Always":
            policy = "Always" if sidecar else "OnFailure"
        return Container(
            spec,
            restart_policy=policy,
            sidecar=sidecar,
            prepare=lambda number: self._runs.prepare(self.pod, spec, number),
            prober=self._prober,
            changed=self._dirty.set,
            record=self._record,
            backoff=self._machine.backoff,
            grace_seconds=self.pod["spec"].get("terminationGracePeriodSeconds", 30),
            num_restarts=_earlier_restarts(self.pod, spec["name"]),
        )

    def _prober(self, process: Process) -> probes.Prober:
        ports = probes.ports_of(self.pod["spec"]["containers"])
        return probes.Prober(self.facts.pod_ip, ports, process.run_inside, self._machine.http)

    async def _record(self, reason: str, message: str, *, warning: bool = False) -> None:
        await self._recorder.record(self.pod, reason, message, warning=warning)


async def _any_done(*tasks: asyncio.Task[Any]) -> None:
    """Wait for the first of the tasks; cancel the last one, which only waits."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        tasks[-1].cancel()


def _earlier_restarts(pod: Mapping[str, Any], name: str) -> int:
    """Return the restarts of a container: it ran under an earlier agent, so this is one more."""
    for one in pod.get("status", {}).get("containerStatuses") or []:
        if one["name"] == name and one.get("containerID"):
            return int(one["restartCount"]) + 1
    return 0


def path_of(pod: Object) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


async def delete_ended(client: Client, pod: Object) -> None:
    """Delete the object of a pod that has ended, but not a newer one of the same name."""
    body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
    while True:
        try:
            await client.delete(path_of(pod), body)
        except ApiError as error:
            if error.status in (404, 409):
                return
            logger.info("pod not deleted", extra={"pod": path_of(pod), "error": str(error)})
            await asyncio.sleep(RETRY_SECONDS)
        else:
            return

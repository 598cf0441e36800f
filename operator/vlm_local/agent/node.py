"""Runs one node: registers it, renews its Lease, watches its pods and runs them."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from vlm_local.client import STRATEGIC, ApiError, Client, Object
from vlm_operator.cluster import timestamp

from .events import Recorder
from .nodes import NodeType, is_ready, node_object, node_status

logger = logging.getLogger(__name__)
LEASE_SECONDS = 40
RENEW_SECONDS = 10
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


class Runner(Protocol):
    """Runs one pod, by processes or by a script."""

    def update(self, pod: Object) -> None:
        """Set the current state of the object."""

    def gone(self) -> None:
        """End the pod: its object was deleted."""

    async def run(self) -> None:
        """Run the pod until it ends."""


class Node:
    """One simulated node. `runners` are the runners of its pods, by pod uid."""

    def __init__(
        self,
        name: str,
        node_type: NodeType,
        *,
        client: Client,
        address: str,
        port: int,
        version: str,
        make_runner: Callable[["Node", Object], Runner],
    ) -> None:
        self.name = name
        self.node_type = node_type
        self.client = client
        self.address = address
        self.recorder = Recorder(client, name)
        self.runners: dict[str, Runner] = {}
        self._port = port
        self._version = version
        self._make_runner = make_runner
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._since = timestamp(time.time())

    async def run(self) -> None:
        """Register, then watch pods and renew the Lease until cancelled."""
        await self.register()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._heartbeat())
                group.create_task(self._watch_pods())
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def register(self) -> None:
        """Create the Node, or adopt an existing one of that name, and report it as ready."""
        try:
            await self.client.create(
                "/api/v1/nodes", node_object(self.node_type, self.name, self._version)
            )
        except ApiError as error:
            if error.status != 409:
                raise
        await self._report_ready()
        await self._renew()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self._renew()
                if not is_ready(await self.client.get(f"/api/v1/nodes/{self.name}")):
                    # if the Lease was not renewed for a while, such as during a laptop's sleep
                    self._since = timestamp(time.time())
                    await self._report_ready()
            except ApiError as error:
                logger.warning("no heartbeat", extra={"node": self.name, "error": str(error)})

    async def _report_ready(self) -> None:
        status = node_status(
            self.node_type,
            address=self.address,
            port=self._port,
            now=timestamp(time.time()),
            transition=self._since,
            version=self._version,
        )
        path = f"/api/v1/nodes/{self.name}/status"
        await self.client.patch(path, {"status": status}, kind=STRATEGIC)

    async def _renew(self) -> None:
        now = time.time()
        stamp = timestamp(now).replace("Z", f".{int(now % 1 * 1e6):06}Z")
        spec = {
            "holderIdentity": self.name,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": stamp,
        }
        try:
            await self.client.patch(f"{_LEASES}/{self.name}", {"spec": spec})
        except ApiError as error:
            if error.status != 404:
                raise
            await self.client.create(_LEASES, {"metadata": {"name": self.name}, "spec": spec})

    async def _watch_pods(self) -> None:
        selector = f"spec.nodeName={self.name}"
        async for event, thing in self.client.watch("/api/v1/pods", fieldSelector=selector):
            if event == "SYNC":
                present = {pod["metadata"]["uid"] for pod in thing["items"]}
                for uid in set(self.runners) - present:
                    self.runners[uid].gone()
                for pod in thing["items"]:
                    self._update_pod(pod)
            elif event == "DELETED":
                if runner := self.runners.get(thing["metadata"]["uid"]):
                    runner.gone()
            else:
                self._update_pod(thing)

    def _update_pod(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if uid not in self.runners:
            finished = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
            if finished and "deletionTimestamp" not in pod["metadata"]:
                return
            self.runners[uid] = self._make_runner(self, pod)
            self._tasks[uid] = asyncio.create_task(self._run_pod(uid, self.runners[uid].run()))
        self.runners[uid].update(pod)

    async def _run_pod(self, uid: str, running: Coroutine[Any, Any, None]) -> None:
        try:
            await running
        except Exception:
            logger.exception("a pod's task failed", extra={"uid": uid, "node": self.name})
        finally:
            self.runners.pop(uid, None)
            self._tasks.pop(uid, None)

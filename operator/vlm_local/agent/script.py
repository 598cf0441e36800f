"""A pod of a status-only node: a script writes its status, and no process runs.

    bound ─▶ Pending ─ start delay ─▶ Running, ready ─ deletion ─▶ deleted at once

Annotations on the pod: `triptych.dev/simulated-start-seconds` (time until it is ready) and
`triptych.dev/simulated-exit-code` (its containers end with this code after the start).
"""

import asyncio
import contextlib
import logging
import time
from typing import Any

from vlm_local.client import STRATEGIC, ApiError, Client, Object
from vlm_operator import names

from . import status
from .pod import RETRY_SECONDS, delete_ended, path_of
from .status import ContainerView, PodView, Running, Terminated

logger = logging.getLogger(__name__)
START_SECONDS = f"{names.GROUP}/simulated-start-seconds"
EXIT_CODE = f"{names.GROUP}/simulated-exit-code"


class ScriptedPod:
    """Writes the status of one pod."""

    def __init__(self, pod: Object, *, client: Client, pod_ip: str, host_ip: str) -> None:
        self.pod = pod
        self._client = client
        self._pod_ip = pod_ip
        self._host_ip = host_ip
        self._changed = asyncio.Event()
        self._gone = False
        self._started_at = time.time()
        self._conditions: list[dict[str, Any]] = []

    def update(self, pod: Object) -> None:
        self.pod = pod
        self._changed.set()

    def gone(self) -> None:
        self._gone = True
        self._changed.set()

    async def run(self) -> None:
        """Run until the pod ends."""
        annotations = self.pod["metadata"].get("annotations") or {}
        ready_at = time.time() + float(annotations.get(START_SECONDS, 0))
        exit_code = annotations.get(EXIT_CODE)
        while not self._gone and "deletionTimestamp" not in self.pod["metadata"]:
            self._changed.clear()
            now = time.time()
            written = await self._write(self._views(ready_at, exit_code, now), now)
            wait = ready_at - now if ready_at > now else None
            if not written:
                wait = RETRY_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()
        if not self._gone:
            await delete_ended(self._client, self.pod)

    def _views(self, ready_at: float, exit_code: str | None, now: float) -> list[ContainerView]:
        views = [ContainerView(one["name"], one["image"]) for one in self.pod["spec"]["containers"]]
        if now < ready_at:
            return views
        if exit_code is not None:
            ended = Terminated(int(exit_code), ready_at, ready_at)
            return [ContainerView(one.name, one.image, state=ended) for one in views]
        running = Running(ready_at)
        return [
            ContainerView(one.name, one.image, state=running, started=True, ready=True)
            for one in views
        ]

    async def _write(self, views: list[ContainerView], now: float) -> bool:
        """Write the status if it changed; return False if the API server refused."""
        view = PodView(
            views, pod_ip=self._pod_ip, host_ip=self._host_ip, started_at=self._started_at
        )
        computed = status.pod_status(self.pod, view, self._conditions, now=now)
        if computed["conditions"] != self._conditions:
            body = {"metadata": {"uid": self.pod["metadata"]["uid"]}, "status": computed}
            try:
                await self._client.patch(f"{path_of(self.pod)}/status", body, kind=STRATEGIC)
            except ApiError as error:
                logger.info(
                    "status not written", extra={"pod": path_of(self.pod), "error": str(error)}
                )
                return False
            self._conditions = computed["conditions"]
        return True

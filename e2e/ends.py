"""Watches how pods end: when each stops accepting requests, and when it is deleted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator

from served import Served, condition

from vlm_local.client import Object
from vlm_operator import names


@dataclasses.dataclass
class End:
    """One pod's; `closed` and `deleted` are None until they happen."""

    open: bool = False
    closed: float | None = None
    deleted: float | None = None

    @property
    def drained_seconds(self) -> float:
        """Between the two."""
        assert self.closed is not None
        assert self.deleted is not None
        return self.deleted - self.closed

    def note(self, pod: Object) -> None:
        """Take the pod's newest state. Only a gate that was open before closes."""
        now = time.monotonic()
        gate = condition(pod, names.GATE_ACCEPTING).get("status")
        self.open = self.open or gate == "True"
        if self.open and self.closed is None and gate == "False":
            self.closed = now
        if self.deleted is None and "deletionTimestamp" in pod["metadata"]:
            self.deleted = now


@contextlib.asynccontextmanager
async def watched(served: Served) -> AsyncIterator[dict[str, End]]:
    """The end of every pod, by its name."""
    ends: dict[str, End] = {}

    async def watch() -> None:
        async for event, thing in served.api.watch(served.path("pods")):
            for pod in thing["items"] if event == "SYNC" else [thing]:
                ends.setdefault(pod["metadata"]["name"], End()).note(pod)

    task = asyncio.create_task(watch())
    try:
        yield ends
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

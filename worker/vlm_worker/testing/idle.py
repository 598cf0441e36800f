"""What a worker owes when it has nothing to do: nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol


class Accountable(Protocol):
    """A worker that can tell what it still owes: `server.worker.WorkerServer`."""

    @property
    def left(self) -> Mapping[str, int]:
        """All that has not come back, by what it is."""

    @property
    def num_violations(self) -> int:
        """Broken promises of its books so far."""


async def assert_idle(worker: Accountable, *, within_seconds: float = 15.0) -> None:
    """Wait until a worker has everything back: blocks, pins, leases, calls, tasks, segments.

    Raises:
        AssertionError: something did not come back, with its name and number, or the worker's own
            books broke a promise.
    """
    deadline = time.monotonic() + within_seconds
    while left := worker.left:
        assert time.monotonic() < deadline, f"after {within_seconds:g} s there is left: {left}"
        await asyncio.sleep(0.005)
    assert not worker.num_violations, f"{worker.num_violations} broken promises"

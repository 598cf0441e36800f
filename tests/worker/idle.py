"""A check that a worker is idle."""

from __future__ import annotations

import asyncio
import time

from vlm_worker.server.worker_server import WorkerServer


def outstanding(worker: WorkerServer) -> dict[str, int]:
    """Nonzero counts of everything that has not ended, by kind: calls, KV tokens, leases, pins."""
    calls = worker._service.live
    counts = {f"{name} calls": count for name, count in calls.items() if name != "WatchLoad"}
    if worker._components is not None:
        kv = worker._components.engine.stats().kv
        counts |= worker._components.context.outstanding
        counts["KV tokens in use"] = kv.running_tokens if kv else 0
        counts["KV tokens reserved"] = kv.reserved_tokens if kv else 0
    return {name: count for name, count in counts.items() if count}


def num_violations(worker: WorkerServer) -> int:
    """Accounting mismatches so far; nonzero is a bug."""
    snapshot = worker._snapshot()
    return 0 if snapshot is None else snapshot.engine.invariant_violations


async def assert_idle(worker: WorkerServer, *, within_seconds: float = 15.0) -> None:
    """Wait until a worker has freed everything: blocks, pins, leases, calls, tasks, segments.

    Raises:
        AssertionError: something is outstanding, with its kind and count, or the worker counted an
            accounting mismatch.
    """
    deadline = time.monotonic() + within_seconds
    while counts := outstanding(worker):
        assert time.monotonic() < deadline, f"after {within_seconds:g} s: {counts}"
        await asyncio.sleep(0.005)
    assert num_violations(worker) == 0, f"{num_violations(worker)} accounting mismatches"

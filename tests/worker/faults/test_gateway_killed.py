"""A gateway that dies without a word: the workers notice, and free everything of its requests."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest
from worker.faults.blows import held_in
from worker.faults.figures import note
from worker.faults.harness import SLACK, Cluster
from worker.faults.marks import STAGES

from vlm_worker.settings.timers import PRODUCTION

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCALE = 0.1


async def test_workers_free_what_a_killed_gateway_leaves_in_every_stage(service: Cluster) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    lease = PRODUCTION.lease * SCALE
    held = await held_in(service, list(STAGES), random.Random(seed))
    service.gateway.signal(signal.SIGKILL)
    assert service.gateway.process is not None
    assert await service.gateway.process.wait() == -signal.SIGKILL
    try:
        # nobody lets the held requests go: their calls are over, or their leases run out
        seconds = await service.until_idle(seconds=SLACK * (lease + 1.0))
        note(f"gateway killed: workers idle after {seconds:.2f} s (a lease is {lease:g} s)")
        outcomes = await asyncio.gather(*(one.asking for one in held))
        assert all(outcome.defects for outcome in outcomes), "somebody was answered by nobody"
    finally:
        for pod in service.pods.values():
            await pod.do(go=True)
        await service.gateway.start()
        await service.accept_all()
        await service.until_found()

"""Connections that are reset again and again: no prompt is computed twice under one name, every
request ends rightly or in one error, and retries stay within their budget.
"""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from worker.faults.asking import Outcome, Question
from worker.faults.figures import note
from worker.faults.harness import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_REQUESTS = 120
REQUESTS_PER_SECOND = 40.0
RESET_EVERY_SECONDS = 0.25
HANG_SECONDS = 30.0


async def test_a_storm_of_resets_doubles_no_work_and_loses_no_last_word(service: Cluster) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    asked = [
        Question(f"Is it {rng.randrange(1 << 30)}? " * 6, num_tokens=12, temperature=0.5, seed=7)
        for _ in range(NUM_REQUESTS)
    ]
    await service.accept_all()
    before = computed(await service.reports())
    log_before = len(service.gateway.log)
    resets = asyncio.create_task(reset_in_turn(service))
    got = await asyncio.gather(*(late(service, one, n) for n, one in enumerate(asked)))
    resets.cancel()
    await asyncio.gather(resets, return_exceptions=True)
    num_resets = sum(pod.proxy.num_resets for pod in service.pods.values())
    assert num_resets > 0
    await service.until_found()
    await service.until_idle(seconds=15)
    reports = await service.reports()
    extra = computed(reports) - before - NUM_REQUESTS
    lines = service.gateway.log[log_before:]
    barren = sum(
        line.get("message") == "attempt lost" and line["num_delivered"] == 0 for line in lines
    )
    undisturbed = await asyncio.gather(*(service.ask(one) for one in asked))
    num_errors = 0
    for outcome, alone in zip(got, undisturbed, strict=True):
        assert outcome.defects == []
        if outcome.error is None:
            assert outcome.told() == alone.told()
        else:
            num_errors += 1
            assert outcome.error == "service_unavailable"
    assert [name for name, one in reports.items() if one.get("computed_twice")] == []
    note(
        f"storm: {num_resets} connections reset, {NUM_REQUESTS} requests, {num_errors} errors, "
        f"{extra} prompts computed again ({extra / NUM_REQUESTS:.0%}), "
        f"{barren} attempts without a token"
    )


def computed(reports: dict[str, dict[str, int]]) -> int:
    """Prompts computed so far, everywhere."""
    return sum(report.get("computed", 0) for report in reports.values())


async def late(service: Cluster, one: Question, number: int) -> Outcome:
    """Ask at a steady rate, whatever becomes of the others."""
    await asyncio.sleep(number / REQUESTS_PER_SECOND)
    return await service.ask(one, seconds=HANG_SECONDS)


async def reset_in_turn(service: Cluster) -> None:
    """All connections of one pod after the other."""
    for pod in itertools.cycle(service.pods.values()):
        await asyncio.sleep(RESET_EVERY_SECONDS)
        pod.proxy.reset()

"""Data connections go past gRPC: they alone are cut or fall silent, and the answer is the same."""

from __future__ import annotations

import random

import pytest
from worker.faults.blows import held_at, moves, question
from worker.faults.harness import SLACK, Cluster
from worker.faults.process import until
from worker.faults.proxy import Door

pytestmark = pytest.mark.asyncio(loop_scope="session")

STEP_SECONDS = 0.1  # of prefill: most of the KV is still to come when the first of it is there
IDLE_SECONDS = 5.0


@pytest.mark.parametrize("blow", ["reset", "silence"])
async def test_kv_that_is_cut_off_in_the_middle_is_computed_again(
    service: Cluster, blow: str
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prefill = service.pod("prefill-0")
    await service.accept(*(name for name in service.pods if name.endswith("-0")))
    for _ in range(2):  # the first of them learns the port
        outcome = await service.ask(question(rng.randrange(1 << 23)))
        assert outcome.error is None
    data = prefill.proxy.data
    connections = data.connections
    assert connections
    await prefill.do(step=STEP_SECONDS)
    held = await held_at(service, "kv_first", question(rng.randrange(1 << 23)), rng)
    await prefill.do(step=0.0)
    await service.accept_all()
    if blow == "reset":
        data.reset()
        await until(
            lambda: connections.isdisjoint(data.connections), seconds=SLACK, what="they are cut"
        )
    else:
        await fall_silent(data)
    held.pod.tell(go=True)
    got = await held.asking
    data.silent = False
    undisturbed = await service.ask(held.question)
    assert (got.defects, got.error) == ([], None)
    assert got.told() == undisturbed.told()
    assert await moves(service, [held.request_id]) == [1]
    await service.until_idle(seconds=SLACK * IDLE_SECONDS)


async def fall_silent(door: Door) -> None:
    """What is sent through it from now on is lost; some of it was."""
    num_swallowed = door.num_swallowed
    door.silent = True
    await until(
        lambda: door.num_swallowed > num_swallowed, seconds=SLACK, what="what is sent is lost"
    )

"""A pool that loses its last pod: requests wait for another within bounds, and then are told.

The promises of `--patience-seconds`: a pod that comes back in time saves every stream; after it, a
stream ends with one error within 2 s, and nobody who comes later waits again.
"""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from worker.faults.asking import Outcome, Question
from worker.faults.blows import hit
from worker.faults.figures import note
from worker.faults.harness import SLACK, Cluster, cluster
from worker.faults.test_continuation import check, some_question

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_STREAMS = 6
LAST_WORD_SECONDS = 2.0
AWAY_SECONDS = 4.0  # as long as a container takes to come back
PATIENCE_SECONDS = 1.0
ONE_EACH = {"encoder": 1, "prefill": 1, "decode": 1}


def questions(seed: int) -> list[Question]:
    rng = random.Random(seed)
    return [some_question(rng, number) for number in range(NUM_STREAMS)]


async def begun(service: Cluster, asked: list[Question]) -> list[asyncio.Task[Outcome]]:
    """Streams that have their first words and go on slowly."""
    words = asyncio.Semaphore(0)

    def on_text(number: int) -> None:
        if number == 2:
            words.release()

    asking = [asyncio.create_task(service.ask(one, on_text=on_text)) for one in asked]
    async with asyncio.timeout(20):
        for _ in asked:
            await words.acquire()
    return asking


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_streams_wait_for_the_only_pod_of_a_pool_to_return(role: str) -> None:
    async with cluster(counts=ONE_EACH, gateway_flags=("--patience-seconds=30",)) as service:
        asked = questions(3)
        undisturbed = await asyncio.gather(*(service.ask(one) for one in asked))
        await service.pod("decode-0").do(step=0.05)
        asking = await begun(service, asked) if role == "decode" else []
        await hit(service.pod(f"{role}-0"), "SIGKILL")
        killed = time.monotonic()
        # who comes now waits as well
        asking += [asyncio.create_task(service.ask(one)) for one in asked]
        await asyncio.wait(asking, timeout=AWAY_SECONDS)
        assert not any(task.done() for task in asking)
        await service.respawn()
        got = await asyncio.gather(*asking)
        for outcome, before in zip(got, undisturbed * (len(got) // NUM_STREAMS), strict=True):
            check(outcome, before)
        if role == "decode":
            assert min(one.num_pings for one in got[:NUM_STREAMS]) > 0, "no heartbeat"
        note(
            f"lost pool: {len(got)} requests outlived the only {role} pod, "
            f"{time.monotonic() - killed:.1f} s after its death"
        )
        await service.until_idle(seconds=15)


async def test_if_no_pod_returns_every_stream_ends_with_one_error() -> None:
    async with cluster(
        counts={**ONE_EACH, "decode": 2}, gateway_flags=(f"--patience-seconds={PATIENCE_SECONDS}",)
    ) as service:
        for name in ("decode-0", "decode-1"):
            await service.pod(name).do(step=0.05)
        asking = await begun(service, questions(5))
        await asyncio.gather(*(hit(service.pod(f"decode-{i}"), "SIGKILL") for i in (0, 1)))
        killed = time.monotonic()
        got = await asyncio.gather(*asking)
        seconds = time.monotonic() - killed
        note(
            f"lost pool: {len(got)} streams ended in one error {seconds:.2f} s after the last "
            f"decode pod (patience {PATIENCE_SECONDS:g} s)"
        )
        for outcome in got:
            assert outcome.defects == []
            assert outcome.error == "service_unavailable"
        assert seconds <= PATIENCE_SECONDS + SLACK * LAST_WORD_SECONDS
        late = await service.ask(questions(6)[0])
        assert (late.status, late.error) == (503, "service_unavailable")
        assert late.retry_after is not None
        assert late.seconds < PATIENCE_SECONDS
        await service.until_idle(seconds=15)

"""One case of every fault at the timers of production: killed, reset, frozen, cut off, drained.

Five streams on five decode pods, each hit in its own way at one moment; a sixth pod takes over.
A frozen or silent peer is noticed within 15 s, and its stream moves within a second more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import signal
import time

import pytest
from worker.faults.asking import Outcome, Question
from worker.faults.blows import hit
from worker.faults.figures import note
from worker.faults.harness import SLACK, Cluster, cluster
from worker.faults.test_continuation import check, some_question

from vlm_worker.settings.timers import PRODUCTION

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

NOTICED_SECONDS = 15.0
MOVE_SECONDS = 1.0
# What each pod suffers, and when its stream has moved; a drain moves nothing, it finishes.
BLOWS = {
    "SIGKILL": MOVE_SECONDS,
    "reset": MOVE_SECONDS,
    "SIGSTOP": NOTICED_SECONDS + MOVE_SECONDS,
    "silence": NOTICED_SECONDS + MOVE_SECONDS,
    "SIGTERM": MOVE_SECONDS,
}


async def test_every_fault_is_noticed_in_time_at_production_values() -> None:
    assert PRODUCTION.frozen <= NOTICED_SECONDS
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    counts = {"encoder": 0, "prefill": 1, "decode": len(BLOWS) + 1}
    async with cluster(scale=1.0, counts=counts) as service:
        asked = [
            dataclasses.replace(some_question(rng, number), colour=None)
            for number in range(len(BLOWS))
        ]
        undisturbed = [await service.ask(one) for one in asked]
        asking = [
            await held(service, f"decode-{number}", one, rng) for number, one in enumerate(asked)
        ]
        await service.accept("prefill-0", f"decode-{len(asked)}")
        at = [await strike(service, f"decode-{number}", blow) for number, blow in enumerate(BLOWS)]
        for pod in service.pods.values():
            if pod.alive:
                pod.tell(go=True)
        got = await asyncio.gather(*asking)
        for outcome, before in zip(got, undisturbed, strict=True):
            check(outcome, before)
        for (blow, promise), outcome, struck in zip(BLOWS.items(), got, at, strict=True):
            seconds = moved_after(outcome, struck)
            note(f"production timers: {blow:<8} moved after {seconds:5.2f} s (within {promise:g})")
            assert seconds <= SLACK * promise
        # what the frozen one had is void: nobody hears its tokens, and it gives everything back
        service.pod("decode-2").signal(signal.SIGCONT)
        service.pod("decode-3").proxy.mend()
        took = await service.until_idle(seconds=SLACK * NOTICED_SECONDS)
        note(f"production timers: everybody idle {took:.2f} s after the frozen pod woke")


async def held(
    service: Cluster, name: str, one: Question, rng: random.Random
) -> asyncio.Task[Outcome]:
    """A stream that stands at a token on this very pod."""
    await service.accept("prefill-0", name)
    await service.pod(name).hold("token", rng.randrange(2, one.num_tokens - 2))
    asking = asyncio.create_task(service.ask(one))
    await service.pod(name).until_said(at="token")
    return asking


async def strike(service: Cluster, name: str, blow: str) -> float:
    """Hit the pod; when that was."""
    struck = time.monotonic()
    await hit(service.pod(name), blow)
    return struck


def moved_after(outcome: Outcome, struck: float) -> float:
    """From the blow to the next text."""
    return min(at for at in outcome.times if at > struck) - struck

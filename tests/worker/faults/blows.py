"""One blow of the kill matrix: requests held in every stage, one process hit, every outcome judged.

hold ── each request waits in a stage of its own, on the first pod of its role
strike ── one pod is killed, told to stop, frozen, or all its connections are reset
release ── what was held goes on; the second pods take over what is lost
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from worker.faults.asking import Outcome, Question
from worker.faults.harness import SLACK, Cluster
from worker.faults.marks import STAGES
from worker.faults.process import Pod, state_of, until

ROLES_HIT = ("encoder", "prefill", "decode")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP", "reset")
LAST_WORD_SECONDS = 10.0  # the client's own deadline
HANG_SECONDS = LAST_WORD_SECONDS + 1.0
IDLE_SECONDS = 5.0
NUM_TOKENS = 24
STEP_SECONDS = 0.02
TRIES = 5
# Their callers have deadlines: a tenth of 5 s for an answer, of 8 s for the next frame.
IMPATIENT = ("kv_first", "kv_middle", "decode_reserve", "gateway")


@dataclasses.dataclass(frozen=True)
class Case:
    """What became of the request that was in `stage` when `role` was hit."""

    stage: str
    role: str
    blow: str
    result: str
    seconds: float
    outcome: Outcome


def question(number: int) -> Question:
    """Each has an image and a prompt of its own, of several chunks; every second one samples."""
    return Question(
        f"Question {number}: what is this, and why? " * 12,
        num_tokens=NUM_TOKENS,
        colour=number,
        temperature=0.8 * (number % 2),
        seed=number,
    )


async def strike(
    service: Cluster, *, stages: Sequence[str], role: str, blow: str, rng: random.Random
) -> list[Case]:
    """Hold a request in each of the stages, strike the first pod of the role, and judge."""
    for _ in range(TRIES):
        held = await held_in(service, stages, rng)
        if not any(one.slipped for one in held):
            break
        await _release(service)  # a timer of a tenth ran out before the last one was in place
        await asyncio.gather(*(one.asking for one in held))
    else:
        lost = [line for line in service.gateway.log if line.get("message") == "attempt lost"]
        raise AssertionError(f"{[one.stage for one in held if one.slipped]} slipped: {lost[-5:]}")
    victim = service.pod(f"{role}-0")
    try:
        await service.accept_all()
        await hit(victim, blow)
        await _release(service)
        outcomes = await asyncio.gather(*(one.asking for one in held))
    finally:
        await _heal(service, victim, blow)
    num_moves = await moves(service, [one.request_id for one in held])
    # only now, because what was computed before is found in caches and crosses no wire
    undisturbed = await asyncio.gather(*(service.ask(one.question) for one in held))
    assert not [one for one in undisturbed if one.defects or one.error]
    return [
        Case(one.stage, role, blow, result(got, was, num), got.seconds, got)
        for one, got, was, num in zip(held, outcomes, undisturbed, num_moves, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class StalledRequest:
    """A request that is in a stage, if it has not `slipped`.

    `released` is when the gateway took it up.
    """

    stage: str
    question: Question
    request_id: str
    pod: Pod
    asking: asyncio.Task[Outcome]
    released: float

    @property
    def slipped(self) -> bool:
        """It is there no more, or never was."""
        cut = self.pod.find(cut=self.stage, request=self.request_id)
        return cut is not None or self.asking.done()


async def held_in(
    service: Cluster, stages: Sequence[str], rng: random.Random
) -> list[StalledRequest]:
    """One request in each stage, all on the first pods; those that wait least come last."""
    await service.accept(*(name for name in service.pods if name.endswith("-0")))
    # chunk by chunk, so that KV crosses in pieces
    await service.pod("prefill-0").do(step=STEP_SECONDS)
    held = [
        await held_at(service, stage, question(rng.randrange(1 << 23)), rng)
        for stage in sorted(stages, key=lambda stage: (stage in IMPATIENT, stage == "gateway"))
    ]
    await service.pod("prefill-0").do(step=0.0)
    return held


async def held_at(
    service: Cluster,
    stage: str,
    one: Question,
    rng: random.Random,
    *,
    seconds: float = HANG_SECONDS,
    **more: Any,
) -> StalledRequest:
    """A request on its way that is in this very stage now; `seconds`, `more` as `Cluster.ask`."""
    name = f"{stage}-{rng.randrange(1 << 62):x}"
    await service.gateway.hold("gateway")
    asking = asyncio.create_task(service.ask(one, seconds=seconds, name=name, **more))
    request_id = (await service.gateway.until_said(client=name))["enter"]
    await service.gateway.until_said(at="gateway", request=request_id)
    pod, released = service.gateway, time.monotonic()
    if stage != "gateway":
        pod = service.pod(f"{STAGES[stage]}-0")
        nth = rng.randrange(1, one.num_tokens - 1) if stage == "token" else 1
        await pod.hold(stage, nth, request=request_id)
        released = time.monotonic()
        await service.gateway.do(go=True)
        arriving = asyncio.create_task(pod.until_said(at=stage, request=request_id))
        await asyncio.wait({arriving, asking}, return_when=asyncio.FIRST_COMPLETED)
        arriving.cancel()
    return StalledRequest(stage, one, request_id, pod, asking, released)


async def _release(service: Cluster) -> None:
    """What is held goes on; a frozen pod hears of it when it wakes."""
    for pod in (*service.pods.values(), service.gateway):
        if pod.alive:
            pod.tell(go=True)


async def hit(pod: Pod, blow: str, *, seconds: float = SLACK) -> None:
    """The fault, and that it takes effect within so many seconds."""
    proxy = pod.proxy
    connections, num_swallowed, num_lines = proxy.connections, proxy.num_swallowed, len(pod.log)
    if blow == "reset":
        assert connections, "there is nothing to reset"
        proxy.reset()
    elif blow == "silence":
        proxy.silence()
    else:
        pod.signal(signal.Signals[blow])
    effects: dict[str, tuple[Callable[[], bool], str]] = {
        "SIGKILL": (lambda: not pod.alive, "it is dead"),
        "SIGSTOP": (lambda: state_of(pod.pid) == "T", "it stands still"),
        "SIGTERM": (lambda: not pod.alive or pod.drains(num_lines), "it drains"),
        "reset": (lambda: connections.isdisjoint(proxy.connections), "its connections are cut"),
        "silence": (lambda: proxy.num_swallowed > num_swallowed, "what is sent is lost"),
    }
    holds, what = effects[blow]
    await until(holds, seconds=seconds, what=what)


async def _heal(service: Cluster, victim: Pod, blow: str) -> None:
    """Everybody is back, and nobody owes anything."""
    if blow == "SIGSTOP":
        victim.signal(signal.SIGCONT)
    if blow == "SIGTERM" and victim.process is not None:
        async with asyncio.timeout(SLACK * IDLE_SECONDS):
            assert await victim.process.wait() == 0, "a drained pod exits with 0"
    await service.respawn()
    await service.until_idle(seconds=SLACK * IDLE_SECONDS)


async def moves(service: Cluster, request_ids: Sequence[str]) -> list[int]:
    """How often the gateway moved each request, from its log."""

    def retries() -> dict[str, int]:
        return {
            line["request_id"]: line["num_retries"]
            for line in service.gateway.log
            if line.get("message") == "request"
        }

    await until(
        lambda: set(request_ids) <= retries().keys(), seconds=SLACK, what="the log of requests"
    )
    found = retries()
    return [found[request_id] for request_id in request_ids]


def result(got: Outcome, undisturbed: Outcome, num_moves: int) -> str:
    """In a word; what is wrong is said in full."""
    if got.defects:
        return f"WRONG: {got.defects}"
    if got.error is not None:
        return f"error {got.error}"
    if got.told() != undisturbed.told():
        return f"WRONG: {got.told()} is not {undisturbed.told()}"
    return f"moved {num_moves}x" if num_moves else "untouched"

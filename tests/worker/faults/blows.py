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
from collections.abc import Sequence
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
    """Each has a picture and a prompt of its own, of several chunks; every second one samples."""
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
        Case(one.stage, role, blow, _result(got, was, num), got.seconds, got)
        for one, got, was, num in zip(held, outcomes, undisturbed, num_moves, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Held:
    """A request that was seen to be in a stage."""

    stage: str
    question: Question
    request_id: str
    pod: Pod
    asking: asyncio.Task[Outcome]

    @property
    def slipped(self) -> bool:
        """It is there no more."""
        return {"cut": self.stage, "request": self.request_id} in self.pod.said


async def held_in(service: Cluster, stages: Sequence[str], rng: random.Random) -> list[Held]:
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
    service: Cluster, stage: str, one: Question, rng: random.Random, **more: Any
) -> Held:
    """A request on its way that is in this very stage now; `more` is for `Cluster.ask`."""
    name = f"{stage}-{rng.randrange(1 << 62):x}"
    await service.gateway.hold("gateway")
    asking = asyncio.create_task(service.ask(one, seconds=HANG_SECONDS, name=name, **more))
    request_id = (await service.gateway.until_said(client=name))["enter"]
    await service.gateway.until_said(at="gateway", request=request_id)
    pod = service.gateway
    if stage != "gateway":
        pod = service.pod(f"{STAGES[stage]}-0")
        nth = rng.randrange(1, NUM_TOKENS - 1) if stage == "token" else 1
        await pod.hold(stage, nth, request=request_id)
        await service.gateway.do(go=True)
        try:
            await pod.until_said(at=stage, request=request_id)
        except TimeoutError:
            raise AssertionError(f"it did not come to {stage}: {asking}, {pod.said}") from None
    return Held(stage, one, request_id, pod, asking)


async def _release(service: Cluster) -> None:
    """What is held goes on; a frozen pod hears of it when it wakes."""
    for pod in (*service.pods.values(), service.gateway):
        if pod.alive:
            pod.tell(go=True)


async def hit(pod: Pod, blow: str) -> None:
    """The fault, and that it took effect."""
    if blow == "reset":
        assert pod.proxy.reset() > 0, "there was no connection to reset"
        return
    number = signal.Signals[blow]
    pid = pod.pid
    pod.signal(number)
    if blow == "SIGKILL":
        assert pod.process is not None
        assert await pod.process.wait() == -signal.SIGKILL
        assert state_of(pid) in ("", "Z")
    elif blow == "SIGSTOP":
        await until(lambda: state_of(pid) == "T", seconds=SLACK, what="the process stands still")
    else:
        await until(
            lambda: any(line.get("message") == "draining" for line in pod.log) or not pod.alive,
            seconds=SLACK,
            what="the process drains",
        )


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


def _result(got: Outcome, undisturbed: Outcome, num_moves: int) -> str:
    """In a word; what is wrong is said in full."""
    if got.defects:
        return f"WRONG: {got.defects}"
    if got.error is not None:
        return f"error {got.error}"
    if got.told() != undisturbed.told():
        return f"WRONG: {got.told()} is not {undisturbed.told()}"
    return f"moved {num_moves}x" if num_moves else "untouched"

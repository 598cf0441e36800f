"""A client's own deadline, in every stage: 504 or one error event in time, and the work stops."""

from __future__ import annotations

import asyncio
import random

import pytest
from worker.faults.asking import Question
from worker.faults.blows import NUM_TOKENS, StalledRequest, held_at, moves
from worker.faults.figures import note, quantile
from worker.faults.harness import SLACK, Cluster
from worker.faults.marks import STAGES

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEADLINE_SECONDS = 0.4  # sooner than any timer of a tenth
LATE_SECONDS = 0.25
CLEAN_SECONDS = 5.0
NUM_TINY = 96
TINY_AT_ONCE = 12
IN_STAGES = tuple(stage for stage in STAGES if stage not in ("gateway", "kv_middle"))


async def test_a_deadline_ends_a_request_in_any_stage(service: Cluster) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    await service.accept(*(name for name in service.pods if name.endswith("-0")))
    held = []
    for stage in IN_STAGES:
        number = rng.randrange(1 << 23)
        one = Question(f"Is this {number}? " * 8, num_tokens=NUM_TOKENS, colour=number)
        headers = {"x-request-timeout": f"{DEADLINE_SECONDS:g}"}
        held.append(await held_at(service, stage, one, rng, headers=headers))
    outcomes = await asyncio.gather(*(one.asking for one in held))
    num_moves = await moves(service, [one.request_id for one in held])
    # on a busy machine a timer of a tenth may take a pod for lost: that request is held no more
    got = [outcome for outcome, num in zip(outcomes, num_moves, strict=True) if num == 0]
    assert len(got) > len(IN_STAGES) / 2
    for outcome in got:
        assert outcome.defects == []
        assert outcome.error == "deadline_exceeded", outcome
        assert outcome.status in (200, 504)
        assert outcome.seconds >= DEADLINE_SECONDS
    late = max(outcome.seconds for outcome in got) - DEADLINE_SECONDS
    # nobody lets the held ones go: their calls have ended
    clean = await service.until_idle(seconds=SLACK * CLEAN_SECONDS)
    cuts = [await cut_after(one) for one, num in zip(held, num_moves, strict=True) if num == 0]
    note(
        f"deadlines: {len(got)} requests, one in each stage, told at most {late:.3f} s late, "
        f"work cut p95 {quantile(cuts, 0.95):.3f} s late (promised {LATE_SECONDS:g}); "
        f"idle after {clean:.2f} s"
    )
    assert late <= SLACK * LATE_SECONDS
    assert quantile(cuts, 0.95) <= SLACK * LATE_SECONDS
    await service.accept_all()


async def cut_after(one: StalledRequest) -> float:
    """Seconds from the deadline until the pod that held the request was told to stop."""
    line = await one.pod.until_said(cut=one.stage, request=one.request_id)
    return float(line["heard"]) - one.released - DEADLINE_SECONDS


@pytest.mark.parametrize("value", ["soon", "-1", "1e3", "nan", ""])
async def test_a_deadline_that_is_no_number_of_seconds_is_refused(
    service: Cluster, value: str
) -> None:
    outcome = await service.ask(Question("Why?"), headers={"x-request-timeout": value})
    assert (outcome.status, outcome.error) == (400, "invalid_header")


async def test_tiny_deadlines_fall_anywhere_and_leave_nothing(service: Cluster) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    await service.accept_all()
    deadlines = [rng.uniform(0.001, 0.12) for _ in range(NUM_TINY)]
    late: list[float] = []
    for start in range(0, NUM_TINY, TINY_AT_ONCE):
        some = deadlines[start : start + TINY_AT_ONCE]
        asked = [Question(f"{rng.random()}? " * 8, colour=rng.randrange(1 << 23)) for _ in some]
        got = await asyncio.gather(
            *(
                service.ask(one, headers={"x-request-timeout": f"{deadline:.4f}"})
                for one, deadline in zip(asked, some, strict=True)
            )
        )
        for outcome, deadline in zip(got, some, strict=True):
            assert outcome.defects == []
            assert outcome.error in (None, "deadline_exceeded")
            if outcome.error:
                late.append(outcome.seconds - deadline)
    clean = await service.until_idle(seconds=SLACK * CLEAN_SECONDS)
    note(
        f"deadlines: {len(late)} of {NUM_TINY} tiny ones passed, told p95 "
        f"{quantile(late, 0.95):.3f} s late; idle after {clean:.2f} s"
    )
    assert len(late) > NUM_TINY / 4, "the deadlines were no tiny ones"
    assert quantile(late, 0.95) <= SLACK * LATE_SECONDS

"""A client's own deadline, in every stage: 504 or one error event in time, and the work stops."""

from __future__ import annotations

import asyncio
import random

import pytest
from worker.faults.asking import Question
from worker.faults.blows import NUM_TOKENS, held_at, moves
from worker.faults.figures import note
from worker.faults.harness import SLACK, Cluster
from worker.faults.marks import STAGES

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEADLINE_SECONDS = 0.4  # sooner than any timer of a tenth
LATE_SECONDS = 0.25
CLEAN_SECONDS = 1.0
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
    note(
        f"deadlines: {len(got)} requests, one in each stage, told at most {late:.3f} s late "
        f"(promised {LATE_SECONDS:g}); idle after {clean:.2f} s"
    )
    assert late <= SLACK * LATE_SECONDS
    await service.accept_all()


@pytest.mark.parametrize("value", ["soon", "-1", "1e3", "nan", ""])
async def test_a_deadline_that_is_no_number_of_seconds_is_refused(
    service: Cluster, value: str
) -> None:
    outcome = await service.ask(Question("Why?"), headers={"x-request-timeout": value})
    assert (outcome.status, outcome.error) == (400, "invalid_header")

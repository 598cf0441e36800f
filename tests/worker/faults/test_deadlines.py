"""A client's own deadline, in every stage: 504 or one error event in time, and the work stops."""

from __future__ import annotations

import asyncio
import random

import pytest
from worker.faults.asking import Question
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
    asking = []
    for stage in sorted(IN_STAGES, key=lambda stage: stage == "decode_reserve"):
        number = rng.randrange(1 << 23)
        pod = service.pod(f"{STAGES[stage]}-0")
        before = pod.num_said("at", stage)
        await pod.hold(stage)
        one = Question(f"Is this {number}? " * 8, num_tokens=16, colour=number)
        headers = {"x-request-timeout": f"{DEADLINE_SECONDS:g}"}
        asking.append(asyncio.create_task(service.ask(one, headers=headers)))
        await pod.until_num_said("at", stage, before + 1)
    got = await asyncio.gather(*asking)
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

"""Every stage, every role, every way to be hit: the right tokens or one well-formed error.

Timers are at a tenth. In one blow a request is held in each stage and one pod is hit; the long form
has a service to itself for each case. `test_production_timers.py` has the production values.
"""

from __future__ import annotations

import random

import pytest
from worker.faults.blows import ROLES_HIT, SIGNALS, Case, strike
from worker.faults.figures import MATRIX
from worker.faults.harness import Cluster
from worker.faults.marks import STAGES

pytestmark = pytest.mark.asyncio(loop_scope="session")

FULL_REPETITIONS = 20


@pytest.mark.parametrize("blow", SIGNALS)
@pytest.mark.parametrize("role", ROLES_HIT)
async def test_a_request_in_any_stage_survives_a_blow_to_any_role(
    service: Cluster, role: str, blow: str
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    cases = await strike(
        service, stages=list(STAGES), role=role, blow=blow, rng=random.Random(seed)
    )
    judge(cases)


@pytest.mark.full
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("blow", SIGNALS)
@pytest.mark.parametrize("role", ROLES_HIT)
async def test_a_request_alone_survives_each_blow_in_each_stage(
    service: Cluster, role: str, blow: str
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(FULL_REPETITIONS):
        for stage in STAGES:
            judge(await strike(service, stages=[stage], role=role, blow=blow, rng=rng))


def judge(cases: list[Case]) -> None:
    """Put the outcomes into the table, and hold every case to the law."""
    for case in cases:
        MATRIX.add(
            stage=case.stage,
            role=case.role,
            blow=case.blow,
            result=case.result,
            seconds=case.seconds,
        )
    # a spare pod of each role is there: nobody has a reason to fail
    assert [case for case in cases if not case.result.startswith(("untouched", "moved"))] == []

"""One kill for each role with the real model of the examples: the same text as undisturbed."""

from __future__ import annotations

import dataclasses
import random

import pytest
from worker.faults.blows import held_at, hit, moves, question, result
from worker.faults.figures import MATRIX
from worker.faults.harness import cluster

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.full,
    pytest.mark.timeout(300),
]

STAGES_KILLED = {"encoder": "encode", "prefill": "prefill", "decode": "token"}
PATIENCE_SECONDS = 60.0


async def test_the_real_model_answers_the_same_whichever_pod_is_killed() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with cluster(scale=1.0, runner="model") as service:
        for role, stage in STAGES_KILLED.items():
            await service.accept(*(name for name in service.pods if name.endswith("-0")))
            one = dataclasses.replace(question(rng.randrange(1 << 23)), ignore_eos=True)
            held = await held_at(service, stage, one, rng, seconds=PATIENCE_SECONDS)
            assert not held.slipped
            await service.accept_all()
            await hit(service.pod(f"{role}-0"), "SIGKILL")
            got = await held.asking
            (num_moves,) = await moves(service, [held.request_id])
            await service.respawn()
            came_of_it = result(got, await service.ask(one), num_moves)
            MATRIX.add(
                stage=stage,
                role=role,
                blow="real",
                result=came_of_it,
                seconds=got.seconds,
            )
            assert came_of_it == "moved 1x"
            await service.until_idle(seconds=PATIENCE_SECONDS)

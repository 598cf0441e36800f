"""Constrained answers of a random transformer: valid, and equal however the stages are placed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from worker.engine.test_constraints import answered, asked, check, handed_over
from worker.identity.engines import make_runner
from worker.schemas import SCHEMAS

from vlm_worker.engine.constraints import Constraints
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.serve.loading import eos_token_ids, load_vocabulary
from vlm_worker.types import FinishReason, Stage

NUM_SCHEMAS = 24


@contextlib.asynccontextmanager
async def constraining(model_dir: Path, *stages: Stage) -> AsyncIterator[Engine]:
    """An engine of these stages; blocks of four tokens."""
    runner = make_runner(model_dir, *stages, block_size=4)
    vocabulary = load_vocabulary(model_dir, runner, eos_token_ids(model_dir))
    assert vocabulary is not None
    bounds = EngineSettings(
        max_model_len=256, eos_token_ids=eos_token_ids(model_dir), max_num_seqs=32,
        max_num_batched_tokens=64, max_waiting=4096, strict=True,
    )  # fmt: skip
    engine = Engine(
        runner,
        settings=bounds,
        positions=runner.family.positions,
        constraints=Constraints(vocabulary),
    )
    engine.start(asyncio.get_running_loop())
    try:
        yield engine
        assert engine.healthy
    finally:
        await engine.stop()


def some_schemas() -> list[Any]:
    found: list[Any] = []

    @seed(5)
    @settings(max_examples=1, deadline=None, phases=[Phase.generate], database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.lists(SCHEMAS, min_size=NUM_SCHEMAS, max_size=NUM_SCHEMAS))
    def draw(schemas: list[Any]) -> None:
        found[:] = schemas

    draw()
    return found


async def test_random_schemas_and_a_random_transformer(random_model_dir: Path) -> None:
    schemas = some_schemas()
    sampling = [{"temperature": 1.0, "seed": number} for number in range(len(schemas))]
    pairs = list(zip(schemas, sampling, strict=True))
    async with constraining(random_model_dir, Stage.PREFILL, Stage.DECODE) as engine:
        together = await asyncio.gather(
            *(answered(engine, asked(schema, **one)) for schema, one in pairs)
        )
        for schema, answer in zip(schemas, together, strict=True):
            check(schema, answer)
        for (schema, one), (tokens, reason) in zip(pairs, together, strict=True):
            cut = len(tokens) // 2
            rest, why = await answered(engine, asked(schema, tokens[:cut], **one))
            assert (tokens[:cut] + rest, why) == (tokens, reason)
    ended = [reason for _, reason in together].count(FinishReason.STOP)
    assert ended > NUM_SCHEMAS // 2
    async with (
        constraining(random_model_dir, Stage.PREFILL) as prefill,
        constraining(random_model_dir, Stage.DECODE) as decode,
    ):
        for (schema, one), answer in zip(pairs, together, strict=True):
            assert await handed_over(prefill, decode, asked(schema, **one)) == answer

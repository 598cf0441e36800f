"""KV in few bits for one modality: the same answer wherever a request goes, and less memory.

Which tokens are in int8 follows from the images of a request, and a scale belongs to one token and
head; in 4 bits, to one block, which is written whole. So an answer does not depend on chunks,
company, hits, or the worker that wrote the KV.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import numpy as np
import pytest
from worker.identity.engines import Stages, running
from worker.identity.questions import SHAPES, Question, questions
from worker.identity.stepper import Stepper

from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.memory import MIXED_KV
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import KIVI_GROUP, Narrow, Stage

BLOCK_SIZE = 8
SETTINGS = RunnerSettings(
    SHAPES, tuple(Stage), dtype="float32", block_size=BLOCK_SIZE, kv_memory_bytes=32 << 20
)
NUM_QUESTIONS, MAX_TOKENS, EOS = 12, 16, 2
Asked = list[Question]
Answers = list[list[int]]


def settings_of(narrow: Narrow | None, **more: object) -> RunnerSettings:
    if narrow is None:
        return dataclasses.replace(SETTINGS, **more)
    (kv_dtype,) = (name for name, kinds in MIXED_KV.items() if kinds is narrow)
    size = KIVI_GROUP if narrow.is_grouped else BLOCK_SIZE
    return dataclasses.replace(SETTINGS, kv_dtype=kv_dtype, block_size=size, **more)


@pytest.fixture(scope="module")
def asked() -> Asked:
    imaged = [question for question in questions() if question.prepared_images]
    return imaged[:NUM_QUESTIONS]


@pytest.fixture(scope="module", params=list(Narrow))
def narrow(request: pytest.FixtureRequest) -> Narrow:
    return Narrow(request.param)


@pytest.fixture(scope="module")
def alone(asked: Asked, narrow: Narrow) -> Answers:
    """The answers of one question at a time, each prompt in one step."""
    runner = build_runner(settings_of(narrow))
    return [answers(runner, [question], chunk=4096)[0] for question in asked]


def answers(runner: ModelRunner, asked: Asked, *, chunk: int) -> Answers:
    stepper = Stepper(runner)
    sequences = [stepper.start(question, (), max_tokens=MAX_TOKENS) for question in asked]
    stepper.generate(sequences, max_tokens=MAX_TOKENS, chunk=chunk, eos=EOS)
    return [sequence.answer for sequence in sequences]


def logits(settings: RunnerSettings, asked: Asked, fed: Answers) -> list[np.ndarray]:
    stepper = Stepper(build_runner(settings))
    sequences = [stepper.start(question, (), max_tokens=MAX_TOKENS) for question in asked]
    return stepper.forced_logits(sequences, fed, chunk=4096)


def test_chunks_and_company_change_no_answer(asked: Asked, alone: Answers, narrow: Narrow) -> None:
    for chunk in (7, 45):
        assert answers(build_runner(settings_of(narrow)), asked, chunk=chunk) == alone


async def test_an_engine_with_cold_and_warm_caches_answers_alike(
    asked: Asked, alone: Answers, narrow: Narrow
) -> None:
    runner = build_runner(settings_of(narrow))
    async with running(runner, max_num_batched_tokens=33 + 32 * narrow.is_grouped) as engine:
        asker = Stages.colocated(engine, max_tokens=MAX_TOKENS)
        for _ in range(2):
            got = await asyncio.gather(*(asker.ask(question) for question in asked))
            assert list(got) == alone
        stats = engine.stats()
    assert stats.count("prefix_cache_hits") > stats.count("prefix_cache_queries") // 4


async def test_handed_over_is_local(asked: Asked, alone: Answers, narrow: Narrow) -> None:
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                running(build_runner(settings_of(narrow, stages=(stage,))))
            )
            for stage in Stage
        ]
        kinds = BlockKinds(4, narrow, 8) if narrow.is_grouped else BlockKinds(2, narrow, 4)
        asker = Stages(*engines, block_size=0, max_tokens=MAX_TOKENS, kinds=kinds)
        for _ in range(2):
            got = await asyncio.gather(*(asker.ask(question) for question in asked))
            assert list(got) == alone


def test_one_modality_in_int8_changes_logits_and_less_than_both_and_4_bits_more(
    asked: Asked, alone: Answers, narrow: Narrow
) -> None:
    exact = logits(settings_of(None), asked, alone)

    def change(settings: RunnerSettings) -> float:
        got = logits(settings, asked, alone)
        return float(np.mean([np.abs(a - b).mean() for a, b in zip(exact, got, strict=True)]))

    one = change(settings_of(narrow))
    both = change(dataclasses.replace(SETTINGS, kv_dtype="int8"))
    print(f"{narrow}: mean |delta logit| {one:.4f}, int8 of both {both:.4f}")
    assert one > 0
    assert (one < both) is not narrow.is_grouped

"""KV in int8: half the memory, and the same answer wherever a request goes.

A scale belongs to one token and head, so what a token's KV reads as depends on nothing around it:
not on its chunk, its batch, its block, or the worker that wrote it.
"""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
from worker.identity.engines import Stages, running
from worker.identity.questions import SHAPES, Question, questions
from worker.identity.stepper import Stepper

from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import Stage

SETTINGS = RunnerSettings(
    SHAPES, tuple(Stage), dtype="float32", kv_dtype="int8", block_size=4, kv_memory_bytes=32 << 20
)
NUM_QUESTIONS, MAX_TOKENS, EOS = 12, 16, 2
MOST_DIFFERENCE = 0.25
"""Of logits that span 35; 0.09 is seen."""


@pytest.fixture(scope="module")
def asked() -> list[Question]:
    imaged = [question for question in questions() if question.prepared_images]
    return imaged[:NUM_QUESTIONS]


@pytest.fixture(scope="module")
def alone(asked: list[Question]) -> list[list[int]]:
    """The answers of one question at a time, each prompt in one step."""
    runner = build_runner(dataclasses.replace(SETTINGS, block_size=64))
    return [answers(runner, [question], chunk=4096)[0] for question in asked]


def answers(runner: ModelRunner, asked: list[Question], *, chunk: int) -> list[list[int]]:
    stepper = Stepper(runner)
    sequences = [stepper.start(question, (), max_tokens=MAX_TOKENS) for question in asked]
    stepper.generate(sequences, max_tokens=MAX_TOKENS, chunk=chunk, eos=EOS)
    return [sequence.answer for sequence in sequences]


def logits(kv_dtype: str, asked: list[Question], fed: list[list[int]]) -> list[np.ndarray]:
    stepper = Stepper(build_runner(dataclasses.replace(SETTINGS, kv_dtype=kv_dtype)))
    sequences = [stepper.start(question, (), max_tokens=MAX_TOKENS) for question in asked]
    return stepper.forced_logits(sequences, fed, chunk=4096)


def test_chunks_company_and_block_size_change_no_answer(
    asked: list[Question], alone: list[list[int]]
) -> None:
    assert answers(build_runner(SETTINGS), asked, chunk=7) == alone


async def test_handed_over_is_local(asked: list[Question], alone: list[list[int]]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                running(build_runner(dataclasses.replace(SETTINGS, stages=(stage,))))
            )
            for stage in Stage
        ]
        asker = Stages(*engines, block_size=SETTINGS.block_size, max_tokens=MAX_TOKENS)
        assert [await asker.ask(question) for question in asked] == alone


def test_eight_bits_change_logits_within_a_bound_and_do_change_them(
    asked: list[Question], alone: list[list[int]]
) -> None:
    exact, eight = (logits(kv_dtype, asked, alone) for kv_dtype in ("float32", "int8"))
    worst = max(float(np.abs(a - b).max()) for a, b in zip(exact, eight, strict=True))
    spread = max(float(np.ptp(a)) for a in exact)
    print(f"max |delta logit| {worst:.3f} of {spread:.0f}")
    assert 0 < worst <= MOST_DIFFERENCE

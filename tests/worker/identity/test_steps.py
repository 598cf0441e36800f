"""Packed steps answer as transformers' `generate()`, whatever shares a step, wherever it is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from worker.identity.law import Law
from worker.identity.questions import SHAPES, Question
from worker.identity.random_model import NUM_TOKENS
from worker.identity.reference import MAX_TOKENS, Answer
from worker.identity.stepper import Stepper

from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import Stage

EOS = 2
TOGETHER = 32
MAX_LOGIT_DIFFERENCE = 1e-3
Pairs = tuple[tuple[Question, Answer], ...]

blocks_and_chunks = pytest.mark.parametrize(
    ("block_size", "chunk"),
    [
        pytest.param(64, 4096, id="whole prompts, block size 64", marks=pytest.mark.full),
        pytest.param(4, 7, id="chunks of 7 cut through images, block size 4"),
    ],
)


def make_runner(model_dir: Path, block_size: int) -> ModelRunner:
    return build_runner(
        RunnerSettings(
            model_dir, tuple(Stage), dtype="float32", block_size=block_size,
            kv_memory_bytes=256 << 20,
        )
    )  # fmt: skip


@blocks_and_chunks
def test_greedy_answers_of_shapes_are_those_of_transformers(
    shapes_pairs: Pairs, block_size: int, chunk: int
) -> None:
    runner = make_runner(SHAPES, block_size)
    settle(runner, Law(shapes_pairs), max_tokens=MAX_TOKENS, chunk=chunk, eos=EOS)


@blocks_and_chunks
def test_64_tokens_of_random_weights_are_those_of_transformers(
    random_model_dir: Path, random_pairs: Pairs, block_size: int, chunk: int
) -> None:
    runner = make_runner(random_model_dir, block_size)
    settle(runner, Law(random_pairs), max_tokens=NUM_TOKENS, chunk=chunk, eos=None)


@pytest.mark.parametrize("chunk", [pytest.param(4096, marks=pytest.mark.full), 9])
def test_logits_under_the_reference_tokens_differ_by_rounding_alone(
    shapes_pairs: Pairs, random_model_dir: Path, random_pairs: Pairs, chunk: int
) -> None:
    for model_dir, pairs in ((SHAPES, shapes_pairs[:40]), (random_model_dir, random_pairs)):
        stepper = Stepper(make_runner(model_dir, 16))
        sequences = [stepper.start(question, (), max_tokens=NUM_TOKENS) for question, _ in pairs]
        logits = stepper.forced_logits(sequences, [a.token_ids for _, a in pairs], chunk=chunk)
        worst = max(
            float(np.abs(got - answer.logits).max())
            for got, (_, answer) in zip(logits, pairs, strict=True)
        )
        print(f"{model_dir.name}: max |delta logit| {worst:.1e}")
        assert worst <= MAX_LOGIT_DIFFERENCE


def test_an_image_encoded_among_others_answers_as_one_encoded_alone(shapes_pairs: Pairs) -> None:
    runner = make_runner(SHAPES, 16)
    pairs = [pair for pair in shapes_pairs if pair[0].prepared_images][:24]
    images = [image for question, _ in pairs for image in question.prepared_images]
    assert len({image.grid_thw for image in images}) > 8, "sizes are too alike to show much"
    together = runner.encode(images)
    alone = [runner.encode([image])[0] for image in images]
    worst = max(float((a.rows - b.rows).abs().max()) for a, b in zip(together, alone, strict=True))
    print(f"max |delta row| {worst:.1e}")
    assert worst <= 1e-4
    stepper, queue = Stepper(runner), iter(together)
    sequences = [
        stepper.start(
            q, (), max_tokens=MAX_TOKENS, embeddings=[next(queue) for _ in q.prepared_images]
        )
        for q, _ in pairs
    ]
    stepper.generate(sequences, max_tokens=MAX_TOKENS, chunk=4096, eos=EOS)
    law = Law(pairs)
    law.record([sequence.answer for sequence in sequences])
    law.check()


def settle(runner: ModelRunner, law: Law, *, max_tokens: int, chunk: int, eos: int | None) -> None:
    """Ask until nothing is pending, many questions in one step, and hold the law."""
    while law.pending:
        answers: list[list[int]] = []
        for start in range(0, len(law.pending), TOGETHER):
            asked = law.pending[start : start + TOGETHER]
            stepper = Stepper(runner)
            sequences = [
                stepper.start(question, delivered, max_tokens=max_tokens)
                for question, delivered in asked
            ]
            stepper.generate(sequences, max_tokens=max_tokens, chunk=chunk, eos=eos)
            answers += [
                s.answer[len(delivered) :]
                for s, (_, delivered) in zip(sequences, asked, strict=True)
            ]
        law.record(answers)
    law.check()

"""Through the engine, answers are transformers', however work is batched, cached, handed over."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import numpy as np
import pytest
from worker.identity.engines import Stages, hold_law, make_runner, running
from worker.identity.law import Law
from worker.identity.questions import SHAPES, Question
from worker.identity.random_model import NUM_TOKENS, make_random_model, random_reference
from worker.identity.reference import MAX_TOKENS, Answer, shapes_reference

from vlm_worker.core import kv_cache as prefix
from vlm_worker.types import Stage

Pairs = tuple[tuple[Question, Answer], ...]

shapes_of_steps = pytest.mark.parametrize(
    ("block_size", "max_num_batched_tokens"),
    [
        pytest.param(64, 1024, id="block size 64", marks=pytest.mark.full),
        pytest.param(4, 33, id="block size 4, steps of 33 tokens cut through images"),
    ],
)


@shapes_of_steps
async def test_all_questions_at_once_and_again_with_warm_caches(
    shapes_pairs: Pairs, block_size: int, max_num_batched_tokens: int
) -> None:
    runner = make_runner(SHAPES, block_size=block_size)
    async with running(runner, max_num_batched_tokens=max_num_batched_tokens) as engine:
        asker = Stages.colocated(engine, max_tokens=MAX_TOKENS)
        await hold_law(Law(shapes_pairs), asker)
        cold = engine.stats()
        await hold_law(Law(shapes_pairs), asker)
        warm = engine.stats()
    hits = warm.count("prefix_cache_hits") - cold.count("prefix_cache_hits")
    queries = warm.count("prefix_cache_queries") - cold.count("prefix_cache_queries")
    print(f"warm: {hits} of {queries} tokens from the prefix cache")
    assert hits > queries // 4, "the prefix cache was not warm"
    assert warm.encoder_cache.misses == cold.encoder_cache.misses, "an image was encoded again"


@shapes_of_steps
async def test_64_tokens_of_random_weights_together(
    random_model_dir: Path, random_pairs: Pairs, block_size: int, max_num_batched_tokens: int
) -> None:
    runner = make_runner(random_model_dir, block_size=block_size)
    async with running(runner, max_num_batched_tokens=max_num_batched_tokens) as engine:
        asker = Stages.colocated(engine, max_tokens=NUM_TOKENS, ignore_eos=True)
        for _ in range(2):
            await hold_law(Law(random_pairs), asker)


@pytest.mark.parametrize("block_size", [pytest.param(64, marks=pytest.mark.full), 4])
async def test_encoder_prefill_and_decode_apart_are_one(
    shapes_pairs: Pairs, random_model_dir: Path, random_pairs: Pairs, block_size: int
) -> None:
    for model_dir, pairs, max_tokens in (
        (SHAPES, shapes_pairs[:40], MAX_TOKENS),
        (random_model_dir, random_pairs, NUM_TOKENS),
    ):
        async with contextlib.AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(
                    running(make_runner(model_dir, stage, block_size=block_size))
                )
                for stage in Stage
            ]
            asker = Stages(
                *engines, block_size=block_size, max_tokens=max_tokens,
                ignore_eos=model_dir != SHAPES,
            )  # fmt: skip
            await hold_law(Law(pairs), asker)
            await hold_law(Law(pairs), asker)


async def test_preempted_sequences_resume_with_the_same_tokens(
    random_model_dir: Path, random_pairs: Pairs
) -> None:
    block_bytes = 5 * 2 * 2 * 64 * 4 * 4
    longest = max(len(question.token_ids) for question, _ in random_pairs) + NUM_TOKENS
    runner = make_runner(
        random_model_dir, block_size=4, kv_memory_bytes=block_bytes * (2 * longest // 4)
    )
    async with running(runner, max_num_batched_tokens=64, max_model_len=longest) as engine:
        await hold_law(
            Law(random_pairs), Stages.colocated(engine, max_tokens=NUM_TOKENS, ignore_eos=True)
        )
        assert engine.stats().count("preemptions") > 0, "memory was not tight enough to preempt"


def twins(pairs: Pairs) -> tuple[tuple[Question, Answer], tuple[Question, Answer]]:
    """Two questions with equal tokens and unlike images and answers."""
    seen: dict[tuple[object, ...], tuple[Question, Answer]] = {}
    for question, answer in pairs:
        known = seen.setdefault(question.token_ids, (question, answer))
        if question.items and known[1].token_ids != answer.token_ids:
            return known, (question, answer)
    raise AssertionError("no two questions share their tokens")


def keyless(parent: bytes, token_ids: np.ndarray, items: object, *, start: int) -> bytes:
    """A block hash of the tokens alone, as if all images were one."""
    return hashlib.sha256(parent + token_ids.tobytes()).digest()


@pytest.mark.parametrize("with_keys", [True, False], ids=["as built", "image keys left out"])
async def test_equal_prompts_about_unlike_images_are_told_apart_by_the_image_key(
    shapes_pairs: Pairs, with_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_keys:
        monkeypatch.setattr(prefix, "hash_block", keyless)
    (first, first_answer), (second, second_answer) = twins(shapes_pairs)
    async with running(make_runner(SHAPES, block_size=4)) as engine:
        asker = Stages.colocated(engine, max_tokens=MAX_TOKENS)
        got = [tuple(await asker.ask(question)) for question in (first, second, first)]
        assert engine.stats().count("prefix_cache_hits") > 0, (
            "nothing was served from the prefix cache"
        )
    assert got[0] == got[2] == first_answer.token_ids
    assert (got[1] == second_answer.token_ids) is with_keys


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
async def test_a_thousand_questions(block_size: int) -> None:
    pairs = shapes_reference(per_task=40)
    assert len(pairs) > 1000
    runner = make_runner(SHAPES, block_size=block_size)
    async with running(runner, max_num_batched_tokens=97) as engine:
        for _ in range(2):
            await hold_law(Law(pairs), Stages.colocated(engine, max_tokens=MAX_TOKENS))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_random_weights_of_other_seeds(tmp_path: Path, seed: int) -> None:
    model_dir = make_random_model(tmp_path / "model", seed=seed)
    pairs = random_reference(model_dir, 64)
    runner = make_runner(model_dir, block_size=16)
    async with running(runner, max_num_batched_tokens=50) as engine:
        asker = Stages.colocated(engine, max_tokens=NUM_TOKENS, ignore_eos=True)
        for _ in range(2):
            await hold_law(Law(pairs), asker)

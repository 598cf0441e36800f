"""Reduced images through engines: the answers are transformers' on the kept rows and positions.

The reference encodes with transformers, reduces its rows by `model.reduce`, and runs the whole
prompt with positions that are written out here, token by token. Scores are the encoder's own:
`tests/worker/model/test_token_scores.py` compares them to transformers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from worker.identity.engines import Stages, hold_law, make_runner, running
from worker.identity.law import Law
from worker.identity.questions import IMAGE_TOKEN_ID, SHAPES, Question, questions
from worker.identity.reference import Answer, load_reference

from vlm_worker.model.reduce import Rankings, merge, rank
from vlm_worker.model.runner import ModelRunner
from vlm_worker.model.vision import Embedding
from vlm_worker.reduction import Method, Reduction
from vlm_worker.types import ImageItem, PreparedImage, Stage

EOS = 2
MAX_TOKENS = 12
COUNT = 24
REDUCTIONS = (
    Reduction(Method.DIVERSE, 250),
    Reduction(Method.MERGE, 400),
    Reduction(Method.POOL, 500),
    Reduction(Method.ZIP, 250),
    Reduction(Method.ARRCOC, 250),
    Reduction(Method.ARRCOC_PYRAMID, 300),
)

Pairs = tuple[tuple[Question, Answer], ...]


def reduced(question: Question, reduction: Reduction) -> Question:
    """The same question with fewer placeholders."""
    tokens: list[int] = []
    items, images, start = [], [], 0
    for item, whole in zip(question.items, question.prepared_images, strict=True):
        image = dataclasses.replace(whole, reduction=reduction, relevance=relevance(whole))
        tokens += question.token_ids[start : item.offset]
        offset = len(tokens)
        tokens += [IMAGE_TOKEN_ID] * image.kept_tokens
        key, grid = image.kept_key, image.grid_thw
        items.append(ImageItem(key, offset, image.kept_tokens, grid, reduction))
        images.append(image)
        start = item.end
    tokens += question.token_ids[start:]
    return dataclasses.replace(
        question, token_ids=tuple(tokens), items=tuple(items), prepared_images=tuple(images)
    )


def relevance(image: PreparedImage) -> bytes:
    """Of other pixels: the engines need not know more than this."""
    rng = np.random.default_rng(image.image_key[0])
    return rng.integers(1, 65536, image.cells).astype(np.uint16).tobytes()


@functools.cache
def encoder() -> ModelRunner:
    return make_runner(SHAPES, Stage.ENCODER)


def scores(image: PreparedImage) -> torch.Tensor:
    (embedding,) = encoder().encode([image])
    assert isinstance(embedding, Embedding)
    assert embedding.rankings.scores is not None
    return embedding.rankings.scores


@torch.inference_mode()
def answer(model: Any, question: Question) -> Answer:
    """Greedy tokens of a reduced question; the whole sequence is computed for each."""
    ids = torch.tensor(question.token_ids)
    embeds = model.get_input_embeddings()(ids)
    positions: list[tuple[int, int, int]] = []
    at = 0
    for item, image in zip(question.items, question.prepared_images, strict=True):
        for _ in range(item.offset - len(positions)):
            positions.append((at, at, at))
            at += 1
        patches = torch.from_numpy(np.frombuffer(image.patches, np.float32).copy())
        grid = torch.tensor([image.grid_thw])
        features = model.model.get_image_features(
            patches.view(int(grid.prod()), -1), grid, return_dict=True
        ).pooler_output[0]
        assert image.reduction is not None
        if image.is_approximate:  # `tests/worker/model/test_pyramid.py` compares its rows
            (embedding,) = encoder().encode([image])
            assert isinstance(embedding, Embedding)
            assert embedding.places is not None
            embeds[item.offset : item.end] = embedding.rows
            positions += [(at, at + int(row), at + int(column)) for row, column in embedding.places]
            at += max(image.cells)
            continue
        rankings = Rankings(scores(image) if image.reduction.method is Method.ZIP else None)
        rankings.learn(image)
        groups = rank(features, image.cells, image.reduction, rankings)
        embeds[item.offset : item.end] = merge(features, groups)
        positions += [(at, at + int(row), at + int(column)) for row, column in groups.places]
        at += max(image.cells)
    for _ in range(len(ids) - len(positions)):
        positions.append((at, at, at))
        at += 1
    tokens: list[int] = []
    logits = []
    while len(tokens) < MAX_TOKENS and EOS not in tokens:
        hidden = model.model.language_model(
            inputs_embeds=embeds[None],
            position_ids=torch.tensor(positions).T[:, None],
            use_cache=False,
        ).last_hidden_state[0, -1]
        logits.append(model.lm_head(hidden))
        tokens.append(int(logits[-1].argmax()))
        embeds = torch.cat([embeds, model.get_input_embeddings()(torch.tensor(tokens[-1:]))])
        positions.append((at, at, at))
        at += 1
    return Answer(tuple(tokens), torch.stack(logits).numpy())


@functools.cache
def pairs() -> Pairs:
    model = load_reference(SHAPES)
    asked = [question for question in questions() if question.items][:COUNT]
    made = [
        reduced(question, REDUCTIONS[number % len(REDUCTIONS)])
        for number, question in enumerate(asked)
    ]
    return tuple((question, answer(model, question)) for question in made)


@pytest.mark.parametrize(("block_size", "budget"), [(4, 33), (16, 512)])
async def test_reduced_images_answer_as_the_reference_in_chunks_and_with_warm_caches(
    block_size: int, budget: int
) -> None:
    runner = make_runner(SHAPES, block_size=block_size)
    async with running(runner, max_num_batched_tokens=budget) as engine:
        asker = Stages.colocated(engine, max_tokens=MAX_TOKENS)
        await hold_law(Law(pairs()), asker)
        cold = engine.stats()
        await hold_law(Law(pairs()), asker)
        warm = engine.stats()
    assert warm.encoder_cache.misses == cold.encoder_cache.misses, "an image was encoded again"
    hits = warm.count("prefix_cache_hits") - cold.count("prefix_cache_hits")
    assert hits > 0, "the prefix cache was not warm"


async def test_a_cache_of_windows_changes_no_answer() -> None:
    runner = make_runner(SHAPES, window_cache_bytes=64 << 20)
    assert runner.windows is not None
    for _ in range(2):
        before = runner.windows.num_hits
        async with running(runner) as engine:  # with an empty encoder cache
            await hold_law(Law(pairs()), Stages.colocated(engine, max_tokens=MAX_TOKENS))
            assert engine.stats().count("triptych_window_cache_bytes") == runner.windows.num_bytes
    assert runner.windows.num_hits > before, "no window was in the cache"


async def test_reduced_images_travel_with_their_places() -> None:
    stages = {stage: make_runner(SHAPES, stage, block_size=4) for stage in Stage}
    async with (
        running(stages[Stage.ENCODER]) as encoder,
        running(stages[Stage.PREFILL], max_num_batched_tokens=33) as prefill,
        running(stages[Stage.DECODE]) as decode,
    ):
        asker = Stages(encoder, prefill, decode, block_size=4, max_tokens=MAX_TOKENS)
        await hold_law(Law(pairs()), asker)


async def test_preempted_sequences_recompute_reduced_images() -> None:
    longest = max(len(question.token_ids) for question, _ in pairs()) + MAX_TOKENS
    num_bytes = make_runner(SHAPES, block_size=4).kv_layout.block_bytes  # type: ignore[union-attr]
    num_blocks = 2 * longest // 4 + 2
    runner = make_runner(SHAPES, block_size=4, kv_memory_bytes=num_blocks * num_bytes)
    limits = {"max_model_len": longest + 1, "max_num_batched_tokens": 64}
    async with running(runner, **limits) as engine:
        await hold_law(Law(pairs()), Stages.colocated(engine, max_tokens=MAX_TOKENS))


def test_a_reduced_image_changes_some_answer() -> None:
    """Else the tests above would show nothing."""
    model = load_reference(SHAPES)
    asked = [question for question in questions() if question.items][:COUNT]
    whole = [answer(model, reduced(one, Reduction(Method.DIVERSE, 1000))) for one in asked]
    assert [a.token_ids for a in whole] != [a.token_ids for _, a in pairs()]


def test_pixels_seen_later_are_enough_to_reduce_an_encoded_image() -> None:
    (question, *_) = [one for one in questions() if one.items]
    whole = question.prepared_images[0]
    (embedding,) = encoder().encode([whole])
    assert isinstance(embedding, Embedding)
    bare = dataclasses.replace(whole, reduction=Reduction(Method.ARRCOC, 250))
    assert encoder().reduce_embedding(embedding, bare) is None
    known = dataclasses.replace(bare, relevance=relevance(whole))
    first = encoder().reduce_embedding(embedding, known)
    again = encoder().reduce_embedding(embedding, bare)
    assert first is not None
    assert again is not None
    assert len(first.rows) == known.kept_tokens
    assert torch.equal(first.rows, again.rows)

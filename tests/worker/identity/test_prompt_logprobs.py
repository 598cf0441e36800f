"""Log-probabilities of prompts through the engine are those of transformers' forward."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from worker.identity.engines import make_runner, running
from worker.identity.law import request_for
from worker.identity.questions import SHAPES, Question, questions
from worker.identity.reference import load_reference

from vlm_worker.engine.engine import Engine
from vlm_worker.model import prompt_scores
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.types import FailedEvent, PromptLogprobs, Stage, TokenEvent, TokenLogprobs

NUM_TOP = 5
APART = 1e-4
NUM_QUESTIONS = 8
KV_MEMORY_BYTES = 64 << 20


def asked() -> list[Question]:
    found = [one for one in questions() if not one.items][:NUM_QUESTIONS]
    assert len(found) > 2
    return found


@torch.inference_mode()
def reference(question: Question, model_dir: Path = SHAPES) -> torch.Tensor:
    """Log-probabilities `[P - 1, V]` behind each token of a prompt but the last."""
    model = load_reference(model_dir)
    model.model.rope_deltas = None
    ids = torch.tensor([question.token_ids])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return torch.log_softmax(logits[0, :-1].float(), dim=-1)


async def scores(engine: Engine, question: Question, name: str) -> list[tuple[TokenLogprobs, int]]:
    request = request_for(question, request_id=name, max_tokens=2, ignore_eos=True)
    sampling = dataclasses.replace(request.sampling, num_prompt_logprobs=NUM_TOP)
    request = dataclasses.replace(request, sampling=sampling)
    found: list[tuple[TokenLogprobs, int]] = []
    async for event in engine.submit_prefill(request, for_peer=False):
        if isinstance(event, FailedEvent):
            raise event.error
        if isinstance(event, PromptLogprobs):
            assert event.first_index == len(found) + 1
            ids, values = (
                np.reshape(one, (-1, NUM_TOP)).tolist()
                for one in (event.top_ids, event.top_logprobs)
            )
            tops = [tuple(zip(*one, strict=True)) for one in zip(ids, values, strict=True)]
            each = map(TokenLogprobs, event.logprobs, tops)
            found += zip(each, event.ranks, strict=True)
    return found


def check(
    question: Question, found: list[tuple[TokenLogprobs, int]], model_dir: Path = SHAPES
) -> None:
    want = reference(question, model_dir)
    assert len(found) == len(question.token_ids) - 1 == len(want)
    ids = torch.tensor(question.token_ids[1:])
    values = want.gather(-1, ids[:, None])[:, 0].numpy()
    np.testing.assert_allclose([one.logprob for one, _ in found], values, atol=APART)
    best = want.topk(NUM_TOP, dim=-1).values.numpy()
    tops = np.array([[value for _, value in one.top] for one, _ in found])
    np.testing.assert_allclose(tops, best, atol=APART)
    for row, (one, rank) in enumerate(found):
        for token_id, value in one.top:
            assert abs(float(want[row, token_id]) - value) < APART
        likelier = int((want[row] > want[row, ids[row]] + APART).sum())
        as_likely = int((want[row] > want[row, ids[row]] - APART).sum())
        assert likelier + 1 <= rank <= as_likely
        if ids[row] in [token_id for token_id, _ in one.top]:
            assert one.logprob in [value for _, value in one.top]


@pytest.mark.parametrize("max_num_batched_tokens", [7, 33, 1024])
async def test_they_are_those_of_transformers_in_any_chunking_together_and_alone(
    max_num_batched_tokens: int,
) -> None:
    chosen = asked()
    runner = make_runner(SHAPES, block_size=4)
    async with running(runner, max_num_batched_tokens=max_num_batched_tokens) as engine:
        together = await asyncio.gather(
            *(scores(engine, one, f"together{i}") for i, one in enumerate(chosen))
        )
        alone = await scores(engine, chosen[0], "alone")
    for question, found in zip(chosen, together, strict=True):
        check(question, found)
    check(chosen[0], alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_answer_is_the_same_with_and_without_them(dtype: str) -> None:
    """Also where all layers and the head are one native call, which they leave."""
    question = asked()[0]
    runner = build_runner(
        RunnerSettings(
            SHAPES, tuple(Stage), dtype=dtype, block_size=4, kv_memory_bytes=KV_MEMORY_BYTES
        )
    )
    answers = []
    async with running(runner) as engine:
        for wanted in (None, 0, NUM_TOP):
            request = request_for(question, request_id=f"{wanted}", max_tokens=8, ignore_eos=True)
            sampling = dataclasses.replace(
                request.sampling, num_prompt_logprobs=wanted, num_logprobs=NUM_TOP
            )
            request = dataclasses.replace(request, sampling=sampling)
            told = [one async for one in engine.submit_prefill(request, for_peer=False)]
            answers.append([one for one in told if isinstance(one, TokenEvent)])
    tokens = [[one.token_id for one in answer] for answer in answers]
    assert len(tokens[0]) == 8
    assert tokens[1] == tokens[2] == tokens[0]
    first = [answer[0].logprobs for answer in answers]
    assert first[1] == first[2]
    assert all(one is not None for one in first)
    values = [one.logprob for one in first if one is not None]
    np.testing.assert_allclose(values, values[0], atol=APART)


async def test_the_size_of_a_slice_does_not_change_them(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, question = make_runner(SHAPES, block_size=4), asked()[0]
    monkeypatch.setattr(prompt_scores, "MAX_SLICE", 3 * runner.vocab_size)
    async with running(runner) as engine:
        check(question, await scores(engine, question, "slices"))

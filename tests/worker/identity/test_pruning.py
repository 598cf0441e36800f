"""Pruned KV in the model: attention and answers are those of transformers with the same mask."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker.identity.engines import all_ready, collect, make_runner, running
from worker.identity.questions import Question, questions
from worker.identity.reference import TIE, load_reference

from vlm_worker.core.pruning import MAX_OBSERVED, kept_tokens, observed_rows
from vlm_worker.engine.engine import Engine
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import Request, RequestKey, SamplingParams, Stage

PERMILLE, NUM_HISTORY, NUM_TOKENS = 500, 330, 24
_numbers = itertools.count()


def conversation(
    number: int, *, delivered: tuple[int, ...] = (), max_tokens: int = NUM_TOKENS
) -> tuple[Request, Question]:
    """An image question after NUM_HISTORY random tokens, and then a last turn without an image."""
    question = [q for q in questions() if len(q.items) == 1][number]
    rng = np.random.default_rng(number)
    history = (*rng.integers(20, 600, NUM_HISTORY).tolist(),)
    before, after = history[:40], history[40:]
    last = tuple(rng.integers(20, 600, MAX_OBSERVED + number).tolist())
    prompt = (*before, *question.token_ids, *after)
    (item,) = question.items
    request = Request(
        RequestKey(f"p{next(_numbers)}", 0),
        (*prompt, *last, *delivered),
        len(prompt) + len(last),
        SamplingParams(max_tokens, ignore_eos=True),
        (dataclasses.replace(item, offset=item.offset + len(before)),),
        num_history_tokens=len(prompt),
    )
    return request, question


async def answer(engine: Engine, request: Request, question: Question) -> list[int]:
    images = engine.encode(request.key, question.prepared_images)
    tokens = await collect(engine, request, for_peer=False)
    await all_ready(images)
    engine.release_embedding(request.key, 0)
    return tokens


@contextlib.asynccontextmanager
async def pruning(runner: ModelRunner, **settings: Any) -> AsyncIterator[Engine]:
    async with running(runner, kv_prune_text=PERMILLE, **settings) as engine:
        yield engine


class Reference:
    """transformers' language model over the tokens and images of a request."""

    def __init__(self, model_dir: Path, runner: ModelRunner) -> None:
        self._model, self._runner = load_reference(model_dir), runner
        self._model.set_attn_implementation("eager")

    @torch.inference_mode()
    def run(
        self, request: Request, question: Question, answer: list[int], hidden: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Logits `[T, V]`, and the mass of the observed rows; answer rows do not see `hidden`."""
        num_prompt = request.num_prompt_tokens
        token_ids = [*request.token_ids[:num_prompt], *answer]
        positions, delta = self._runner.family.positions(
            request.token_ids[:num_prompt], request.items
        )
        later = np.arange(num_prompt, len(token_ids)) + delta
        positions = np.concatenate([positions, np.tile(later, (3, 1))], axis=1)
        embeds = self._model.get_input_embeddings()(torch.tensor(token_ids))
        (embedding,) = self._runner.encode(question.prepared_images)
        assert not isinstance(embedding, Exception)
        (item,) = request.items
        embeds[item.offset : item.end] = embedding.rows
        mask = torch.full((len(token_ids),) * 2, float("-inf")).triu(1)
        mask[num_prompt:, torch.from_numpy(hidden)] = float("-inf")
        out = self._model.model.language_model(
            inputs_embeds=embeds[None],
            position_ids=torch.from_numpy(positions)[:, None],
            attention_mask={"full_attention": mask[None, None]},
            output_attentions=True,
            use_cache=False,
        )
        rows = observed_rows(request)
        mass = sum(a[0, :, rows.start : rows.stop, :num_prompt].sum((0, 1)) for a in out.attentions)
        return self._model.lm_head(out.last_hidden_state[0]), mass.numpy()


@pytest.fixture(scope="module")
def runner(random_model_dir: Path) -> ModelRunner:
    return make_runner(random_model_dir, block_size=16)


@pytest.mark.parametrize("number", range(3))
async def test_an_answer_is_that_of_transformers_without_the_dropped_tokens(
    number: int, runner: ModelRunner, random_model_dir: Path
) -> None:
    reference = Reference(random_model_dir, runner)
    request, question = conversation(number)
    async with pruning(runner) as engine:
        tokens = await answer(engine, request, question)
        num_pruned = engine.stats().count("kv_pruned_tokens")
    _, mass = reference.run(request, question, [], np.zeros(0, np.int64))
    assert mass.sum() == pytest.approx(mass.sum().round(), abs=1e-2), "a row does not give 1"
    kept = kept_tokens(request, mass, PERMILLE)
    hidden = np.setdiff1d(np.arange(request.num_prompt_tokens), kept)
    assert len(hidden) == num_pruned > 100
    logits, _ = reference.run(request, question, tokens, hidden)
    whole, _ = reference.run(request, question, tokens, np.zeros(0, np.int64))
    logits, whole = (x[request.num_prompt_tokens - 1 : -1] for x in (logits, whole))
    best = logits.topk(2)
    is_tie = best.values[:, 0] - best.values[:, 1] < TIE
    assert (is_tie | (best.indices[:, 0] == torch.tensor(tokens))).all()
    assert not torch.equal(whole.argmax(1), logits.argmax(1)), "pruning changed nothing"


async def test_the_mass_is_that_of_transformers(
    runner: ModelRunner, random_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masses: list[np.ndarray] = []
    observe = ModelRunner.attention_mass

    def recorded(self: ModelRunner, inputs: Any) -> np.ndarray:
        masses.append(observe(self, inputs))
        return masses[-1]

    monkeypatch.setattr(ModelRunner, "attention_mass", recorded)
    request, question = conversation(0)
    async with pruning(runner, max_num_batched_tokens=48) as engine:
        await answer(engine, request, question)
    _, want = Reference(random_model_dir, runner).run(request, question, [], np.zeros(0, np.int64))
    (got,) = masses
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
async def test_chunks_hits_company_and_failover_change_no_answer(
    random_model_dir: Path, kv_dtype: str
) -> None:
    settings = RunnerSettings(
        random_model_dir, tuple(Stage), dtype="bfloat16", kv_dtype=kv_dtype, block_size=16,
        kv_memory_bytes=256 << 20,
    )  # fmt: skip
    runner = build_runner(settings)
    async with pruning(runner) as engine:
        alone = [await answer(engine, *conversation(number)) for number in range(3)]
        again = [await answer(engine, *conversation(number)) for number in range(3)]
        hits = engine.stats().counters["prefix_cache_hits"]
        assert isinstance(hits, Mapping)
        assert hits["text"] > 0
        assert again == alone
    async with running(build_runner(settings)) as engine:
        whole = [await answer(engine, *conversation(number)) for number in range(3)]
    assert whole != alone
    assert [tokens[0] for tokens in whole] == [tokens[0] for tokens in alone]
    async with pruning(build_runner(settings), max_num_batched_tokens=37) as engine:
        requests = [conversation(number) for number in range(3)]
        together = await asyncio.gather(*(answer(engine, *of) for of in requests))
        assert list(together) == alone
        choices = await asyncio.gather(*(answer(engine, *conversation(0)) for _ in range(3)))
        assert choices == [alone[0]] * 3, "a choice differs that shares pruned blocks"
        delivered = tuple(alone[1][:9])
        rest = await answer(engine, *conversation(1, delivered=delivered))
        assert rest == alone[1][9:]


async def test_answers_in_tight_memory_are_the_same(random_model_dir: Path) -> None:
    settings = RunnerSettings(
        random_model_dir, tuple(Stage), dtype="bfloat16", block_size=16, kv_memory_bytes=256 << 20
    )
    runner = build_runner(settings)
    assert runner.kv_layout is not None
    async with pruning(runner) as engine:
        alone = [await answer(engine, *conversation(n, max_tokens=160)) for n in range(3)]
    small = dataclasses.replace(settings, kv_memory_bytes=56 * runner.kv_layout.block_bytes)
    async with pruning(build_runner(small), max_model_len=800) as engine:
        requests = [conversation(number, max_tokens=160) for number in range(3)]
        together = await asyncio.gather(*(answer(engine, *of) for of in requests))
        assert list(together) == alone
        assert engine.stats().count("kv_pruned_sequences") >= 3

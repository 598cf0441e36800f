"""Scores of given tokens are those of log-softmax, in slices of bounded memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from worker.identity.engines import make_runner
from worker.unlisted_checkpoints import VOCAB_SIZE, make_unlisted, unlist

from vlm_worker.core.probe import make_probes, steps
from vlm_worker.core.step_values import SampleParams, ScoredRows
from vlm_worker.model import prompt_scores
from vlm_worker.model.prompt_scores import score_rows

NUM_ROWS, WIDTH, VOCABULARY, NUM_TOP = 23, 8, 97, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 5, 23, 100])
def test_scores_are_those_of_log_softmax(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(size)
    hidden = torch.randn(NUM_ROWS, WIDTH, generator=draw).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw).to(dtype)
    rows = np.array([*range(9), *range(12, 22)], np.int64)
    ids = np.arange(len(rows), dtype=np.int64) * 5
    counts: list[int] = []

    def head(chosen: torch.Tensor) -> torch.Tensor:
        counts.append(len(chosen))
        return chosen @ weight.T

    monkeypatch.setattr(prompt_scores, "MAX_SLICE", size * VOCABULARY)
    found = score_rows(hidden, head, ScoredRows(rows, ids, NUM_TOP), vocab_size=VOCABULARY)
    assert max(counts) <= size
    assert sum(counts) == len(rows)
    logits = (hidden[rows] @ weight.T).float()
    want = torch.log_softmax(logits, dim=-1)
    chosen = want.gather(-1, torch.from_numpy(ids)[:, None])
    np.testing.assert_allclose(found.logprobs, chosen[:, 0].numpy(), atol=1e-4)
    likelier = (logits > logits.gather(-1, torch.from_numpy(ids)[:, None])).sum(dim=-1)
    assert found.ranks.tolist() == (likelier + 1).tolist()
    np.testing.assert_allclose(found.top_logprobs, want.topk(NUM_TOP).values, atol=1e-4)
    is_best = found.top_ids[:, 0] == ids
    assert (found.logprobs[is_best] == found.top_logprobs[is_best, 0]).all()


@pytest.mark.parametrize("num_top", [0, 1, 3])
@pytest.mark.parametrize("token_id", [0, 2])
def test_a_row_that_is_not_finite_has_no_value_and_others_have_theirs(
    token_id: int, num_top: int
) -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 5] = torch.nan
    scored = ScoredRows(np.arange(3), np.array([1, token_id, 3]), num_top)
    found = score_rows(logits, lambda rows: rows, scored, vocab_size=VOCABULARY)
    assert np.isnan(found.logprobs).tolist() == [False, True, False]
    np.testing.assert_allclose(found.logprobs[[0, 2]], -np.log(VOCABULARY), atol=1e-5)
    assert found.top_ids.shape == (3, num_top)


@pytest.mark.parametrize("name", ["gemma3", "paligemma2", "qwen3_vl"])
def test_a_step_of_an_unlisted_model_makes_logits_of_sampled_rows_and_of_slices_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    unlist(monkeypatch)
    path = make_unlisted(tmp_path / name, name)
    runner = make_runner(path, block_size=4, kv_memory_bytes=1 << 22)
    probe = make_probes(runner.family, avoid=())[1]
    (inputs, _), *_ = steps([probe], [()], runner.family.spec.attends, block_size=4, chunk=100)
    want = torch.log_softmax(runner.logits(inputs), dim=-1)
    count = len(inputs.token_ids) - 1
    assert count > 3
    scored = ScoredRows(np.arange(count), probe.token_ids[1 : count + 1], NUM_TOP)
    inputs = dataclasses.replace(
        inputs,
        sample_rows=inputs.sample_rows[-1:],
        sampling=SampleParams.all_greedy(1),
        scored=scored,
    )
    counts: list[int] = []
    runner._model.get_output_embeddings().register_forward_hook(
        lambda head, args, output: counts.append(output.numel() // VOCAB_SIZE)
    )
    monkeypatch.setattr(prompt_scores, "MAX_SLICE", 3 * VOCAB_SIZE)
    output = runner.execute(inputs)
    assert counts == [1, *[3] * (count // 3), *[count % 3] * (count % 3 > 0)]
    assert output.token_ids.tolist() == [int(want[-1].argmax())]
    assert output.scores is not None
    chosen = want[:count].gather(-1, torch.from_numpy(scored.token_ids)[:, None])
    np.testing.assert_allclose(output.scores.logprobs, chosen[:, 0].numpy(), atol=1e-5)

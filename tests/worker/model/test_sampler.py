"""A draw depends on its own row, its seed and its index, and follows the distribution."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vlm_kernels.sampling import uniform, weigh
from vlm_kernels.sampling_edits import edit_logits
from vlm_worker.core.step_values import (
    NOT_FINITE,
    EditedRow,
    LogitEdits,
    SampleParams,
    StepOutput,
    sampling_columns,
)
from vlm_worker.model.runner import sample
from vlm_worker.types import SamplingParams, TokenLogprobs

VOCABULARY = 50


@dataclasses.dataclass(frozen=True)
class Row:
    """One row's sampling; `prompt` and `answer` are its tokens so far."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    index: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    prompt: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()

    @property
    def edits(self) -> LogitEdits | None:
        return LogitEdits.of(
            SamplingParams(
                1,
                frequency_penalty=self.frequency_penalty,
                presence_penalty=self.presence_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=self.logit_bias,
            )
        )

    def edited(self, row: int) -> tuple[EditedRow, ...]:
        known = np.array(self.prompt + self.answer, np.int32)
        return (EditedRow(row, self.edits, known, len(self.prompt)),) if self.edits else ()


def params(rows: list[Row]) -> SampleParams:
    wanted = [-1 if row.num_logprobs is None else row.num_logprobs for row in rows]
    return SampleParams(
        greedy=all(row.temperature == 0 for row in rows),
        columns={
            name: np.array([getattr(row, name) for row in rows], column.dtype)
            for name, column in sampling_columns(0).items()
        },
        index=np.array([row.index for row in rows], np.int64),
        num_logprobs=np.array(wanted) if max(wanted) >= 0 else None,
        edited=tuple(one for i, row in enumerate(rows) for one in row.edited(i)),
    )


def logits(num_rows: int, vocabulary: int = VOCABULARY, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocabulary, generator=rng) * 3


ids = st.integers(0, VOCABULARY + 3)  # some lie beyond the vocabulary, as placeholders may
rows = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 7, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.2, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 4096),
    frequency_penalty=st.sampled_from([0.0, -2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, 1.5, 100.0]), max_size=3).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    num_logprobs=st.sampled_from([None, 0, 3, 20]),
    prompt=st.lists(ids, max_size=6).map(tuple),
    answer=st.lists(ids, max_size=6).map(tuple),
)


def said(output: StepOutput, row: int, wanted: int | None) -> TokenLogprobs | None:
    return None if wanted is None else output.logprobs_of(row, wanted)


@given(st.lists(rows, min_size=1, max_size=9), st.integers(0, 999))
@settings(max_examples=100)
def test_together_is_alone(batch: list[Row], seed: int) -> None:
    scores = logits(len(batch), seed=seed)
    before = scores.clone()
    together = sample(scores, params(batch))
    assert torch.equal(scores, before)
    for i, row in enumerate(batch):
        alone = sample(scores[i : i + 1], params([row]))
        assert together.token_ids[i] == alone.token_ids[0]
        wanted = row.num_logprobs
        assert said(together, i, wanted) == said(alone, 0, wanted)
        if row.temperature in (0, 1e-30) or row.top_k == 1 or row.min_p == 1:
            best = edit_logits(scores, params(batch).edited)[i].argmax()
            assert together.token_ids[i] == best


# ---- the distribution is transformers' -----------------------------------------------------------


def drawn_from(scores: torch.Tensor, row: Row) -> torch.Tensor:
    """The probabilities that a row is drawn with: its weights over their sum."""
    batch = params([row])
    edited = edit_logits(scores, batch.edited) if batch.edited else scores
    weights = weigh(edited, batch, np.arange(1))[0].double()
    return weights / weights.sum()


def transformers_distribution(scores: torch.Tensor, row: Row) -> torch.Tensor:
    """What `generate` would draw from, by its own processors in its own order."""
    processors = LogitsProcessorList()
    if row.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(row.repetition_penalty))
    processors.append(TemperatureLogitsWarper(row.temperature))
    if row.top_k:
        processors.append(TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        processors.append(TopPLogitsWarper(row.top_p))
    if row.min_p:
        processors.append(MinPLogitsWarper(row.min_p))
    known = torch.tensor([row.prompt + row.answer], dtype=torch.int64)
    return torch.softmax(processors(known, scores.clone()), dim=-1)[0].double()


warped = st.builds(
    Row,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 7, 40]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6).map(tuple),
    answer=st.lists(st.integers(0, VOCABULARY - 1), max_size=6).map(tuple),
)


@given(warped, st.integers(0, 999), st.sampled_from([VOCABULARY, 200, 3000]))
@settings(max_examples=150)
def test_the_distribution_is_that_of_transformers(row: Row, seed: int, vocabulary: int) -> None:
    scores = logits(1, vocabulary, seed=seed)
    want = transformers_distribution(scores, row)
    torch.testing.assert_close(drawn_from(scores, row), want, rtol=1e-5, atol=1e-7)


def test_a_nucleus_wider_than_the_first_look_is_found() -> None:
    scores = logits(1, 5000) * 0.01  # nearly even: the nucleus holds thousands
    row = Row(top_p=0.9)
    got = drawn_from(scores, row)
    assert 4000 < (got > 0).sum() < 5000
    torch.testing.assert_close(got, transformers_distribution(scores, row), rtol=1e-5, atol=1e-7)


# ---- draws ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", [Row(temperature=0.7), Row(temperature=1.5, top_k=6, top_p=0.95, min_p=0.01)]
)
def test_draws_follow_the_distribution(row: Row) -> None:
    count, vocabulary = 20_000, 8
    scores = logits(1, vocabulary)
    by_index = [dataclasses.replace(row, seed=5, index=i) for i in range(count // 2)]
    by_seed = [dataclasses.replace(row, seed=i, index=3) for i in range(count // 2)]
    drawn = sample(scores.expand(count, -1), params(by_index + by_seed)).token_ids
    want = transformers_distribution(scores, row).numpy()
    got = np.bincount(drawn, minlength=vocabulary)
    assert not got[want == 0].any()
    expected = want[want > 0] * count
    chi_square = float(((got[want > 0] - expected) ** 2 / expected).sum())
    freedom = int((want > 0).sum()) - 1
    # the mean and 5 standard deviations of chi-square; the draws are fixed by their seeds
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        pytest.param(Row(top_k=2), {3, 1}, id="top-k"),
        pytest.param(Row(top_p=0.6), {3, 1}, id="top-p keeps the token that reaches it"),
        pytest.param(Row(top_p=0.01), {3}, id="top-p never empties"),
        pytest.param(Row(top_k=3, top_p=0.99), {3, 1, 0}, id="both"),
        pytest.param(Row(min_p=0.5), {3, 1}, id="min-p"),
    ],
)
def test_a_filter_keeps_the_likeliest_tokens(row: Row, kept: set[int]) -> None:
    scores = torch.tensor([0.15, 0.3, 0.05, 0.5]).log()[None]
    batch = [dataclasses.replace(row, index=i) for i in range(400)]
    assert set(sample(scores.expand(400, -1), params(batch)).token_ids.tolist()) == kept


def test_equal_tokens_stay_or_go_together() -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]])
    for row in (Row(top_k=2), Row(top_p=0.6)):
        batch = [dataclasses.replace(row, index=i) for i in range(400)]
        assert set(sample(scores.expand(400, -1), params(batch)).token_ids.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "row", [Row(seed=1), Row(seed=1, top_k=3, top_p=0.5, min_p=0.1, num_logprobs=2, answer=(1,),
                             frequency_penalty=1.0)]
)  # fmt: skip
def test_a_row_that_is_not_finite_is_marked_and_the_others_stand(poison: float, row: Row) -> None:
    scores = logits(3)
    batch = [row, Row(temperature=0.0), dataclasses.replace(row, seed=2)]
    clean = sample(scores, params(batch)).token_ids
    scores[0, 7] = poison
    scores[1, 7] = poison
    output = sample(scores, params(batch))
    assert output.token_ids.tolist() == [NOT_FINITE, NOT_FINITE, clean[2]]
    assert output.finite.token_ids.tolist() == [clean[2]]
    if row.num_logprobs is not None:
        assert math.isfinite(output.finite.logprobs_of(0, 2).logprob)


def test_log_probabilities_are_the_model_s_own_before_temperature() -> None:
    scores = logits(3)
    batch = [
        Row(temperature=0.1, top_k=2, num_logprobs=4, seed=9),
        Row(),
        Row(temperature=0.0, num_logprobs=0, logit_bias=((3, 100.0),)),
    ]
    output = sample(scores, params(batch))
    want = torch.log_softmax(scores[0], dim=-1)
    first = output.logprobs_of(0, 4)
    assert first.logprob == pytest.approx(float(want[output.token_ids[0]]), abs=1e-6)
    assert [token for token, _ in first.top] == want.topk(4).indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(want.topk(4).values.tolist())
    assert output.token_ids[2] == 3
    assert output.logprobs_of(2, 0) == TokenLogprobs(pytest.approx(0.0, abs=1e-6))


def test_the_generator_is_even_and_never_one() -> None:
    index = np.arange(20_000)
    for seed in (0, 1, 2**64 - 1):
        drawn = uniform(np.full(len(index), seed, np.uint64), index)
        assert drawn.min() >= 0
        assert drawn.max() < 1
        assert len(np.unique(drawn)) == len(drawn)
        shares = np.histogram(drawn, bins=20, range=(0, 1))[0] / len(drawn)
        assert np.abs(shares - 0.05).max() < 0.01
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03

"""A draw depends on its own row, its seed and its index, and follows the distribution."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_worker.core.inputs import SampleParams
from vlm_worker.model.sampler import NOT_FINITE, sample, uniform


@dataclasses.dataclass(frozen=True)
class Row:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    index: int = 0


def params(rows: list[Row]) -> SampleParams:
    return SampleParams(
        greedy=all(row.temperature == 0 for row in rows),
        temperature=np.array([row.temperature for row in rows], np.float32),
        top_p=np.array([row.top_p for row in rows], np.float32),
        top_k=np.array([row.top_k for row in rows], np.int32),
        seed=np.array([row.seed for row in rows], np.uint64),
        index=np.array([row.index for row in rows], np.int64),
    )


def logits(num_rows: int, vocabulary: int = 50, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocabulary, generator=rng) * 3


rows = st.lists(
    st.builds(
        Row,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        top_p=st.sampled_from([0.1, 0.9, 1.0]),
        top_k=st.sampled_from([0, 1, 7, 1000]),
        seed=st.integers(0, 2**64 - 1),
        index=st.integers(0, 4096),
    ),
    min_size=1,
    max_size=9,
)


@given(rows, st.integers(0, 999))
@settings(max_examples=100)
def test_together_is_alone(batch: list[Row], seed: int) -> None:
    scores = logits(len(batch), seed=seed)
    together = sample(scores, params(batch)).tolist()
    alone = [int(sample(scores[i : i + 1], params([row]))[0]) for i, row in enumerate(batch)]
    assert together == alone
    greedy = scores.argmax(dim=-1).tolist()
    for row, token, best in zip(batch, together, greedy, strict=True):
        if row.temperature == 0 or row.top_k == 1:
            assert token == best


def test_draws_follow_the_distribution() -> None:
    count, vocabulary = 20_000, 8
    scores = logits(1, vocabulary)
    drawn = sample(
        scores.expand(count, -1),
        params([Row(temperature=0.7, seed=5, index=i) for i in range(count)]),
    )
    want = torch.softmax(scores[0].double() / 0.7, dim=-1).numpy()
    got = np.bincount(drawn, minlength=vocabulary) / count
    # 5 standard deviations of a binomial share
    assert (np.abs(got - want) < 5 * np.sqrt(want * (1 - want) / count) + 1e-4).all()


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        pytest.param(Row(top_k=2), {3, 1}, id="top-k"),
        pytest.param(Row(top_p=0.6), {3, 1}, id="top-p keeps the token that reaches it"),
        pytest.param(Row(top_p=0.01), {3}, id="top-p never empties"),
        pytest.param(Row(top_k=3, top_p=0.99), {3, 1, 0}, id="both"),
    ],
)
def test_a_filter_keeps_the_likeliest_tokens(row: Row, kept: set[int]) -> None:
    scores = torch.tensor([0.15, 0.3, 0.05, 0.5]).log()[None]
    batch = [dataclasses.replace(row, index=i) for i in range(400)]
    assert set(sample(scores.expand(400, -1), params(batch)).tolist()) == kept


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_marked_and_the_others_stand(poison: float) -> None:
    scores = logits(3)
    batch = [Row(seed=1), Row(temperature=0.0), Row(seed=2)]
    clean = sample(scores, params(batch))
    scores[0, 7] = poison
    scores[1, 7] = poison
    got = sample(scores, params(batch)).tolist()
    assert got == [NOT_FINITE, NOT_FINITE, clean[2]]


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

"""Biases and penalties are what they are defined as, on any rows of a batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.model.test_sampler import VOCABULARY, Row, logits, params, rows

from vlm_kernels.sampling_edits import edit_logits
from vlm_worker.model.runner import sample


@given(rows, st.integers(0, 999))
@settings(max_examples=60)
def test_edits_are_what_they_are_defined_as(row: Row, seed: int) -> None:
    (got,) = edit_logits(logits(1, seed=seed), row.edited(0)).tolist()
    want = logits(1, seed=seed)[0].double().tolist()
    for token, bias in row.logit_bias:
        if token < VOCABULARY:
            want[token] += bias
    for token in {*row.prompt, *row.answer}:
        if token < VOCABULARY:
            factor = row.repetition_penalty
            want[token] = want[token] / factor if want[token] > 0 else want[token] * factor
    for token in set(row.answer):
        if token < VOCABULARY:
            want[token] -= row.answer.count(token) * row.frequency_penalty + row.presence_penalty
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_bias_of_a_hundred_decides() -> None:
    scores = logits(1)
    worst, best = int(scores.argmin()), int(scores.argmax())
    wanted = [Row(logit_bias=((worst, 100.0),), index=i) for i in range(50)]
    banned = [Row(logit_bias=((best, -100.0),), index=i) for i in range(200)]
    assert set(sample(scores.expand(50, -1), params(wanted)).token_ids) == {worst}
    assert best not in sample(scores.expand(200, -1), params(banned)).token_ids

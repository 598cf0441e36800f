"""A banned token is not chosen, whatever else a request asks for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vlm_kernels.sampling import sample_reference, sample_tokens
from vlm_worker.core.step_values import EditedRow, LogitEdits, SampleParams, sampling_columns
from vlm_worker.types import SamplingParams

VOCABULARY = 64


@pytest.mark.parametrize("sample", [sample_tokens, sample_reference])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("repetition_penalty", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("frequency_penalty", [-2.0, 0.0])
def test_a_banned_token_is_not_chosen(
    sample: object, temperature: float, repetition_penalty: float, frequency_penalty: float
) -> None:
    logits = torch.full((1, VOCABULARY), -1000.0)
    logits[0, 3], logits[0, 9] = 1000.0, -900.0
    sampling = SamplingParams(
        8, temperature=temperature, repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty, logit_bias=((3, 100.0),), min_tokens=4,
    )  # fmt: skip
    known = np.array([1, 3, 3], np.int32)
    found = {}
    for banned in ((), (3,)):
        edits = LogitEdits.of(sampling, banned=banned)
        assert edits is not None
        columns = sampling_columns(1)
        columns["temperature"][0] = temperature
        params = SampleParams(
            temperature == 0, columns, np.zeros(1, np.int64), num_logprobs=np.zeros(1, np.int64),
            edited=(EditedRow(0, edits, known, 1),),
        )  # fmt: skip
        sampled = sample(logits, params)  # type: ignore[operator]
        found[banned] = int(sampled.token_ids[0])
        assert np.isfinite(sampled.logprobs).all()
    assert found[()] == 3 or repetition_penalty == 10.0
    assert found[(3,)] not in (3, -1)

"""Logits to tokens, as the engine asks for them: the mathematics is `vlm_kernels.sampling`."""

from __future__ import annotations

import torch

from vlm_kernels import sample_tokens
from vlm_worker.core.inputs import SampleParams, StepOutput


def sample(logits_RV: torch.Tensor, params: SampleParams) -> StepOutput:
    """Choose a token per row, and say how likely it was where a row asks.

    Args:
        logits_RV: as a head makes them, R rows over V tokens; unchanged.
        params: of the same R rows; temperature 0 is greedy.
    """
    return StepOutput(*sample_tokens(logits_RV, params))

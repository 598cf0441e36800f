"""Logits to tokens: temperature, then top-k, then top-p, then one draw per row.

A draw is a function of (seed, index of the token in its answer) and of the row's own logits, so
that an answer is the same in any batch, on any worker, continued at any token.
"""

from __future__ import annotations

import numpy as np
import torch

from vlm_worker.core.inputs import SampleParams

NOT_FINITE = -1
"""Stands for the token of a row whose logits hold NaN or infinity."""


def sample(logits_RV: torch.Tensor, params: SampleParams) -> np.ndarray:
    """Choose a token per row.

    Args:
        logits_RV: float32, R rows over V tokens.
        params: of the same R rows; temperature 0 is greedy.

    Returns:
        int64 `[R]`, or `NOT_FINITE` where a row cannot be sampled.
    """
    finite = torch.isfinite(logits_RV).all(dim=-1)
    chosen = logits_RV.argmax(dim=-1)
    if not params.greedy:
        at = np.flatnonzero(params.temperature > 0)
        rows = torch.from_numpy(at).to(logits_RV.device)
        chosen[rows] = _draw(logits_RV[rows], params, at)
    return np.asarray(torch.where(finite, chosen, NOT_FINITE).cpu().numpy())


def uniform(seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) from (seed, index), float64: two rounds of SplitMix64 over both words."""
    mixed = _splitmix(_splitmix(seed.astype(np.uint64)) ^ index.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _draw(logits_RV: torch.Tensor, params: SampleParams, at: np.ndarray) -> torch.Tensor:
    """Inverse of the distribution function, tokens in descending order of probability."""

    def column(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values[at], dtype=dtype, device=logits_RV.device)[:, None]

    scaled = logits_RV.double() / column(params.temperature, torch.float64)
    ordered, tokens = scaled.nan_to_num().sort(dim=-1, descending=True, stable=True)
    probability = torch.softmax(ordered, dim=-1)
    top_k = column(params.top_k, torch.int64)
    rank = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    probability = probability.masked_fill((top_k > 0) & (rank >= top_k), 0.0)
    before = probability.cumsum(dim=-1) - probability
    kept = probability.sum(dim=-1, keepdim=True)
    top_p = column(params.top_p, torch.float64)
    probability = probability.masked_fill((before >= top_p * kept) & (rank > 0), 0.0)
    total = probability.cumsum(dim=-1)
    draws = uniform(params.seed[at], params.index[at])
    level = torch.tensor(draws, device=logits_RV.device)[:, None] * total[:, -1:]
    # the first token whose total exceeds the level; a level is below the last total
    place = (total <= level).sum(dim=-1, keepdim=True).clamp(max=logits_RV.shape[-1] - 1)
    return tokens.gather(-1, place)[:, 0]


def _splitmix(state: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele, Lea, Flood 2014); arithmetic is modulo 2**64."""
    with np.errstate(over="ignore"):
        z = state + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))

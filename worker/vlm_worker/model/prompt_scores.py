"""Log-probabilities of a prompt's tokens: the head over many rows, in slices of bounded memory.

    hidden [T, D] ─▶ rows of a slice ─▶ head ─▶ logits [S, V] ─▶ log-probability, rank, best ones

S * V is at most `MAX_SLICE`, so a chunk of any length takes the logits of one slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from vlm_kernels import sample_tokens
from vlm_worker.core.step_values import SampleParams, ScoredRows, Scores, sampling_columns

MAX_SLICE: Final = 1 << 22
"""Logits of a slice. Beside 16 MiB of them in float32, a GPU takes up to 100 MiB to order them."""


def score_rows(
    hidden_TD: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    scored: ScoredRows,
    *,
    vocab_size: int,
) -> Scores:
    """Score the tokens behind `scored.rows`.

    `hidden_TD` may be what stands for hidden states, such as indices `[T]`, if `head` takes it.

    A row's values depend on its logits only. The head may round them otherwise in another slice, as
    it may for the rows of another batch.
    """
    size = max(1, MAX_SLICE // vocab_size)
    parts = []
    for at in range(0, len(scored.rows), size):
        logits_SV = head(hidden_TD[_on(hidden_TD, scored.rows[at : at + size])])
        parts.append(_score(logits_SV, scored.token_ids[at : at + size], scored.num_top))
    return Scores(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _score(
    logits_SV: torch.Tensor, token_ids: np.ndarray, num_top: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities [S], ranks [S], best ids and their log-probabilities [S, K]."""
    count = len(token_ids)
    wanted = np.full(count, num_top, np.int64)
    best = sample_tokens(
        logits_SV, SampleParams(True, sampling_columns(count), np.zeros(count, np.int64), wanted)
    )
    assert best.logprobs is not None
    assert best.top_ids is not None
    assert best.top_logprobs is not None
    is_finite = best.token_ids >= 0
    # log p(t) = z_t - z_best + log p(best): the sum over the vocabulary is computed once
    chosen_S1 = logits_SV.gather(-1, _on(logits_SV, token_ids)[:, None])
    first = _on(logits_SV, np.where(is_finite, best.token_ids, 0))
    gaps = chosen_S1.float() - logits_SV.gather(-1, first[:, None]).float()
    logprobs = gaps[:, 0].cpu().numpy() + best.logprobs
    ranks = (logits_SV > chosen_S1).sum(dim=-1).cpu().numpy() + 1
    # the same value as in the list of the best ones, to the last bit; rows without values list id 0
    at = (best.top_ids == token_ids[:, None]) & is_finite[:, None]
    logprobs[at.any(axis=1)] = best.top_logprobs[at]
    logprobs[~is_finite] = np.nan
    return logprobs, ranks.astype(np.int64), best.top_ids, best.top_logprobs


def _on(like: torch.Tensor, ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(ids)).to(like.device)

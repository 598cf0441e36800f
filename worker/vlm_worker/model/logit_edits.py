"""Biases and penalties: what a request wants done to its logits before anything is chosen.

    l  the model's logit of a token;  b  its bias;  n  how often the answer holds it already
    x = l + b
    y = x / r if x > 0 else x * r     where the prompt or the answer holds the token
    z = y - n * f - (n > 0) * p

r is the repetition penalty as transformers has it (arXiv 1909.05858), f and p are the frequency and
the presence penalty of OpenAI's API. Only logits that something is asked of are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from vlm_worker.core.inputs import EditedRow


def edit(logits_RV: torch.Tensor, edited: Sequence[EditedRow]) -> torch.Tensor:
    """A copy of the logits with the rows in `edited` changed; token ids beyond V have no effect."""
    logits_RV = logits_RV.clone(memory_format=torch.contiguous_format)
    _add_biases(logits_RV, [one for one in edited if len(one.edits.bias_ids)])
    _divide_repeated(logits_RV, [one for one in edited if one.edits.repetition_penalty != 1])
    _subtract_counted(logits_RV, [one for one in edited if _counts(one)])
    return logits_RV


def _counts(one: EditedRow) -> bool:
    return one.edits.frequency_penalty != 0 or one.edits.presence_penalty != 0


def _add_biases(logits_RV: torch.Tensor, edited: Sequence[EditedRow]) -> None:
    if not edited:
        return
    at = _places(logits_RV, edited, lambda one: one.edits.bias_ids)
    values = np.concatenate([one.edits.bias_values for one in edited])
    flat = logits_RV.view(-1)
    places = torch.from_numpy(at[at >= 0]).to(flat.device)
    flat[places] += torch.from_numpy(values[at >= 0]).to(flat.device)


def _divide_repeated(logits_RV: torch.Tensor, edited: Sequence[EditedRow]) -> None:
    if not edited:
        return
    at = _places(logits_RV, edited, lambda one: one.token_ids)
    lengths = [len(one.token_ids) for one in edited]
    values = np.repeat([one.edits.repetition_penalty for one in edited], lengths)
    flat = logits_RV.view(-1)
    places = torch.from_numpy(at[at >= 0]).to(flat.device)
    penalty = torch.from_numpy(values[at >= 0].astype(np.float32)).to(flat.device)
    before = flat[places]
    # a token that comes twice is written twice, the same both times
    flat[places] = torch.where(before > 0, before / penalty, before * penalty)


def _subtract_counted(logits_RV: torch.Tensor, edited: Sequence[EditedRow]) -> None:
    if not edited:
        return
    at = _places(logits_RV, edited, lambda one: one.token_ids[one.num_prompt :])
    found, counts = np.unique(at[at >= 0], return_counts=True)
    frequency = np.zeros(len(logits_RV), np.float64)
    presence = np.zeros(len(logits_RV), np.float64)
    for one in edited:
        frequency[one.row] = one.edits.frequency_penalty
        presence[one.row] = one.edits.presence_penalty
    rows = found // logits_RV.shape[-1]
    penalty = (counts * frequency[rows] + presence[rows]).astype(np.float32)
    flat = logits_RV.view(-1)
    flat[torch.from_numpy(found).to(flat.device)] -= torch.from_numpy(penalty).to(flat.device)


def _places(
    logits_RV: torch.Tensor, edited: Sequence[EditedRow], ids_of: Callable[[EditedRow], np.ndarray]
) -> np.ndarray:
    """Where the rows' tokens lie in the flat logits, int64; -1 for a token that has no logit."""
    vocabulary = logits_RV.shape[-1]
    ids = [ids_of(one).astype(np.int64) for one in edited]
    starts = np.repeat([one.row * vocabulary for one in edited], [len(one) for one in ids])
    joined = np.concatenate(ids)
    return np.where(joined < vocabulary, joined + starts, -1)

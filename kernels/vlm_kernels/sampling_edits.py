"""Logit biases and penalties, applied before sampling.

    l  the model's logit of a token;  b  its bias;  n  its number of occurrences in the answer
    x = l + b
    y = x / r if x > 0 else x * r     if the token is in the prompt or the answer
    z = y - n * f - (n > 0) * p

r is transformers' repetition penalty (arXiv 1909.05858). f and p are the frequency and presence
penalties of OpenAI's API. Logits of other tokens are unchanged.

Shapes: R rows over V tokens. This module has torch's definition. On CPUs `sampling` uses
`cpu/sampling_edits.cpp`, which reads the same edits as packed arrays, row after row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch


class Edits(Protocol):
    """The edits that one request asks for."""

    @property
    def penalties(self) -> Mapping[str, float]:
        """The penalties by name.

        frequency_penalty: subtracted for each occurrence in the answer; 0 has no effect
        presence_penalty: subtracted if the token is in the answer; 0 has no effect
        repetition_penalty: divides a positive logit, multiplies a negative one; 1 has no effect
        """

    @property
    def bias_ids(self) -> np.ndarray:
        """int64 `[B]`, all different."""

    @property
    def bias_values(self) -> np.ndarray:
        """float32 `[B]`."""


class EditedRow(Protocol):
    """A row with edits, and its tokens so far."""

    @property
    def row(self) -> int:
        """Index of the row in R."""

    @property
    def edits(self) -> Edits:
        """The edits of the row."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32: the prompt, then the answer so far."""

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens."""


class PackedEdits(NamedTuple):
    """The arrays that the C++ kernel reads."""

    rows: np.ndarray  # [E] of EDIT
    token_ids: np.ndarray  # int32
    bias_ids: np.ndarray  # int64
    bias_values: np.ndarray  # float32


EDIT = np.dtype(
    [(name, np.int64) for name in ("biases", "biases_end", "tokens", "answer", "tokens_end")]
    + [(name, np.float64) for name in ("frequency", "presence", "repetition")]
)
"""`struct Edit` of `cpu/sampling.h`."""


def edit_logits(logits_RV: torch.Tensor, edited: Sequence[EditedRow]) -> torch.Tensor:
    """A copy of float32 logits with the edits of the rows in `edited`.

    Token ids of V or more have no effect.
    """
    logits_RV = logits_RV.clone(memory_format=torch.contiguous_format)
    _add_biases(logits_RV, [one for one in edited if len(one.edits.bias_ids)])
    _divide_repeated(logits_RV, [one for one in edited if _repetition(one) != 1])
    _subtract_counted(logits_RV, [one for one in edited if _counts(one)])
    return logits_RV


def pack_edits(edited: Sequence[EditedRow]) -> PackedEdits:
    """Pack the same edits into arrays, without a loop over tokens."""
    rows = np.zeros(len(edited), EDIT)
    num_tokens = np.array([len(one.token_ids) for one in edited], np.int64)
    num_biases = np.array([len(one.edits.bias_ids) for one in edited], np.int64)
    rows["tokens_end"], rows["biases_end"] = num_tokens.cumsum(), num_biases.cumsum()
    rows["tokens"] = rows["tokens_end"] - num_tokens
    rows["biases"] = rows["biases_end"] - num_biases
    rows["answer"] = rows["tokens"] + [one.num_prompt for one in edited]
    rows["frequency"] = [one.edits.penalties["frequency_penalty"] for one in edited]
    rows["presence"] = [one.edits.penalties["presence_penalty"] for one in edited]
    rows["repetition"] = [_repetition(one) for one in edited]
    return PackedEdits(
        rows,
        np.concatenate([one.token_ids for one in edited], dtype=np.int32),
        np.concatenate([one.edits.bias_ids for one in edited], dtype=np.int64),
        np.concatenate([one.edits.bias_values for one in edited], dtype=np.float32),
    )


def _counts(one: EditedRow) -> bool:
    return any(one.edits.penalties[name] for name in ("frequency_penalty", "presence_penalty"))


def _repetition(one: EditedRow) -> float:
    return one.edits.penalties["repetition_penalty"]


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
    values = np.repeat([_repetition(one) for one in edited], lengths)
    flat = logits_RV.view(-1)
    places = torch.from_numpy(at[at >= 0]).to(flat.device)
    penalty = torch.from_numpy(values[at >= 0].astype(np.float32)).to(flat.device)
    before = flat[places]
    # a token that occurs twice is written twice, with the same value
    flat[places] = torch.where(before > 0, before / penalty, before * penalty)


def _subtract_counted(logits_RV: torch.Tensor, edited: Sequence[EditedRow]) -> None:
    if not edited:
        return
    at = _places(logits_RV, edited, lambda one: one.token_ids[one.num_prompt :])
    found, counts = np.unique(at[at >= 0], return_counts=True)
    frequency = np.zeros(len(logits_RV), np.float64)
    presence = np.zeros(len(logits_RV), np.float64)
    for one in edited:
        frequency[one.row] = one.edits.penalties["frequency_penalty"]
        presence[one.row] = one.edits.penalties["presence_penalty"]
    rows = found // logits_RV.shape[-1]
    penalty = (counts * frequency[rows] + presence[rows]).astype(np.float32)
    flat = logits_RV.view(-1)
    flat[torch.from_numpy(found).to(flat.device)] -= torch.from_numpy(penalty).to(flat.device)


def _places(
    logits_RV: torch.Tensor, edited: Sequence[EditedRow], ids_of: Callable[[EditedRow], np.ndarray]
) -> np.ndarray:
    """Indices of the rows' tokens in the flat logits, int64; -1 for a token without a logit."""
    vocabulary = logits_RV.shape[-1]
    ids = [ids_of(one).astype(np.int64) for one in edited]
    starts = np.repeat([one.row * vocabulary for one in edited], [len(one) for one in ids])
    joined = np.concatenate(ids)
    return np.where((joined >= 0) & (joined < vocabulary), joined + starts, -1)

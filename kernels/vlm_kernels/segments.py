"""The keys that each query of a packed batch sees: an interval of its segment's keys.

One form for all attention with several queries per sequence. A patch sees all keys of its window.
A prompt token sees the keys up to itself or to the end of its span, from the start of its sliding
window or of its span on (`seen_by`).

Shapes: T packed queries, S segments, K keys, H KV heads, G query heads per KV head, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from vlm_kernels.dense_attention import capped


@dataclasses.dataclass(frozen=True, slots=True)
class Segments:
    """Queries in segments, and the keys that each sees.

    Attributes:
        tokens: `[S]`, index of a segment's first query among the packed tokens.
        num_queries: `[S]`.
        num_keys: `[S]`.
        key_start: `[S]`, index of its first key in k and v; unused with a block table.
        first: `[T]` by packed token; undefined for a token of no segment.
        end: `[T]`; each query sees the keys [first, end) of its segment, at least one.
        block_table: `[S, B]`; None if keys are rows of tensors.
    """

    tokens: np.ndarray
    num_queries: np.ndarray
    num_keys: np.ndarray
    key_start: np.ndarray
    first: np.ndarray
    end: np.ndarray
    block_table: np.ndarray | None = None


def seen_by(
    positions: np.ndarray,
    *,
    spans: Sequence[tuple[int, int]] = (),
    window: int | None = None,
    spans_exceed_window: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The keys [first, end) that tokens at these positions of one sequence see.

    A token sees the keys up to itself, or to the end of its span. A window limits only the past: it
    keeps the last `window` keys up to the token itself. With `spans_exceed_window`, a token also
    sees its span from the start.
    """
    first, end = np.zeros_like(positions), positions + 1
    if window is not None:
        first = np.maximum(0, positions - window + 1)
    for start, stop in spans:
        inside = (positions >= start) & (positions < stop)
        end = np.where(inside, np.maximum(end, stop), end)
        if spans_exceed_window:
            first = np.where(inside, np.minimum(first, start), first)
    return first, end


def whole_segments(lengths: np.ndarray) -> Segments:
    """Consecutive segments of these lengths, in which each query sees all keys."""
    lengths = lengths.astype(np.int64)
    end = np.repeat(lengths, lengths)
    return plan_segments(lengths, lengths, np.zeros_like(end), end)


def plan_segments(
    num_queries: np.ndarray,
    num_keys: np.ndarray,
    first: np.ndarray,
    end: np.ndarray,
    *,
    tokens: np.ndarray | None = None,
    key_start: np.ndarray | None = None,
    block_table: np.ndarray | None = None,
) -> Segments:
    """Check and lay out segments; the arguments are those of `Segments`.

    Without `tokens` and `key_start`, the segments' queries and keys are consecutive.

    Raises:
        ValueError: a shape or number is wrong; the text says which.
    """
    tokens = np.cumsum(num_queries) - num_queries if tokens is None else tokens
    key_start = np.cumsum(num_keys) - num_keys if key_start is None else key_start
    columns = (tokens, num_queries, num_keys, key_start)
    if any(column.shape != (len(tokens),) for column in columns):
        raise ValueError(f"segments: {[len(column) for column in columns]} of each, must be alike")
    if any((column < 0).any() for column in columns):
        raise ValueError("segments: a start or a number is negative")
    if (len(tokens) and (tokens + num_queries).max() > len(first)) or first.shape != end.shape:
        raise ValueError(f"segments: {len(first)} first and {len(end)} end, one per token")
    at = np.repeat(tokens - (np.cumsum(num_queries) - num_queries), num_queries)
    at = at + np.arange(len(at))
    limit = np.repeat(num_keys, num_queries)
    if (first[at] < 0).any() or (first[at] >= end[at]).any() or (end[at] > limit).any():
        raise ValueError("segments: each query must see keys of its own segment, at least one")
    return Segments(
        tokens=np.ascontiguousarray(tokens, np.int64),
        num_queries=np.ascontiguousarray(num_queries, np.int64),
        num_keys=np.ascontiguousarray(num_keys, np.int64),
        key_start=np.ascontiguousarray(key_start, np.int64),
        first=np.ascontiguousarray(first, np.int32),
        end=np.ascontiguousarray(end, np.int32),
        block_table=None if block_table is None else np.ascontiguousarray(block_table, np.int32),
    )


def segment_attention_reference(
    segments: Segments,
    q_THD: torch.Tensor,
    k_KHD: torch.Tensor,
    v_KHD: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """The definition: query by query, in float32; tokens of no segment are zero."""
    o_THD = torch.zeros_like(q_THD)
    groups = q_THD.shape[1] // k_KHD.shape[1]
    for s, token in enumerate(segments.tokens.tolist()):
        for t in range(token, token + int(segments.num_queries[s])):
            start = int(segments.key_start[s])
            seen = slice(start + int(segments.first[t]), start + int(segments.end[t]))
            k, v = (x[seen].float().repeat_interleave(groups, dim=1) for x in (k_KHD, v_KHD))
            scores = capped(scale * torch.einsum("hd,khd->hk", q_THD[t].float(), k), softcap)
            o_THD[t] = torch.einsum("hk,khd->hd", torch.softmax(scores, dim=-1), v).to(o_THD.dtype)
    return o_THD

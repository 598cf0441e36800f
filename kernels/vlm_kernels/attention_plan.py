"""Plans the reads of one step of paged attention: decoding rows, prefill chunks, torch's groups.

Shapes: S sequences, H KV heads, G query heads per KV head, D head size, P slots per block,
B blocks per sequence; the cache is `[N, L, 2, H, P * D]`.

Decoding sequences, one query each, are rows of one native call. Chunks of prefill are segments of
another call. Without such a kernel, they are groups (`attention_groups`). A plan is made once per
step and used by all layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vlm_kernels import gpu
from vlm_kernels.attention_groups import Group, GroupLayout, Spans, similar
from vlm_kernels.decode_attention import DecodeRows, can_attend_decode, plan_decode
from vlm_kernels.flash_attention import can_attend_blocks
from vlm_kernels.segments import Segments, plan_segments, seen_by
from vlm_kernels.tiled_attention import plan_tiled

if TYPE_CHECKING:
    from vlm_kernels.gpu.attention_step import TiledStep


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The reads of one step; the same for all layers with the same window.

    Attributes:
        rows: decoding sequences for the native kernel; None if there are none.
        chunks: chunks of prefill for the native kernel; None if there are none.
        groups: all other sequences.
        tiles: all sequences, on a GPU; None elsewhere.
    """

    rows: DecodeRows | None
    chunks: Segments | None
    groups: tuple[Group, ...]
    tiles: TiledStep | None = None


def plan_attention(
    query_start: np.ndarray,
    context_lens: np.ndarray,
    block_table: np.ndarray,
    kv_cache: torch.Tensor,
    *,
    head_dim: int,
    dtype: torch.dtype,
    spans: Spans = (),
    window: int | None = None,
    spans_exceed_window: bool = False,
    use_native: bool = True,
    num_heads: int | None = None,
) -> AttentionPlan:
    """Lay out one step.

    Args:
        query_start: int32 `[S + 1]`; sequence s owns packed tokens
            `query_start[s] : query_start[s + 1]`, at least one.
        context_lens: int32 `[S]`; tokens of s whose KV was written by earlier steps.
        block_table: int32 `[S, B]`; unused entries are the null block 0.
        kv_cache: `[N, L, 2, H, P * D]`, for its shape and device; block 0 always holds zeros.
        head_dim: D.
        dtype: of the queries.
        spans: ranges with bidirectional attention; the tokens of each are computed already or in
            this step.
        window: tokens that a sliding-window layer sees, itself included. It limits only the past.
        spans_exceed_window: a token sees its whole span whatever the window is; otherwise, the
            window limits the past inside spans, too. Both masks are transformers'.
        use_native: use the native kernels if they are available.
        num_heads: H * G of the queries; a GPU's tiles hold whole groups.

    Raises:
        ValueError: on a GPU, a block is not in the cache, a sequence is longer than its row of
            the block table, a span ends after its sequence, or `num_heads` is missing.
    """
    if use_native and gpu.serves(kv_cache.device):
        tiles = plan_tiled(
            query_start, context_lens, block_table, kv_cache,
            spans=spans, window=window, spans_exceed_window=spans_exceed_window,
            head_dim=head_dim, dtype=dtype, num_heads=num_heads,
        )  # fmt: skip
        return AttentionPlan(None, None, (), tiles)
    num_queries = np.diff(query_start).astype(np.int64)
    num_kv = context_lens.astype(np.int64) + num_queries
    assert (num_queries > 0).all()
    layout = GroupLayout(kv_cache, head_dim, dtype)
    is_row = num_queries == 1
    if spans_exceed_window and window is not None:
        is_row &= ~_in_spans(context_lens, spans)  # the kernel of rows knows no spans
    decoding, chunked = np.flatnonzero(is_row), np.flatnonzero(~is_row)
    rows = chunks = None
    if use_native and len(decoding) and can_attend_decode(kv_cache, dtype):
        rows = plan_decode(
            query_start[decoding],
            num_kv[decoding],
            block_table[decoding],
            kv_cache,
            head_dim=head_dim,
            dtype=dtype,
            window=window,
        )
        decoding = decoding[:0]
    if use_native and len(chunked) and can_attend_blocks(kv_cache, dtype):
        chunks = _chunks(
            chunked, query_start, num_kv, block_table, spans, window, spans_exceed_window
        )
        chunked = chunked[:0]
    members = [*similar(decoding, num_kv), *([s] for s in chunked.tolist())]
    alone = len(members) == 1 and rows is None and chunks is None
    groups = []
    for seqs in members:
        in_order = alone and list(seqs) == list(range(len(seqs)))
        groups.append(
            layout.group(
                tokens=None if in_order else _tokens(query_start, num_queries, seqs),
                num_queries=int(num_queries[seqs[0]]),
                num_kv=num_kv[np.asarray(seqs)],
                blocks=block_table[np.asarray(seqs)],
                spans=[spans[s] if len(spans) else () for s in seqs],
                window=window,
                spans_exceed_window=spans_exceed_window,
            )
        )
    return AttentionPlan(rows, chunks, tuple(groups))


def _in_spans(positions: np.ndarray, spans: Spans) -> np.ndarray:
    """Whether the position `[S]` of each sequence is in one of its spans."""
    return np.array(
        [
            any(start <= position < stop for start, stop in (spans[s] if len(spans) else ()))
            for s, position in enumerate(positions.tolist())
        ],
        bool,
    )


def _chunks(
    seqs: np.ndarray,
    query_start: np.ndarray,
    num_kv: np.ndarray,
    block_table: np.ndarray,
    spans: Spans,
    window: int | None,
    spans_exceed_window: bool,
) -> Segments:
    """Sequences as segments."""
    first, end = np.zeros((2, query_start[-1]), np.int64)
    for s in seqs.tolist():
        at = slice(int(query_start[s]), int(query_start[s + 1]))
        positions = np.arange(num_kv[s] - (at.stop - at.start), num_kv[s])
        of_sequence = spans[s] if len(spans) else ()
        first[at], end[at] = seen_by(
            positions, spans=of_sequence, window=window, spans_exceed_window=spans_exceed_window
        )
    return plan_segments(
        np.diff(query_start)[seqs],
        num_kv[seqs],
        first,
        end,
        tokens=query_start[seqs],
        block_table=block_table[seqs],
    )


def _tokens(
    query_start: np.ndarray, num_queries: np.ndarray, seqs: Sequence[int]
) -> slice | np.ndarray:
    """Packed positions of the queries of a group."""
    if len(seqs) == 1:
        start = int(query_start[seqs[0]])
        return slice(start, start + int(num_queries[seqs[0]]))
    return query_start[np.asarray(seqs)].astype(np.int64)  # decoding: one query each

"""What one step of paged attention reads: decoding rows, and sequences in groups with their masks.

Shapes: S sequences, H KV heads, G query heads per KV head, D head size, P slots per block,
B blocks per sequence; the cache is `[N, L, 2, H, P * D]`.

Decoding sequences, one query each, are rows of one native call, and chunks of prefill are segments
of another. Where there is no such kernel, decoding sequences of similar length are a group, padded
to the longest, and a chunk is a group by itself. A plan is made once per step and used by all layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vlm_kernels import gpu
from vlm_kernels.decode_attention import DecodeRows, can_attend_decode, plan_decode
from vlm_kernels.flash_attention import can_attend_blocks
from vlm_kernels.kv_rows import block_size_of
from vlm_kernels.segments import Segments, plan_segments, seen_by
from vlm_kernels.tiled_attention import plan_tiled

if TYPE_CHECKING:
    from vlm_kernels.gpu.paged_attention import TiledStep

Spans = Sequence[Sequence[tuple[int, int]]]
"""Per sequence, the [start, end) ranges that attend in both directions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Sequences that are computed in one call.

    Attributes:
        tokens: packed positions of the queries, a slice or [S * Q] int64; None where they are the
            whole batch, in order.
        num_seqs: S.
        num_queries: Q, the same for all.
        num_kv: KV positions that are read, after `kv_pieces` are laid out.
        kv_pieces: [2 * S * H * B] int64; rows of layer 0 in the cache seen as
            `[N * L * 2 * H, P * D]`.
        unwritten: positions behind a sequence's end in the gathered `[2 * S * H * B * P]`; they
            hold anything, NaN included, and are zeroed. None where there are none.
        mask: additive, broadcast over `[S * H, G, Q, num_kv]`; None where every position is seen.
        causal: there is no mask; the queries are the last of the positions, each sees those up to
            itself, and they are all positions.
    """

    tokens: slice | torch.Tensor | None
    num_seqs: int
    num_queries: int
    num_kv: int
    kv_pieces: torch.Tensor
    unwritten: torch.Tensor | None
    mask: torch.Tensor | None
    causal: bool


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one step reads; the same for all layers of one window.

    Attributes:
        rows: decoding sequences, for their native kernel; None where there are none for it.
        chunks: of prefill, likewise.
        groups: all others.
        tiles: all of them, on a GPU; None elsewhere.
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
    use_native: bool = True,
    num_heads: int | None = None,
) -> AttentionPlan:
    """Lay out one step.

    Args:
        query_start: int32 `[S + 1]`; sequence s owns packed tokens
            `query_start[s] : query_start[s + 1]`, at least one.
        context_lens: int32 `[S]`; tokens of s whose KV was written by earlier steps.
        block_table: int32 `[S, B]`; unused entries are the null block 0.
        kv_cache: `[N, L, 2, H, P * D]`, for its shape and device; block 0 holds zeros, always.
        head_dim: D.
        dtype: of the queries.
        spans: ranges that attend in both directions; each lies in what is computed already or in
            this step.
        window: tokens that a sliding-window layer sees, itself included; it bounds the past alone,
            in spans too, as transformers' masks do.
        use_native: compute by the native kernels, where there are any.
        num_heads: H * G of the queries; a GPU's tiles hold whole groups.

    Raises:
        ValueError: on a GPU, a block is not in the cache, a span ends behind its sequence, or
            `num_heads` is missing.
    """
    if use_native and gpu.serves(kv_cache.device):
        tiles = plan_tiled(
            query_start, context_lens, block_table, kv_cache,
            spans=spans, window=window, num_heads=num_heads,
        )  # fmt: skip
        return AttentionPlan(None, None, (), tiles)
    num_queries = np.diff(query_start).astype(np.int64)
    num_kv = context_lens.astype(np.int64) + num_queries
    assert (num_queries > 0).all()
    layout = _Layout(kv_cache, head_dim, dtype)
    decoding, chunked = np.flatnonzero(num_queries == 1), np.flatnonzero(num_queries > 1)
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
        chunks = _chunks(chunked, query_start, num_kv, block_table, spans, window)
        chunked = chunked[:0]
    members = [*_similar(decoding, num_kv), *([s] for s in chunked.tolist())]
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
            )
        )
    return AttentionPlan(rows, chunks, tuple(groups))


def _chunks(
    seqs: np.ndarray,
    query_start: np.ndarray,
    num_kv: np.ndarray,
    block_table: np.ndarray,
    spans: Spans,
    window: int | None,
) -> Segments:
    """Sequences with several queries as segments."""
    first, end = np.zeros((2, query_start[-1]), np.int64)
    for s in seqs.tolist():
        at = slice(int(query_start[s]), int(query_start[s + 1]))
        positions = np.arange(num_kv[s] - (at.stop - at.start), num_kv[s])
        of_sequence = spans[s] if len(spans) else ()
        first[at], end[at] = seen_by(positions, spans=of_sequence, window=window)
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


class _Layout:
    """Turns positions into rows of the cache."""

    def __init__(self, kv_cache: torch.Tensor, head_dim: int, dtype: torch.dtype) -> None:
        self._num_layers, self._num_heads = kv_cache.shape[1], kv_cache.shape[3]
        self._block_size = block_size_of(kv_cache, head_dim)
        self._device, self._dtype = kv_cache.device, dtype

    def group(
        self,
        *,
        tokens: slice | np.ndarray | None,
        num_queries: int,
        num_kv: np.ndarray,
        blocks: np.ndarray,
        spans: Sequence[Sequence[tuple[int, int]]],
        window: int | None,
    ) -> Group:
        num_seqs, longest = len(num_kv), int(num_kv.max())
        num_blocks = -(-longest // self._block_size)
        used = np.arange(num_blocks) * self._block_size < num_kv[:, None]
        blocks = np.where(used, blocks[:, :num_blocks], 0).astype(np.int64)
        mask, causal = self._mask(num_queries, num_kv, spans, window)
        return Group(
            tokens=self._tensor(tokens) if isinstance(tokens, np.ndarray) else tokens,
            num_seqs=num_seqs,
            num_queries=num_queries,
            num_kv=longest,
            kv_pieces=self._pieces(blocks),
            unwritten=self._unwritten(num_kv, num_blocks),
            mask=mask,
            causal=causal,
        )

    def _pieces(self, blocks_SB: np.ndarray) -> torch.Tensor:
        """Row `((block * L + layer) * 2 + kv) * H + head` of layer 0, ordered [2, S, H, B]."""
        first = blocks_SB * (self._num_layers * 2 * self._num_heads)
        heads = np.arange(2 * self._num_heads).reshape(2, 1, self._num_heads, 1)
        return self._tensor((first[None, :, None, :] + heads).reshape(-1))

    def _unwritten(self, num_kv: np.ndarray, num_blocks: int) -> torch.Tensor | None:
        """Slots behind a sequence's end in its last block; blocks behind are the zero block."""
        if len(num_kv) == 1:
            return None  # the view of the gathered rows ends at the sequence's end
        size = num_blocks * self._block_size
        ends = -(-num_kv // self._block_size) * self._block_size
        at = [
            np.arange(s * size + n, s * size + e)
            for s, (n, e) in enumerate(zip(num_kv, ends, strict=True))
        ]
        flat = np.concatenate(at)
        if not len(flat):
            return None
        seq, position = np.divmod(flat, size)
        head = np.arange(2 * self._num_heads).reshape(2, self._num_heads, 1)
        kv, h = head // self._num_heads, head % self._num_heads
        rows = ((kv * len(num_kv) + seq) * self._num_heads + h) * size + position
        return self._tensor(rows.reshape(-1))

    def _mask(
        self,
        num_queries: int,
        num_kv: np.ndarray,
        spans: Sequence[Sequence[tuple[int, int]]],
        window: int | None,
    ) -> tuple[torch.Tensor | None, bool]:
        longest = int(num_kv.max())
        bounded = window is not None and longest > window
        if num_queries == 1 and not bounded and (num_kv == longest).all():
            return None, False
        is_plain = len(num_kv) == 1 and not bounded and not spans[0]
        if is_plain and num_queries == longest:
            return None, True
        seen = np.stack(
            [
                _visible(np.arange(n - num_queries, n), longest, window, spans[s])
                for s, n in enumerate(num_kv.tolist())
            ]
        )
        seen = (
            np.repeat(seen, self._num_heads, axis=0)[:, None] if len(num_kv) > 1 else seen[:, None]
        )
        mask = torch.zeros(seen.shape, dtype=self._dtype)
        mask.masked_fill_(torch.from_numpy(~seen), float("-inf"))
        return mask.to(self._device), False

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _visible(
    positions: np.ndarray, num_kv: int, window: int | None, spans: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Flags `[Q, num_kv]`: which KV positions each query position sees."""
    first, end = seen_by(positions, spans=spans, window=window)
    j = np.arange(num_kv)
    seen: np.ndarray = (j >= first[:, None]) & (j < end[:, None])
    return seen


def _similar(seqs: np.ndarray, num_kv: np.ndarray) -> list[list[int]]:
    """Split decoding sequences so that padding to the longest at most doubles what is read."""
    groups: list[list[int]] = []
    if not len(seqs):
        return groups
    if num_kv[seqs].max() <= 2 * num_kv[seqs].min():
        return [seqs.tolist()]
    for s in seqs[np.argsort(-num_kv[seqs], kind="stable")].tolist():
        if groups and 2 * num_kv[s] >= num_kv[groups[-1][0]]:
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups

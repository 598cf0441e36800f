"""Sequences that torch computes together if no kernel supports them: in groups, with masks.

Decoding sequences of similar length are padded to the longest. A chunk of prefill is a group by
itself. Shapes: S sequences, H KV heads, G query heads per KV head, D head size, P slots per block,
B blocks per sequence; the cache is `[N, L, 2, H, P * D]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from vlm_kernels.kv_rows import TWO_KINDS, block_size_of
from vlm_kernels.mixed_blocks import num_parts, split_entries
from vlm_kernels.segments import seen_by

Spans = Sequence[Sequence[tuple[int, int]]]
"""Per sequence, the [start, end) ranges that attend in both directions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Sequences that are computed in one call.

    Attributes:
        tokens: packed positions of the queries, a slice or [S * Q] int64; None if they are the
            whole batch, in order.
        num_seqs: S.
        num_queries: Q, the same for all.
        num_kv: KV positions that are read, after `kv_pieces` are gathered.
        kv_pieces: [2 * S * H * B] int64; rows of layer 0 in the cache viewed as
            `[N * L * 2 * H, P * D]`.
        unwritten: positions after a sequence's end in the gathered `[2 * S * H * B * P]`. Their
            content is undefined, possibly NaN, so they are zeroed. None if there are none.
        mask: additive, broadcast over `[S * H, G, Q, num_kv]`; None if every position is visible.
        entries: [2 * S * H * B] int64, the block table's entry of each piece; None if the cache has
            blocks of one kind.
        causal: no mask is needed: the queries are the last positions, each sees those up to itself,
            and they are all positions.
    """

    tokens: slice | torch.Tensor | None
    num_seqs: int
    num_queries: int
    num_kv: int
    kv_pieces: torch.Tensor
    unwritten: torch.Tensor | None
    mask: torch.Tensor | None
    causal: bool
    entries: np.ndarray | None = None


class GroupLayout:
    """Converts positions to rows of the cache."""

    def __init__(self, kv_cache: torch.Tensor, head_dim: int, dtype: torch.dtype) -> None:
        self._num_layers, self._num_heads = kv_cache.shape[1], kv_cache.shape[3]
        self._block_size = block_size_of(kv_cache, head_dim)
        self._num_parts = num_parts(kv_cache)
        self._is_mixed = kv_cache.dtype in TWO_KINDS
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
        spans_exceed_window: bool = False,
    ) -> Group:
        """The group of sequences with Q queries each; `blocks` is `[S, B]`, `num_kv` `[S]`."""
        num_seqs, longest = len(num_kv), int(num_kv.max())
        num_blocks = -(-longest // self._block_size)
        used = np.arange(num_blocks) * self._block_size < num_kv[:, None]
        blocks = np.where(used, blocks[:, :num_blocks], 0).astype(np.int64)
        entries = None
        if self._is_mixed:
            of_heads = np.broadcast_to(
                blocks[None, :, None, :], (2, num_seqs, self._num_heads, num_blocks)
            )
            entries = of_heads.reshape(-1)
            blocks, _, _ = split_entries(blocks, self._num_parts)
        mask, causal = self._mask(num_queries, num_kv, spans, window, spans_exceed_window)
        return Group(
            tokens=self._tensor(tokens) if isinstance(tokens, np.ndarray) else tokens,
            num_seqs=num_seqs,
            num_queries=num_queries,
            num_kv=longest,
            kv_pieces=self._pieces(blocks),
            unwritten=self._unwritten(num_kv, num_blocks),
            mask=mask,
            causal=causal,
            entries=entries,
        )

    def _pieces(self, blocks_SB: np.ndarray) -> torch.Tensor:
        """Row `((block * L + layer) * 2 + kv) * H + head` of layer 0, ordered [2, S, H, B]."""
        first = blocks_SB * (self._num_layers * 2 * self._num_heads)
        heads = np.arange(2 * self._num_heads).reshape(2, 1, self._num_heads, 1)
        return self._tensor((first[None, :, None, :] + heads).reshape(-1))

    def _unwritten(self, num_kv: np.ndarray, num_blocks: int) -> torch.Tensor | None:
        """Slots after a sequence's end in its last block; later blocks are the null block."""
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
        spans_exceed_window: bool,
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
                _visible(
                    np.arange(n - num_queries, n), longest, window, spans[s], spans_exceed_window
                )
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
    positions: np.ndarray,
    num_kv: int,
    window: int | None,
    spans: Sequence[tuple[int, int]],
    spans_exceed_window: bool,
) -> np.ndarray:
    """Flags `[Q, num_kv]`: which KV positions each query position sees."""
    first, end = seen_by(
        positions, spans=spans, window=window, spans_exceed_window=spans_exceed_window
    )
    j = np.arange(num_kv)
    seen: np.ndarray = (j >= first[:, None]) & (j < end[:, None])
    return seen


def similar(seqs: np.ndarray, num_kv: np.ndarray) -> list[list[int]]:
    """Split decoding sequences, so that padding at most doubles the positions that are read."""
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

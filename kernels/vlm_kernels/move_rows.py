"""Move rows:  cache[target of r] = cache[source of r] for r = 0, 1, ..., in all layers.

Shapes: R rows to copy, N blocks, L layers, H KV heads, D head size, P slots per block. A slot is
`block * P + offset`; the cache is `[N, L, 2, H, P * D]`, inner order `[P, D]`; for int8 and float8,
scales follow (`kv_rows`) and are copied too. Rows are copied as bytes, so nothing is rounded.

Keys are stored after rotation: a moved row keeps its position.
"""

from __future__ import annotations

import numpy as np
import torch

from vlm_kernels.kv_rows import LIMITS, SCALE_BYTES, block_size_of

MAX_BYTES = 16 << 20
"""Rows that are copied at once have at most so many bytes: these are in memory twice."""


def move_rows_reference(
    kv_cache: torch.Tensor, sources_R: np.ndarray, targets_R: np.ndarray, *, head_dim: int
) -> None:
    """The definition: row by row, in place."""
    for part in _parts(kv_cache, head_dim):
        for source, target in zip(sources_R.tolist(), targets_R.tolist(), strict=True):
            (block, offset), (to, at) = (divmod(slot, part.shape[-2]) for slot in (source, target))
            part[to, :, :, :, at] = part[block, :, :, :, offset]


def move_rows(
    kv_cache: torch.Tensor, sources_R: np.ndarray, targets_R: np.ndarray, *, head_dim: int
) -> None:
    """Copy rows within the cache, in place.

    A row may be copied to a slot that an earlier row, or itself, is copied from.

    Args:
        kv_cache: `[N, L, 2, H, P * D]`, contiguous.
        sources_R: int64 slots.
        targets_R: int64 slots, all different; none is the source of a later row, unless it is that
            row's target too.
        head_dim: D.

    Raises:
        ValueError: a shape, type or slot is wrong.
    """
    block_size = block_size_of(kv_cache, head_dim)
    _check(kv_cache, sources_R, targets_R, num_slots=len(kv_cache) * block_size)
    row_bytes = kv_cache[0].numel() * kv_cache.element_size() // block_size
    count = max(1, MAX_BYTES // row_bytes)
    for start in range(0, len(sources_R), count):
        of = slice(start, start + count)
        (block, offset), (to, at) = (
            (torch.from_numpy(x).to(kv_cache.device) for x in np.divmod(slots[of], block_size))
            for slots in (sources_R, targets_R)
        )
        for part in _parts(kv_cache, head_dim):
            # two index tensors with slices between them: the indexed axis comes first
            part[to, :, :, :, at] = part[block, :, :, :, offset]


def _parts(kv_cache: torch.Tensor, head_dim: int) -> list[torch.Tensor]:
    """The bytes of rows, and those of their scales if they have any: `[N, L, 2, H, P, bytes]`."""
    block_size = block_size_of(kv_cache, head_dim)
    cache = kv_cache.view(torch.uint8)
    row_bytes = head_dim * kv_cache.element_size()
    sizes = [row_bytes, SCALE_BYTES] if kv_cache.dtype in LIMITS else [row_bytes]
    parts, start = [], 0
    for size in sizes:
        piece = cache[..., start : start + size * block_size]
        parts.append(piece.view(*piece.shape[:-1], block_size, size))
        start += size * block_size
    return parts


def _check(
    kv_cache: torch.Tensor, sources_R: np.ndarray, targets_R: np.ndarray, *, num_slots: int
) -> None:
    if kv_cache.dim() != 5 or not kv_cache.is_contiguous():
        raise ValueError(f"kv_cache {tuple(kv_cache.shape)}: must be contiguous [N, L, 2, H, P*D]")
    for name, slots in (("sources", sources_R), ("targets", targets_R)):
        if slots.dtype != np.int64 or slots.shape != (len(sources_R),):
            raise ValueError(f"{name} are {slots.dtype} {slots.shape}: must be int64, one each")
        if len(slots) and (slots.min() < 0 or slots.max() >= num_slots):
            raise ValueError(f"{name}: a slot is not in 0 to {num_slots - 1}")
    if len(np.unique(targets_R)) != len(targets_R):
        raise ValueError("targets: a slot is written twice")

"""What one step of paged attention reads, on the device: tiles, tables and intervals.

plan_tiles(...)      of any step: cut on the host, and copied
decode_tiles(...)    of a captured step of decode: arrays that are filled before each replay
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from vlm_kernels import gpu
from vlm_kernels.gpu.attention_tiles import decode_rows, intervals, launches, num_splits


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """Tiles on the device; `num_splits` programs share each."""

    tiles: torch.Tensor
    num_rows: int
    num_splits: int


@dataclasses.dataclass(frozen=True, slots=True)
class CacheShape:
    """What a plan was checked against, so that no other cache is read by it."""

    num_blocks: int
    num_kv_heads: int
    block_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class TiledStep:
    """What one step reads, on the device, the same for all layers of one window.

    Attributes:
        launches: decoding sequences, chunks of prefill, or both.
        block_table: int32 `[S, B]`.
        first: int32 `[T]`, the least position that each query sees.
        limit: int32 `[T]`, one behind the greatest.
        num_groups: G, whole groups in each tile.
        cache: that `block_table` is of.
    """

    launches: tuple[Launch, ...]
    block_table: torch.Tensor
    first: torch.Tensor
    limit: torch.Tensor
    num_groups: int
    cache: CacheShape


def plan_tiles(
    query_start: np.ndarray,
    context_lens: np.ndarray,
    block_table: np.ndarray,
    *,
    num_groups: int,
    cache: CacheShape,
    prefill_rows: int,
    device: torch.device,
    spans: Sequence[Sequence[tuple[int, int]]] = (),
    window: int | None = None,
) -> TiledStep:
    """Cut one step into tiles and bring them to the device, in one copy.

    Args:
        query_start: as of `plan_attention`, checked, like what follows.
        context_lens: likewise.
        block_table: likewise.
        num_groups: G.
        cache: that `block_table` is of.
        prefill_rows: of a tile of prefill (`attention_shapes`).
        device: where the step is computed.
        spans: as of `plan_attention`.
        window: likewise.

    Raises:
        ValueError: a span ends behind its sequence.
    """
    first, limit = intervals(query_start, context_lens, spans=spans, window=window)
    cut = launches(query_start, first, limit, num_groups=num_groups, prefill_rows=prefill_rows)
    arrays = [first, limit, block_table, *(launch.tiles for launch in cut)]
    first_T, limit_T, table, *tiles = _to_device(arrays, device)
    processors = gpu.num_processors(device)
    return TiledStep(
        launches=tuple(
            Launch(
                tiles=on_device,
                num_rows=launch.num_rows,
                num_splits=num_splits(
                    len(launch.tiles) * cache.num_kv_heads,
                    launch.longest,
                    num_processors=processors,
                ),
            )
            for launch, on_device in zip(cut, tiles, strict=True)
        ),
        block_table=table,
        first=first_T,
        limit=limit_T,
        num_groups=num_groups,
        cache=cache,
    )


def decode_tiles(
    first_S: torch.Tensor,
    limit_S: torch.Tensor,
    table_SB: torch.Tensor,
    *,
    num_groups: int,
    cache: CacheShape,
) -> TiledStep:
    """One query per sequence, of arrays on the device that are filled later; nothing is copied.

    Sequences are split as if each filled its row of the table: of a shorter one the last splits are
    empty.

    Args:
        first_S: int32, the least position that each query sees.
        limit_S: int32, one behind the greatest.
        table_SB: int32.
        num_groups: G.
        cache: that the table is of.
    """
    num_seqs, device = len(first_S), first_S.device
    seqs = torch.arange(num_seqs, dtype=torch.int32, device=device)
    splits = num_splits(
        num_seqs * cache.num_kv_heads,
        table_SB.shape[1] * cache.block_size,
        num_processors=gpu.num_processors(device),
    )
    launch = Launch(
        tiles=torch.stack([seqs, seqs, torch.ones_like(seqs)], dim=1),
        num_rows=decode_rows(num_groups),
        num_splits=splits,
    )
    return TiledStep((launch,), table_SB, first_S, limit_S, num_groups, cache)


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """As int32 in one buffer, so that a step is one copy."""
    flat = np.concatenate([array.astype(np.int32, copy=False).ravel() for array in arrays])
    buffer = torch.from_numpy(flat)
    if device.type == "cuda":
        buffer = buffer.pin_memory().to(device, non_blocking=True)
    parts = torch.split(buffer, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

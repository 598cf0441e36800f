"""Paged attention on a GPU: checks arguments before it launches `gpu/paged_attention.py`.

    plan_tiled(...)     once per step: blocks, spans and heads
    attend_tiled(...)   once per layer: queries and cache

The plan of a captured decode step is made once, from arrays that are filled before each replay:
plan_captured(...), then check_blocks(...) with the new content.

A wrong index on a GPU reads another request's data, or ends the process. Therefore nothing is
launched with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vlm_kernels import gpu
from vlm_kernels.kv_rows import block_size_of, check_cache_type, layer_views

if TYPE_CHECKING:
    from vlm_kernels.attention_plan import AttentionPlan
    from vlm_kernels.gpu.attention_step import CacheShape, TiledStep


def plan_tiled(
    query_start: np.ndarray,
    context_lens: np.ndarray,
    block_table: np.ndarray,
    kv_cache: torch.Tensor,
    *,
    spans: Sequence[Sequence[tuple[int, int]]],
    window: int | None,
    spans_exceed_window: bool,
    head_dim: int,
    dtype: torch.dtype,
    num_heads: int | None,
) -> TiledStep:
    """Lay out one step; arguments as of `plan_attention`.

    Raises:
        ValueError: a block is not in the cache, a sequence is longer than its row of the block
            table or has no query, a span ends after its sequence, heads do not form whole groups,
            a window is empty, or no tile fits into the GPU's shared memory.
    """
    from vlm_kernels.gpu.attention_shapes import Heads
    from vlm_kernels.gpu.attention_step import plan_tiles

    num_groups = _num_groups(num_heads, kv_cache)
    num_queries = np.diff(query_start)
    if query_start[0] != 0 or (num_queries < 1).any() or (context_lens < 0).any():
        raise ValueError(
            f"plan_attention: query_start {query_start.tolist()}, context_lens "
            f"{context_lens.tolist()}: each sequence needs a query, and no negative past"
        )
    if window is not None and window < 1:
        raise ValueError(f"plan_attention: a window of {window} tokens sees nothing")
    num_kv = context_lens + num_queries
    check_blocks(num_kv, block_table, kv_cache, head_dim=head_dim)
    shared = gpu.shared_memory_bytes(kv_cache.device)
    tile = Heads(head_dim, dtype.itemsize).prefill_shape(limit=shared)
    return plan_tiles(
        query_start, context_lens, block_table, num_groups=num_groups,
        cache=_shape(kv_cache, head_dim), prefill_rows=tile.rows, device=kv_cache.device,
        spans=spans, window=window, spans_exceed_window=spans_exceed_window,
    )  # fmt: skip


def plan_captured(
    first_S: torch.Tensor,
    limit_S: torch.Tensor,
    table_SB: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    head_dim: int,
    num_heads: int,
) -> AttentionPlan:
    """Lay out a decode step for a captured graph, whose arrays are filled before each replay.

    Args:
        first_S: int32 on the cache's device, the first position that each sequence's query sees.
        limit_S: int32 on the cache's device, the last visible position plus 1. Padding is a query
            that sees one position of the null block, which is zero: limit 1, table row 0.
        table_SB: int32 on the cache's device, as for `plan_attention`; B limits later lengths.
        kv_cache: as of `plan_attention`.
        head_dim: D.
        num_heads: H * G.

    Raises:
        ValueError: heads do not form whole groups, or a type, shape or device is wrong.
    """
    from vlm_kernels.attention_plan import AttentionPlan
    from vlm_kernels.gpu.attention_step import decode_tiles

    num_groups = _num_groups(num_heads, kv_cache)
    for name, array in (("first", first_S), ("limit", limit_S), ("table", table_SB)):
        fits = array.dtype == torch.int32 and array.is_contiguous() and len(array) == len(first_S)
        if not fits or array.device != kv_cache.device:
            raise ValueError(
                f"plan_captured: {name} is {array.dtype} {tuple(array.shape)} on {array.device}"
            )
    tiles = decode_tiles(
        first_S, limit_S, table_SB, num_groups=num_groups, cache=_shape(kv_cache, head_dim)
    )
    return AttentionPlan(None, None, (), tiles)


def check_blocks(
    num_kv: np.ndarray, block_table: np.ndarray, kv_cache: torch.Tensor, *, head_dim: int
) -> None:
    """Raise ValueError if a block is not in the cache, or a sequence longer than its row."""
    num_blocks = len(kv_cache)
    if block_table.size and not 0 <= block_table.min() <= block_table.max() < num_blocks:
        raise ValueError(f"plan_attention: a block is not in 0 to {num_blocks - 1}")
    num_slots = block_table.shape[1] * block_size_of(kv_cache, head_dim)
    if len(block_table) != len(num_kv) or (num_kv > num_slots).any():
        raise ValueError(
            f"plan_attention: {len(num_kv)} sequences of up to {num_kv.max()} positions, a block "
            f"table {block_table.shape} of {num_slots} slots a row"
        )


def _shape(kv_cache: torch.Tensor, head_dim: int) -> CacheShape:
    from vlm_kernels.gpu.attention_step import CacheShape

    return CacheShape(len(kv_cache), kv_cache.shape[3], block_size_of(kv_cache, head_dim))


def _num_groups(num_heads: int | None, kv_cache: torch.Tensor) -> int:
    """Query heads per KV head; raises ValueError if the heads do not form whole groups."""
    num_kv_heads = kv_cache.shape[3]
    if num_heads is None or num_heads % num_kv_heads:
        raise ValueError(f"plan_attention: {num_heads} query heads, {num_kv_heads} KV heads")
    return num_heads // num_kv_heads


def attend_tiled(
    q_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    tiles: TiledStep,
    *,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attend; arguments as of `paged_attention`.

    Raises:
        ValueError: q, cache, layer and plan do not match.
    """
    from vlm_kernels.gpu.paged_attention import paged_attention

    if q_THD.dim() != 3 or kv_cache.dim() != 5 or kv_cache.shape[2] != 2:
        raise ValueError(
            f"paged_attention: q {tuple(q_THD.shape)}, kv_cache {tuple(kv_cache.shape)}: must be "
            f"[T, H * G, D] and [N, L, 2, H, P * D]"
        )
    num_tokens, num_heads, head_dim = q_THD.shape
    if not 0 <= layer < kv_cache.shape[1] or not kv_cache.is_contiguous():
        raise ValueError(
            f"paged_attention: kv_cache {tuple(kv_cache.shape)} with strides {kv_cache.stride()}, "
            f"layer {layer}"
        )
    expected = (len(tiles.first), tiles.cache.num_kv_heads * tiles.num_groups)
    if (num_tokens, num_heads) != expected:
        raise ValueError(
            f"paged_attention: q is {tuple(q_THD.shape)}; the plan is of {expected[0]} tokens and "
            f"{expected[1]} heads"
        )
    gpu.check_floats("paged_attention: q", q_THD)
    check_cache_type(kv_cache)
    if q_THD.stride(2) != 1 or not q_THD.device == kv_cache.device == tiles.first.device:
        raise ValueError(
            f"paged_attention: q has strides {q_THD.stride()} on {q_THD.device}; the last must be "
            f"1, the cache is on {kv_cache.device}, the plan on {tiles.first.device}"
        )
    if _shape(kv_cache, head_dim) != tiles.cache:
        raise ValueError(
            f"paged_attention: kv_cache is {_shape(kv_cache, head_dim)}, the plan is of "
            f"{tiles.cache}"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"paged_attention: softcap {softcap} must be above 0")
    kv, factors = layer_views(kv_cache, layer, head_dim)
    return paged_attention(q_THD, kv, factors, tiles, scale=scale, softcap=softcap)

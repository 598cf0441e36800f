"""Received attention in Triton:  a_j = 1 / (H n) sum_h sum_i 2^(s_ij - l_i).

Shapes: T packed tokens, H heads, D head size, C segments; i runs over the segment
`[cu_c, cu_(c+1))` of j, which has n tokens. s_ij = scale * log2(e) * q_i . k_j, and l_i is the
logarithm of row i's sum of 2^s_ik, in base 2.

Reference: `vlm_kernels.received_attention.received_attention_reference`.

Tiles: of segments, as in `varlen_attention`. One launch computes l `[H, T]`: TILE_M queries of a
head, in a loop over their keys. Another computes shares `[H, T]`: TILE_M keys of a head, in a loop
over their queries. Both read the same products in the other order, so nothing is added by atomics,
and results are the same in each call. torch adds the heads.

Scores and sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_kernels import gpu
from vlm_kernels.gpu.attention_shapes import Heads, padded
from vlm_kernels.gpu.configs import config
from vlm_kernels.gpu.functions import LOG2_E, add_scores, segment_of

DEFAULT = {"num_warps": 4, "num_stages": 2}


@triton.jit
def _tile(x_ptr, row, live, head, x_token, x_head, D: tl.constexpr, TILE_D: tl.constexpr):
    """Rows `[TILE, TILE_D]` of one head, 0 outside."""
    column = tl.arange(0, TILE_D)
    here = x_ptr + row.to(tl.int64)[:, None] * x_token + head * x_head + column[None]
    return tl.load(here, mask=live[:, None] & (column < D)[None], other=0.0)


@triton.jit
def _logarithms(
    q_ptr, k_ptr, l_ptr, cu_ptr, scale, num_segments, num_tokens,
    q_token, q_head, k_token, k_head,
    D: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Grid: [tiles, heads]."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, end, first = segment_of(tile, cu_ptr, num_segments, num_tokens, TILE_M)
    row = first + tl.arange(0, TILE_M)
    live = (row >= start) & (row < end)
    q = _tile(q_ptr, row, live, head, q_token, q_head, D, TILE_D)
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    begin = tl.where(tl.max(live.to(tl.int32), 0) > 0, start, end)
    for at in range(begin, end, TILE_N):
        key = at + tl.arange(0, TILE_N)
        seen = key < end
        k = _tile(k_ptr, key, seen, head, k_token, k_head, D, TILE_D)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        x = tl.where(seen[None], x, float("-inf"))
        _, _, top, total = add_scores(x, top, total)
    total = tl.where(live, total, 1.0)
    tl.store(l_ptr + head * num_tokens + row, top + tl.log2(total), mask=live)


@triton.jit
def _receive(
    q_ptr, k_ptr, l_ptr, a_ptr, cu_ptr, scale, num_segments, num_tokens,
    q_token, q_head, k_token, k_head,
    D: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Grid: [tiles, heads]."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, end, first = segment_of(tile, cu_ptr, num_segments, num_tokens, TILE_M)
    key = first + tl.arange(0, TILE_M)
    live = (key >= start) & (key < end)
    k = _tile(k_ptr, key, live, head, k_token, k_head, D, TILE_D)
    acc = tl.zeros([TILE_M], tl.float32)
    begin = tl.where(tl.max(live.to(tl.int32), 0) > 0, start, end)
    for at in range(begin, end, TILE_N):
        row = at + tl.arange(0, TILE_N)
        asks = row < end
        q = _tile(q_ptr, row, asks, head, q_token, q_head, D, TILE_D)
        x = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2_E)
        # a row behind the segment has the weight 2^-inf
        logarithm = tl.load(l_ptr + head * num_tokens + row, mask=asks, other=float("inf"))
        acc += tl.sum(tl.exp2(x - logarithm[None]), 1)
    share = acc / (tl.num_programs(1) * tl.maximum(end - start, 1)).to(tl.float32)
    tl.store(a_ptr + head * num_tokens + key, share, mask=live)


def received_attention(
    q_THD: torch.Tensor, k_THD: torch.Tensor, cu_C1: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Launch.

    Args:
        q_THD: `[T, H, D]`; inner axes have stride 1, here and below.
        k_THD: of the same shape.
        cu_C1: int32 `[C + 1]` on the device, rising from 0 to T; an empty segment is allowed.
        scale: of scores.

    Returns:
        float32 `[T]`; tokens of no segment are 0.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    shares_HT = torch.zeros(num_heads, num_tokens, device=q_THD.device)
    if num_tokens == 0:
        return shares_HT.sum(0)
    logarithms_HT = q_THD.new_empty((num_heads, num_tokens), dtype=torch.float32)
    heads = Heads(head_dim, q_THD.itemsize, num_copies=2)
    fits = heads.prefill_shape(limit=gpu.shared_memory_bytes(q_THD.device))
    default = {**DEFAULT, "TILE_M": fits.rows, "TILE_N": fits.keys}
    chosen = config("received_attention", f"d{head_dim}", q_THD.device, default)
    grid = num_tokens // chosen["TILE_M"] + len(cu_C1) - 1, num_heads
    sizes = scale, len(cu_C1) - 1, num_tokens, *q_THD.stride()[:2], *k_THD.stride()[:2]
    shape = {"D": head_dim, "TILE_D": padded(head_dim), **chosen}
    _logarithms[grid](q_THD, k_THD, logarithms_HT, cu_C1, *sizes, **shape)
    _receive[grid](q_THD, k_THD, logarithms_HT, shares_HT, cu_C1, *sizes, **shape)
    return shares_HT.sum(0)

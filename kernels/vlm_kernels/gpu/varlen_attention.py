"""Attention inside segments in Triton:  o_i = sum_j softmax_j(scale * q_i . k_j) v_j.

Shapes: T packed tokens, H heads, D head size, C segments; j runs over the segment
`[cu_c, cu_(c+1))` of i.

Reference: `vlm_kernels.varlen_attention.varlen_attention_reference`; tiles are FlashAttention's
(arXiv 2205.14135).

Tiles: a program computes TILE_M queries of one segment and one head, and loops over the keys of
the segment, TILE_N at a time, with an online softmax. It finds its segment by `segment_of`. A
program without a tile ends at once.

Scores and sums are float32. Weights are rounded to q's type before they multiply values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_kernels import gpu
from vlm_kernels.gpu.attention_shapes import Heads, Shape, padded
from vlm_kernels.gpu.configs import config
from vlm_kernels.gpu.functions import LOG2_E, add_scores, segment_of

DEFAULT = {"num_warps": 4, "num_stages": 3}


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, o_ptr, cu_ptr, scale, num_segments, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head,
    D: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Grid: [tiles, heads]."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    start, end, first = segment_of(tile, cu_ptr, num_segments, num_tokens, TILE_M)
    row = first + tl.arange(0, TILE_M)
    live = (row >= start) & (row < end)
    column = tl.arange(0, TILE_D)
    inside = column < D
    stored = live[:, None] & inside[None]
    token = row.to(tl.int64)
    q_here = q_ptr + token[:, None] * q_token + head * q_head + column[None]
    q = tl.load(q_here, mask=stored, other=0.0)  # [TILE_M, TILE_D]

    top = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, TILE_D], tl.float32)
    # a tile without rows has no loop
    begin = tl.where(tl.max(live.to(tl.int32), 0) > 0, start, end)
    for at in range(begin, end, TILE_N):
        key = (at + tl.arange(0, TILE_N)).to(tl.int64)
        seen = key < end
        filled = seen[:, None] & inside[None]
        k_here = k_ptr + key[:, None] * k_token + head * k_head + column[None]
        k = tl.load(k_here, mask=filled, other=0.0)  # [TILE_N, TILE_D]
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        x = tl.where(seen[None], x, float("-inf"))
        weight, shrink, top, total = add_scores(x, top, total)
        v_here = v_ptr + key[:, None] * v_token + head * v_head + column[None]
        v = tl.load(v_here, mask=filled, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weight.to(q.dtype), v, input_precision="ieee")
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out = o_ptr + (token[:, None] * num_heads + head) * D + column[None]
    tl.store(out, acc.to(q.dtype), mask=stored)


def varlen_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cu_C1: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Launch.

    Args:
        q_THD: `[T, H, D]`; inner axes have stride 1, here and below.
        k_THD: of the same shape.
        v_THD: of the same shape.
        cu_C1: int32 `[C + 1]` on the device, rising from 0 to T; an empty segment is allowed.
        scale: of scores.

    Returns:
        `[T, H, D]` contiguous, every element written.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    o_THD = q_THD.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return o_THD
    num_segments = len(cu_C1) - 1
    heads = Heads(head_dim, q_THD.itemsize, num_copies=2)
    shared = gpu.shared_memory_bytes(q_THD.device)
    fits = heads.prefill_shape(limit=shared)
    fitting = {"TILE_M": fits.rows, "TILE_N": fits.keys}
    chosen = config("varlen_attention", f"d{head_dim}", q_THD.device, {**DEFAULT, **fitting})
    if heads.shared_bytes(Shape(chosen["TILE_M"], chosen["TILE_N"])) > shared:
        chosen = {**chosen, **fitting}  # the configuration is for another type
    tiles = num_tokens // chosen["TILE_M"] + num_segments
    _attend[tiles, num_heads](
        q_THD, k_THD, v_THD, o_THD, cu_C1, scale, num_segments, num_tokens,
        q_THD.stride(0), q_THD.stride(1), k_THD.stride(0), k_THD.stride(1),
        v_THD.stride(0), v_THD.stride(1),
        D=head_dim, TILE_D=padded(head_dim), **chosen,
    )  # fmt: skip
    return o_THD

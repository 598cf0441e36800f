"""Attention mass in Triton:  a_j = sum_t sum_h 2^(s_tj - l_t),  l_t = log2 sum_j 2^s_tj.

Shapes: R rows (T queries of the G heads that share a KV head), H KV heads, D head size, n tokens, P
slots per block; s_tj = scale * log2(e) * q_t . k_j for j <= n - T + t. For quantised KV,
`k_j = ks_j * K_j`, with one factor per token and head.

Reference: `vlm_kernels.attention_mass.attention_mass_reference`.

Tiles: one launch computes l `[H, R]`: TILE_M rows of a KV head, in a loop over the tokens. Another
computes shares `[H, n]`: TILE_N tokens of a KV head, in a loop over the rows. Both read the same
products in the other order, so nothing is added by atomics, and results are the same in each call.
torch adds the heads.

Scores and sums are float32. Products of float32 are IEEE, never TF32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_kernels import gpu
from vlm_kernels.gpu.attention_shapes import Heads, padded
from vlm_kernels.gpu.configs import config
from vlm_kernels.gpu.functions import LOG2_E, add_scores

DEFAULT = {"num_warps": 4, "num_stages": 2}


@triton.jit
def _rows(
    q_ptr, row, head, num_rows, q_token, q_head,
    G: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """The queries `[TILE, TILE_D]` of rows (token, head of the group), 0 outside."""
    column = tl.arange(0, TILE_D)
    token = (row // G).to(tl.int64)
    here = q_ptr + token[:, None] * q_token + (head * G + row % G)[:, None] * q_head
    inside = (row < num_rows)[:, None] & (column < D)[None]
    return tl.load(here + column[None], mask=inside, other=0.0)


@triton.jit
def _keys(
    kv_ptr, factor_ptr, table_ptr, position, head, num_tokens, dtype: tl.constexpr,
    block_stride, head_stride, slot_stride, factor_block, factor_head, factor_slot,
    P: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr, IS_QUANTISED: tl.constexpr,
):  # fmt: skip
    """The keys `[TILE, TILE_D]` of positions, 0 outside, and their factors `[TILE]`."""
    column = tl.arange(0, TILE_D)
    written = position < num_tokens
    block = tl.load(table_ptr + position // P, mask=written, other=0).to(tl.int64)
    place = block * block_stride + head * head_stride + position % P * slot_stride
    filled = written[:, None] & (column < D)[None]
    k = tl.load(kv_ptr + place[:, None] + column[None], mask=filled, other=0.0)
    factors = tl.full(position.shape, 1.0, tl.float32)
    if IS_QUANTISED:
        at = factor_ptr + block * factor_block + head * factor_head + position % P * factor_slot
        factors = tl.load(at, mask=written, other=0.0).to(tl.float32)
        k = k.to(tl.float32)
    return k.to(dtype), factors


@triton.jit
def _logarithms(
    q_ptr, kv_ptr, factor_ptr, table_ptr, l_ptr, scale, num_rows, num_tokens, q_token, q_head,
    block_stride, head_stride, slot_stride, factor_block, factor_head, factor_slot,
    G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr, IS_QUANTISED: tl.constexpr,
):  # fmt: skip
    """Grid: [tiles of rows, KV heads]."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    q = _rows(q_ptr, row, head, num_rows, q_token, q_head, G, D, TILE_D)
    last = num_tokens - num_rows // G + row // G  # the position of a row's own token
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    for at in range(0, num_tokens, TILE_N):
        position = at + tl.arange(0, TILE_N)
        k, factors = _keys(
            kv_ptr, factor_ptr, table_ptr, position, head, num_tokens, q.dtype,
            block_stride, head_stride, slot_stride, factor_block, factor_head, factor_slot,
            P, D, TILE_D, IS_QUANTISED,
        )  # fmt: skip
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E) * factors[None]
        seen = (position[None] <= last[:, None]) & (position < num_tokens)[None]
        _, _, top, total = add_scores(tl.where(seen, x, float("-inf")), top, total)
    live = row < num_rows
    total = tl.where(live, total, 1.0)
    tl.store(l_ptr + head * num_rows + row, top + tl.log2(total), mask=live)


@triton.jit
def _receive(
    q_ptr, kv_ptr, factor_ptr, table_ptr, l_ptr, a_ptr, scale, num_rows, num_tokens,
    q_token, q_head,
    block_stride, head_stride, slot_stride, factor_block, factor_head, factor_slot,
    G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr, IS_QUANTISED: tl.constexpr,
):  # fmt: skip
    """Grid: [tiles of tokens, KV heads]."""
    head = tl.program_id(1).to(tl.int64)
    position = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    k, factors = _keys(
        kv_ptr, factor_ptr, table_ptr, position, head, num_tokens, q_ptr.dtype.element_ty,
        block_stride, head_stride, slot_stride, factor_block, factor_head, factor_slot,
        P, D, TILE_D, IS_QUANTISED,
    )  # fmt: skip
    acc = tl.zeros([TILE_N], tl.float32)
    for at in range(0, num_rows, TILE_M):
        row = at + tl.arange(0, TILE_M)
        q = _rows(q_ptr, row, head, num_rows, q_token, q_head, G, D, TILE_D)
        x = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2_E) * factors[:, None]
        # a row behind the last has the weight 2^-inf
        logarithm = tl.load(l_ptr + head * num_rows + row, mask=row < num_rows, other=float("inf"))
        last = num_tokens - num_rows // G + row // G
        weight = tl.exp2(x - logarithm[None])
        acc += tl.sum(tl.where(position[:, None] <= last[None], weight, 0.0), 1)
    tl.store(a_ptr + head * num_tokens + position, acc, mask=position < num_tokens)


def attention_mass(
    q_THD: torch.Tensor,
    kv_rows: torch.Tensor,
    scales: torch.Tensor | None,
    blocks: torch.Tensor,
    num_tokens: int,
    *,
    scale: float,
) -> torch.Tensor:
    """Launch.

    Args:
        q_THD: `[T, H * G, D]`, the inner axis with stride 1.
        kv_rows: one layer's rows `[N, 2, H, P, D]` (`kv_rows.layer_views`).
        scales: float32 `[N, 2, H, P]` of a quantised cache, else None.
        blocks: int32 `[B]` on the device.
        num_tokens: n.
        scale: of scores.

    Returns:
        float32 `[n]`.
    """
    num_heads, head_dim = q_THD.shape[1:]
    _, _, num_kv_heads, block_size, _ = kv_rows.shape
    groups = num_heads // num_kv_heads
    num_rows = len(q_THD) * groups
    heads = Heads(head_dim, q_THD.itemsize, num_copies=2)
    fits = heads.prefill_shape(limit=gpu.shared_memory_bytes(q_THD.device))
    default = {**DEFAULT, "TILE_M": fits.rows, "TILE_N": fits.keys}
    chosen = config("attention_mass", f"d{head_dim}", q_THD.device, default)
    logarithms_HR = q_THD.new_empty((num_kv_heads, num_rows), dtype=torch.float32)
    shares_HN = q_THD.new_empty((num_kv_heads, num_tokens), dtype=torch.float32)
    factors = kv_rows if scales is None else scales
    block, _, head, slot, _ = kv_rows.stride()
    factor_block, _, factor_head, factor_slot = factors.stride()[:4]
    pointers = q_THD, kv_rows, factors, blocks, logarithms_HR
    sizes = scale, num_rows, num_tokens, *q_THD.stride()[:2]
    strides = block, head, slot, factor_block, factor_head, factor_slot
    shape = {
        "G": groups, "D": head_dim, "P": block_size, "TILE_D": padded(head_dim),
        "IS_QUANTISED": scales is not None, **chosen,
    }  # fmt: skip
    tiles = triton.cdiv(num_rows, chosen["TILE_M"]), num_kv_heads
    _logarithms[tiles](*pointers, *sizes, *strides, **shape)
    tiles = triton.cdiv(num_tokens, chosen["TILE_N"]), num_kv_heads
    _receive[tiles](*pointers, shares_HN, *sizes, *strides, **shape)
    return shares_HN.sum(0)

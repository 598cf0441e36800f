"""Paged attention in Triton: prefill and decode by one kernel, long sequences split.

    o_t = sum_j softmax_j(cap(scale * q_t . k_j)) v_j        over first_t <= j < limit_t

`cap(x) = softcap * tanh(x / softcap)` if the model has a softcap. The intervals express causality,
spans and window (`attention_step`). For quantised KV, `k_j = ks_j * K_j` with one factor per token
and head. The factors of keys multiply scores, and those of values multiply weights. So elements are
only converted.

Shapes: T packed queries, H KV heads with G query heads each, D head size, N blocks of P slots, S
sequences with up to B blocks each; position j of sequence s is slot `j % P` of block
`table[s, j // P]`.

Reference: `vlm_kernels.paged_attention.paged_attention_reference`; blocks are PagedAttention's
(arXiv 2309.06180), tiles FlashAttention's (2205.14135), splits Flash-Decoding's.

Tiles: a program computes one tile of queries, one KV head and one split. Rows are (query, head of
the group), so decode fills the 16 rows of a tensor core with the heads that share their KV. The
program loops over the positions, TILE_N at a time. It reads the block of each from the table, and
keeps maximum, sum and weighted values of each row (online softmax, base 2). With splits, each
program stores its normalised values and the logarithm of its sum, and `_combine` weighs them.

Scores, sums of weights and values are float32. Weights are rounded to q's type before they multiply
values, as in flash attention. Products of float32 are IEEE, never TF32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_kernels import gpu
from vlm_kernels.gpu.attention_shapes import Heads, Shape, padded
from vlm_kernels.gpu.attention_step import TiledStep
from vlm_kernels.gpu.configs import config
from vlm_kernels.gpu.functions import LOG2_E, add_scores

DEFAULT = {"num_warps": 4, "num_stages": 3}


@triton.jit
def _attend(
    q_ptr, kv_ptr, factor_ptr, table_ptr, tile_ptr, first_ptr, limit_ptr, out_ptr, lse_ptr,
    scale, softcap,
    q_token, q_head, block_stride, value_offset, head_stride, slot_stride,
    factor_block, factor_value, factor_head, factor_slot, table_width,
    G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr,
    SPLITS: tl.constexpr, IS_QUANTISED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Grid: [tiles, KV heads, SPLITS]."""
    tile, head, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_heads = tl.num_programs(1)
    seq = tl.load(tile_ptr + 3 * tile).to(tl.int64)
    row = tl.arange(0, TILE_M)
    live = row < tl.load(tile_ptr + 3 * tile + 2) * G
    token = tl.load(tile_ptr + 3 * tile + 1).to(tl.int64) + row // G
    column = tl.arange(0, TILE_D)
    inside = column < D
    q_head_of_row = head * G + row % G
    q = tl.load(
        q_ptr + token[:, None] * q_token + q_head_of_row[:, None] * q_head + column[None],
        mask=live[:, None] & inside[None],
        other=0.0,
    )  # [TILE_M, TILE_D]
    # a row without a query sees nothing, and widens no interval of its tile
    first = tl.load(first_ptr + token, mask=live, other=2147483647)
    limit = tl.load(limit_ptr + token, mask=live, other=0)

    # this split's part of what any row of the tile sees, in whole tiles
    end = tl.max(limit, 0)
    start = tl.min(first, 0) // TILE_N * TILE_N
    part = tl.cdiv(tl.cdiv(end - start, TILE_N), SPLITS) * TILE_N
    start += split * part
    end = tl.minimum(end, start + part)

    top = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, TILE_D], tl.float32)
    for at in range(start, end, TILE_N):
        position = at + tl.arange(0, TILE_N)
        written = position < end
        block = tl.load(table_ptr + seq * table_width + position // P, mask=written, other=0)
        block = block.to(tl.int64)
        place = block * block_stride + head * head_stride + position % P * slot_stride
        filled = written[:, None] & inside[None]
        pointers = kv_ptr + place[:, None] + column[None]
        k = _as(tl.load(pointers, mask=filled, other=0.0), q, IS_QUANTISED)  # [TILE_N, TILE_D]
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if IS_QUANTISED:
            factors = factor_ptr + block * factor_block + head * factor_head
            factors += position % P * factor_slot
            x *= tl.load(factors, mask=written, other=0.0).to(tl.float32)[None]
        if HAS_SOFTCAP:
            x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)
        seen = (position[None] >= first[:, None]) & (position[None] < limit[:, None])
        x = tl.where(seen & written[None], x * LOG2_E, float("-inf"))
        weight, shrink, top, total = add_scores(x, top, total)
        if IS_QUANTISED:
            weight *= tl.load(factors + factor_value, mask=written, other=0.0).to(tl.float32)[None]
        v = _as(tl.load(pointers + value_offset, mask=filled, other=0.0), q, IS_QUANTISED)
        acc = acc * shrink[:, None] + tl.dot(weight.to(q.dtype), v, input_precision="ieee")

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_row = token * (num_heads * G) + q_head_of_row
    stored = live[:, None] & inside[None]
    if SPLITS == 1:
        tl.store(out_ptr + out_row[:, None] * D + column[None], acc, mask=stored)
    else:
        # rows of a tile by split: [tiles, KV heads, SPLITS, TILE_M, D]
        part_row = ((tile.to(tl.int64) * num_heads + head) * SPLITS + split) * TILE_M + row
        tl.store(out_ptr + part_row[:, None] * D + column[None], acc, mask=stored)
        # `where` computes both sides, so this logarithm must exist for rows that see nothing, too
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.maximum(total, 1e-38)))
        tl.store(lse_ptr + part_row, lse, mask=live)


@triton.jit
def _as(x, q, IS_QUANTISED: tl.constexpr):
    """Convert elements to q's type, which represents all quantised values exactly."""
    if IS_QUANTISED:
        x = x.to(tl.float32)
    return x.to(q.dtype)


@triton.jit
def _combine(
    part_ptr, lse_ptr, tile_ptr, out_ptr,
    G: tl.constexpr, D: tl.constexpr,
    TILE_M: tl.constexpr, TILE_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid: [tiles, KV heads]. Weigh the results of a tile's splits by their shares of the sum."""
    tile, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    row = tl.arange(0, TILE_M)
    column = tl.arange(0, TILE_D)
    live = row < tl.load(tile_ptr + 3 * tile + 2) * G
    stored = live[:, None] & (column < D)[None]
    first_row = (tile.to(tl.int64) * num_heads + head) * SPLITS * TILE_M + row
    split = tl.arange(0, SPLITS)
    every = tl.load(
        lse_ptr + first_row[:, None] + split[None] * TILE_M, mask=live[:, None], other=0.0
    )
    top = tl.max(every, 1)  # finite: one split has the query's own position
    total = tl.sum(tl.exp2(every - top[:, None]), 1)
    acc = tl.zeros([TILE_M, TILE_D], tl.float32)
    for s in range(SPLITS):
        part_row = first_row + s * TILE_M
        lse = tl.load(lse_ptr + part_row, mask=live, other=0.0)
        part = tl.load(part_ptr + part_row[:, None] * D + column[None], mask=stored, other=0.0)
        acc += part * (tl.exp2(lse - top) / total)[:, None]
    token = tl.load(tile_ptr + 3 * tile + 1).to(tl.int64) + row // G
    out_row = token * (num_heads * G) + head * G + row % G
    tl.store(out_ptr + out_row[:, None] * D + column[None], acc, mask=stored)


def paged_attention(
    q_THD: torch.Tensor,
    kv: torch.Tensor,
    factors: torch.Tensor | None,
    step: TiledStep,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Launch.

    Args:
        q_THD: packed queries `[T, H * G, D]`; the inner axis has stride 1.
        kv: one layer, `[N, 2, H, P, D]`, the inner axis of stride 1; float, int8 or float8.
        factors: float32 `[N, 2, H, P]` of quantised KV, with any strides; else None.
        step: from `plan_tiles`.
        scale: of scores.
        softcap: bound of scores, in both directions.

    Returns:
        `[T, H * G, D]` contiguous, every element written.
    """
    (num_tokens, num_heads, head_dim), (_, _, num_kv_heads, block_size, _) = q_THD.shape, kv.shape
    out = q_THD.new_empty(num_tokens, num_heads, head_dim)
    num_groups, tile_d = num_heads // num_kv_heads, padded(head_dim)
    heads, shared = Heads(head_dim, q_THD.itemsize), gpu.shared_memory_bytes(kv.device)
    for launch in step.launches:
        fits = heads.shape_of_rows(launch.num_rows, limit=shared)
        meta = dict(
            config("paged_attention", f"d{head_dim}/m{launch.num_rows}", kv.device, DEFAULT)
        )
        tile_n = meta.pop("TILE_N", fits.keys)
        if heads.shared_bytes(Shape(launch.num_rows, tile_n)) > shared:
            tile_n = fits.keys  # the configuration is for another type of queries
        num_tiles, splits = len(launch.tiles), launch.num_splits
        target, lse = out, out
        if splits > 1:
            rows = (num_tiles, num_kv_heads, splits, launch.num_rows)
            target = out.new_empty(*rows, head_dim, dtype=torch.float32)
            lse = out.new_empty(rows, dtype=torch.float32)
        scaled = kv if factors is None else factors
        _attend[num_tiles, num_kv_heads, splits](
            q_THD, kv, scaled, step.block_table, launch.tiles, step.first, step.limit, target, lse,
            scale, softcap or 0.0,
            q_THD.stride(0), q_THD.stride(1),
            kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
            scaled.stride(0), scaled.stride(1), scaled.stride(2), scaled.stride(3),
            step.block_table.stride(0),
            G=num_groups, D=head_dim, P=block_size,
            TILE_M=launch.num_rows, TILE_N=tile_n, TILE_D=tile_d, SPLITS=splits,
            IS_QUANTISED=factors is not None, HAS_SOFTCAP=softcap is not None, **meta,
        )  # fmt: skip
        if splits > 1:
            _combine[num_tiles, num_kv_heads](
                target, lse, launch.tiles, out, G=num_groups, D=head_dim,
                TILE_M=launch.num_rows, TILE_D=tile_d, SPLITS=splits,
            )  # fmt: skip
    return out

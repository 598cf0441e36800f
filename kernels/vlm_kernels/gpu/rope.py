"""Rotary positions in Triton: in place, or of keys while they are written into the cache.

    (a, b) = (a * cos_a - b * sin_a, b * cos_b + a * sin_b)      a, b the halves of a head

Shapes: T tokens, H heads, D head size; cos and sin are tables `[T, D]`, so positions of one axis
and of several (M-RoPE) are one kernel; the cache is N blocks of P slots.

Reference: `vlm_kernels.rope.rope_reference`, then `vlm_kernels.store_kv.store_kv_reference`.

Tiles: a program computes one token and TILE_H heads. Both halves of a head are in the registers of
one program, so it may write in place. Products and sums are rounded to the type of x, as in the
definition; with float32 tables (WIDE), only the sums are.

`_rotate_store` rotates queries in place, and writes rotated keys, and values, into their slots, in
one pass. Heads of queries have the first numbers, then those of KV.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_kernels.gpu.configs import config
from vlm_kernels.gpu.functions import elements, max_abs
from vlm_kernels.kv_rows import LIMITS

DEFAULT = {"TILE_H": 4, "num_warps": 4}


@triton.jit
def _rotated(
    x_ptr, cos_ptr, sin_ptr, token, column, inside, stored,
    HALF: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return both rotated halves of the heads at `x_ptr [TILE_H]`, in their own type."""
    here = x_ptr[:, None] + column[None]
    a = tl.load(here, mask=stored, other=0.0)
    b = tl.load(here + HALF, mask=stored, other=0.0)
    element = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    at = token * (2 * HALF) + column
    cos_a = tl.load(cos_ptr + at, mask=inside, other=0.0).to(tl.float32)[None]
    cos_b = tl.load(cos_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)[None]
    sin_a = tl.load(sin_ptr + at, mask=inside, other=0.0).to(tl.float32)[None]
    sin_b = tl.load(sin_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)[None]
    a_cos, b_sin, b_cos, a_sin = a * cos_a, b * sin_a, b * cos_b, a * sin_b
    if not WIDE:
        a_cos, b_sin = a_cos.to(element).to(tl.float32), b_sin.to(element).to(tl.float32)
        b_cos, a_sin = b_cos.to(element).to(tl.float32), a_sin.to(element).to(tl.float32)
    return (a_cos - b_sin).to(element), (b_cos + a_sin).to(element)


@triton.jit
def _rotate_heads(
    x_ptr, cos_ptr, sin_ptr, token, tile, x_token, x_head, num_heads,
    HALF: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    head = tile.to(tl.int64) * TILE_H + tl.arange(0, TILE_H)
    column = tl.arange(0, TILE_D)
    inside = column < HALF
    stored = (head < num_heads)[:, None] & inside[None]
    row = x_ptr + token * x_token + head * x_head
    a, b = _rotated(row, cos_ptr, sin_ptr, token, column, inside, stored, HALF, WIDE)
    here = row[:, None] + column[None]
    tl.store(here, a, mask=stored)
    tl.store(here + HALF, b, mask=stored)


@triton.jit
def _store_halves(
    place, scales, live, column, a, b, stored, HALF: tl.constexpr, LIMIT: tl.constexpr
):
    """Store float32 halves of keys or values at their slots `place [TILE_H]`."""
    if LIMIT > 0:
        row_max = tl.maximum(max_abs(a), max_abs(b))
        a, b = elements(a, row_max, LIMIT), elements(b, row_max, LIMIT)
        tl.store(scales, tl.div_rn(row_max, LIMIT * 1.0), mask=live)
    here = place[:, None] + column[None]
    element = place.dtype.element_ty
    tl.store(here, a.to(element), mask=stored)
    tl.store(here + HALF, b.to(element), mask=stored)


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, x_token, x_head, num_heads,
    HALF: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid: [tokens, tiles of heads]."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _rotate_heads(
        x_ptr, cos_ptr, sin_ptr, token, tile, x_token, x_head, num_heads, HALF, TILE_H, TILE_D, WIDE
    )


@triton.jit
def _rotate_store(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, kv_ptr, scale_ptr, slot_ptr,
    num_slots, num_heads, num_kv_heads,
    q_token, q_head, k_token, k_head, v_token, v_head,
    block_stride, value_offset, head_stride, slot_stride,
    scale_block, scale_value, scale_head, scale_slot,
    HALF: tl.constexpr, P: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Grid: [tokens, tiles of query heads, then tiles of KV heads]."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_tiles = tl.cdiv(num_heads, TILE_H)
    if tile < query_tiles:
        _rotate_heads(
            q_ptr, cos_ptr, sin_ptr, token, tile, q_token, q_head, num_heads,
            HALF, TILE_H, TILE_D, False,
        )  # fmt: skip
    else:
        head = (tile - query_tiles).to(tl.int64) * TILE_H + tl.arange(0, TILE_H)
        column = tl.arange(0, TILE_D)
        inside = column < HALF
        slot = tl.load(slot_ptr + token)
        block, offset = slot // P, slot % P
        live = (head < num_kv_heads) & (slot >= 0) & (slot < num_slots)
        stored = live[:, None] & inside[None]
        k_row = k_ptr + token * k_token + head * k_head
        a, b = _rotated(k_row, cos_ptr, sin_ptr, token, column, inside, stored, HALF, False)
        v_here = (v_ptr + token * v_token + head * v_head)[:, None] + column[None]
        c = tl.load(v_here, mask=stored, other=0.0).to(tl.float32)
        d = tl.load(v_here + HALF, mask=stored, other=0.0).to(tl.float32)
        place = kv_ptr + block * block_stride + head * head_stride + offset * slot_stride
        scales = scale_ptr + block * scale_block + head * scale_head + offset * scale_slot
        _store_halves(
            place, scales, live, column, a.to(tl.float32), b.to(tl.float32), stored, HALF, LIMIT
        )
        _store_halves(
            place + value_offset, scales + scale_value, live, column, c, d, stored, HALF, LIMIT
        )


def rope(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> None:
    """Launch: rotate in place.

    Args:
        x_THD: `[T, H, D]`; the inner axis has stride 1.
        cos_TD: `[T, D]`, contiguous, of the same type, or float32.
        sin_TD: as cos.
    """
    num_tokens, num_heads, head_dim = x_THD.shape
    if num_tokens == 0:
        return
    chosen = config("rope", f"d{head_dim}", x_THD.device, DEFAULT)
    _rotate[num_tokens, triton.cdiv(num_heads, chosen["TILE_H"])](
        x_THD, cos_TD, sin_TD, x_THD.stride(0), x_THD.stride(1), num_heads,
        HALF=head_dim // 2, TILE_D=triton.next_power_of_2(head_dim // 2),
        WIDE=cos_TD.dtype != x_THD.dtype, **chosen,
    )  # fmt: skip


def rope_store_kv(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    slots_T: torch.Tensor,
) -> None:
    """Launch: rotate queries in place, write rotated keys and values into their slots.

    Args:
        q_THD: `[T, heads, D]`; inner axes have stride 1, here and below.
        k_THD: `[T, H, D]`, not changed.
        v_THD: `[T, H, D]`.
        cos_TD: `[T, D]`, contiguous, of the type of q and k.
        sin_TD: as cos.
        kv: one layer, `[N, 2, H, P, D]`.
        scales: float32 `[N, 2, H, P]` of a quantised cache; else None.
        slots_T: int64 `[T]`; one that is not in the cache is skipped.
    """
    (num_tokens, num_heads, head_dim), num_kv_heads = q_THD.shape, k_THD.shape[1]
    num_blocks, _, _, block_size, _ = kv.shape
    if num_tokens == 0:
        return
    chosen = config("rope_store_kv", f"d{head_dim}", kv.device, DEFAULT)
    tiles = (triton.cdiv(n, chosen["TILE_H"]) for n in (num_heads, num_kv_heads))
    scaled = kv if scales is None else scales
    _rotate_store[num_tokens, sum(tiles)](
        q_THD, k_THD, v_THD, cos_TD, sin_TD, kv, scaled, slots_T,
        num_blocks * block_size, num_heads, num_kv_heads,
        q_THD.stride(0), q_THD.stride(1), k_THD.stride(0), k_THD.stride(1),
        v_THD.stride(0), v_THD.stride(1),
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        scaled.stride(0), scaled.stride(1), scaled.stride(2), scaled.stride(3),
        HALF=head_dim // 2, P=block_size, TILE_D=triton.next_power_of_2(head_dim // 2),
        LIMIT=0 if scales is None else LIMITS[kv.dtype], **chosen,
    )  # fmt: skip

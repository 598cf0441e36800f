"""Store KV in Triton:  cache[slot of t] = (k_t, v_t), rounded or quantised.

Shapes: T new tokens, H KV heads, D head size, N blocks of P slots; slot s is slot `s % P` of block
`s // P`.

Reference: `vlm_kernels.store_kv.store_kv_reference`.

Tiles: a program writes keys and values of TILE_H heads of one token: it reads whole rows and writes
whole slots. The scale of a quantised row is computed while the row is in registers. A slot that is
not in the cache (-1 is padding of a captured graph) is skipped.
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
def _store(
    k_ptr, v_ptr, kv_ptr, scale_ptr, slot_ptr, num_slots, num_heads,
    k_token, k_head, v_token, v_head,
    block_stride, value_offset, head_stride, slot_stride,
    scale_block, scale_value, scale_head, scale_slot,
    D: tl.constexpr, P: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Grid: [tokens, tiles of heads]. LIMIT is 0 if rows are not quantised."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    head = tl.program_id(1).to(tl.int64) * TILE_H + tl.arange(0, TILE_H)
    column = tl.arange(0, TILE_D)
    live = (head < num_heads) & (slot >= 0) & (slot < num_slots)
    stored = live[:, None] & (column < D)[None]
    block, offset = slot // P, slot % P
    place = kv_ptr + block * block_stride + head * head_stride + offset * slot_stride
    scales = scale_ptr + block * scale_block + head * scale_head + offset * scale_slot
    k_row, v_row = k_ptr + token * k_token + head * k_head, v_ptr + token * v_token + head * v_head
    k = tl.load(k_row[:, None] + column[None], mask=stored, other=0.0).to(tl.float32)
    v = tl.load(v_row[:, None] + column[None], mask=stored, other=0.0).to(tl.float32)
    if LIMIT > 0:
        k_max, v_max = max_abs(k), max_abs(v)
        k, v = elements(k, k_max, LIMIT), elements(v, v_max, LIMIT)
        tl.store(scales, tl.div_rn(k_max, LIMIT * 1.0), mask=live)
        tl.store(scales + scale_value, tl.div_rn(v_max, LIMIT * 1.0), mask=live)
    element = kv_ptr.dtype.element_ty
    tl.store(place[:, None] + column[None], k.to(element), mask=stored)
    tl.store(place[:, None] + value_offset + column[None], v.to(element), mask=stored)


def store_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    slots_T: torch.Tensor,
) -> None:
    """Launch.

    Args:
        k_THD: keys `[T, H, D]`; the inner axis has stride 1.
        v_THD: values `[T, H, D]`, as keys.
        kv: one layer, `[N, 2, H, P, D]`, the inner axis of stride 1.
        scales: float32 `[N, 2, H, P]` of a quantised cache; else None.
        slots_T: int64 `[T]`, all different, except those that are skipped.
    """
    num_tokens, num_heads, head_dim = k_THD.shape
    num_blocks, _, _, block_size, _ = kv.shape
    if num_tokens == 0:
        return
    chosen = config("store_kv", f"d{head_dim}", kv.device, DEFAULT)
    scaled = kv if scales is None else scales
    _store[num_tokens, triton.cdiv(num_heads, chosen["TILE_H"])](
        k_THD, v_THD, kv, scaled, slots_T, num_blocks * block_size, num_heads,
        k_THD.stride(0), k_THD.stride(1), v_THD.stride(0), v_THD.stride(1),
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        scaled.stride(0), scaled.stride(1), scaled.stride(2), scaled.stride(3),
        D=head_dim, P=block_size, TILE_D=triton.next_power_of_2(head_dim),
        LIMIT=0 if scales is None else LIMITS[kv.dtype], **chosen,
    )  # fmt: skip

"""RMSNorm in Triton, alone or after the addition that stands before it.

    h_t = x_t + r_t                                      where there is a residual
    y_t = (h_t / sqrt(mean(h_t^2) + eps)) * w            h is written too; of Gemma 1 + w

Shapes: T rows, D features.

Reference: `vlm_kernels.rms_norm.rms_norm_reference`, `vlm_kernels.add_rms_norm`'s with a residual.

Tiles: a program takes TILE_T whole rows, which stay in registers between the mean and the product,
so each element is read once and written once. The mean is float32; h, and the scaled h before it is
multiplied, are rounded to their type, as the definition does; before 1 + w nothing is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_kernels.gpu.configs import config

ELEMENTS = 4096
"""Of a tile: rows of a head's size share a program."""


@triton.jit
def _norm(
    x_ptr, r_ptr, w_ptr, h_ptr, y_ptr, x_row, r_row, num_rows, eps,
    D: tl.constexpr, TILE_T: tl.constexpr, TILE_D: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ADDS_ONE: tl.constexpr,
):  # fmt: skip
    """Grid: [tiles of rows]."""
    row = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    column = tl.arange(0, TILE_D)
    inside = (row < num_rows)[:, None] & (column < D)[None]
    x = tl.load(x_ptr + row[:, None] * x_row + column[None], mask=inside, other=0.0)
    element = x.dtype
    h = x.to(tl.float32)
    out = row[:, None] * D + column[None]
    if HAS_RESIDUAL:
        r = tl.load(r_ptr + row[:, None] * r_row + column[None], mask=inside, other=0.0)
        x = (h + r.to(tl.float32)).to(element)
        tl.store(h_ptr + out, x, mask=inside)
        h = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, 1) / D + eps)
    scaled = h * scale[:, None]
    w = tl.load(w_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    if ADDS_ONE:
        w += 1.0
    else:
        scaled = scaled.to(element).to(tl.float32)
    tl.store(y_ptr + out, (scaled * w[None]).to(element), mask=inside)


def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
    *,
    eps: float,
    adds_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch.

    Args:
        x_TD: `[T, D]`; rows may lie apart, the inner axis has stride 1.
        weight_D: `[D]`, contiguous, of the same type.
        residual_TD: `[T, D]`, as x; is added before.
        eps: added to the mean square.
        adds_one: the factor is 1 + w.

    Returns:
        The normalised rows `[T, D]`, contiguous, every element written; and what was normalised,
        likewise, or x itself without a residual.
    """
    num_rows, size = x_TD.shape
    y_TD = x_TD.new_empty(num_rows, size)
    h_TD = x_TD if residual_TD is None else x_TD.new_empty(num_rows, size)
    if num_rows:
        tile_d = triton.next_power_of_2(size)
        default = {"TILE_T": max(1, ELEMENTS // tile_d), "num_warps": 4 if tile_d <= 4096 else 8}
        chosen = config("rms_norm", f"d{size}", x_TD.device, default)
        r_TD = x_TD if residual_TD is None else residual_TD
        _norm[(triton.cdiv(num_rows, chosen["TILE_T"]),)](
            x_TD, r_TD, weight_D, h_TD, y_TD, x_TD.stride(0), r_TD.stride(0), num_rows, eps,
            D=size, TILE_D=tile_d, HAS_RESIDUAL=residual_TD is not None,
            ADDS_ONE=adds_one, **chosen,
        )  # fmt: skip
    return y_TD, h_TD

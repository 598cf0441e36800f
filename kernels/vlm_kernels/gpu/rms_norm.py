"""RMSNorm in Triton, alone or after an addition.

    h_t = x_t + r_t                                      with a residual; h is written, too
    y_t = (h_t / sqrt(mean(h_t^2) + eps)) * w            Gemma: 1 + w

Shapes: T rows, D features.

Reference: `rms_norm_reference` and `add_rms_norm_reference` in `vlm_kernels.rms_norm`.

Tiles: a program computes TILE_T whole rows. They stay in registers between the mean and the
product, so each element is read once and written once. The mean is float32. h, and the scaled h
before the product, are rounded to their type, as in the definition; with 1 + w only the result is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_kernels.gpu.configs import config

ELEMENTS = 4096
"""Of a tile: short rows, such as those of a head, share a program."""


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
        x_TD: `[T, D]`; rows may be strided, the inner axis has stride 1.
        weight_D: `[D]`, contiguous, of the same type.
        residual_TD: `[T, D]`, as x; is added before.
        eps: added to the mean square.
        adds_one: the factor is 1 + w.

    Returns:
        The normalised rows `[T, D]`, contiguous, every element written; and h, of the same layout,
        or x itself without a residual.
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

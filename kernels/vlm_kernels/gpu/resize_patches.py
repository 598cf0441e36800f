"""Resize, normalise and cut in Triton: a patch is two products with banded matrices.

    patch [P, P] = Wy [P, R] @ rgb [R, C] @ Wx^T [C, P]      R x C source pixels of the patch

Shapes: an image `[H, W, 3]` of bytes becomes N patches of P x P pixels, `[N, 3 * times * P * P]`.

Reference: `vlm_kernels.resize_patches.resize_patches_reference`.

Tiles: a program computes one patch of one channel. It loops over its source rows, TILE_R at a
time, and over their columns, TILE_C at a time, so it reads pixels once and in order. It loads the
weights of the band of a matrix; other elements are zero. The result of each product is rounded to
bytes. The last one is looked up in the channel's table and written to each time step of the patch.
Products are IEEE float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vlm_kernels.gpu.configs import config

if TYPE_CHECKING:
    from vlm_kernels.resize_patches import Cut, Taps

DEFAULT = {"TILE_R": 16, "TILE_C": 64, "num_warps": 4}


@triton.jit
def _patch(
    rgb_ptr, row_start_ptr, row_weight_ptr, column_start_ptr, column_weight_ptr, table_ptr, out_ptr,
    H, W, num_columns, row_taps, column_taps,
    P: tl.constexpr, MERGE: tl.constexpr, TIMES: tl.constexpr,
    TILE_P: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Grid: [patches, channels]; patches are grouped by merged token."""
    patch, channel = tl.program_id(0), tl.program_id(1)
    token, inside = patch // (MERGE * MERGE), patch % (MERGE * MERGE)
    per_row = num_columns // MERGE
    y0 = (token // per_row * MERGE + inside // MERGE) * P
    x0 = (token % per_row * MERGE + inside % MERGE) * P
    i = tl.arange(0, TILE_P)
    live = i < P
    row_start = tl.load(row_start_ptr + y0 + i, mask=live, other=0)
    column_start = tl.load(column_start_ptr + x0 + i, mask=live, other=0)
    # starts do not decrease: the first pixel of the patch needs the first source pixels
    first_row, first_column = tl.load(row_start_ptr + y0), tl.load(column_start_ptr + x0)
    end_row = tl.minimum(tl.load(row_start_ptr + y0 + P - 1) + row_taps, H)
    end_column = tl.minimum(tl.load(column_start_ptr + x0 + P - 1) + column_taps, W)

    acc = tl.zeros([TILE_P, TILE_P], tl.float32)
    for r0 in range(first_row, end_row, TILE_R):
        r = r0 + tl.arange(0, TILE_R)
        narrow = tl.zeros([TILE_R, TILE_P], tl.float32)
        for c0 in range(first_column, end_column, TILE_C):
            c = c0 + tl.arange(0, TILE_C)
            tap = c[:, None] - column_start[None]
            weight = column_weight_ptr + (x0 + i)[None] * column_taps + tap
            is_tap = live[None] & (tap >= 0) & (tap < column_taps)
            columns = tl.load(weight, mask=is_tap, other=0.0)  # [TILE_C, TILE_P]
            pixel = rgb_ptr + (r.to(tl.int64)[:, None] * W + c[None]) * 3 + channel
            pixel = tl.load(pixel, mask=(r < H)[:, None] & (c < W)[None], other=0)
            narrow = tl.dot(pixel.to(tl.float32), columns, narrow, input_precision="ieee")
        narrow = _to_bytes(narrow)
        tap = r[None] - row_start[:, None]
        weight = row_weight_ptr + (y0 + i)[:, None] * row_taps + tap
        is_tap = live[:, None] & (tap >= 0) & (tap < row_taps)
        rows = tl.load(weight, mask=is_tap, other=0.0)  # [TILE_P, TILE_R]
        acc = tl.dot(rows, narrow, acc, input_precision="ieee")

    value = tl.load(table_ptr + channel * 256 + _to_bytes(acc).to(tl.int32))
    place = i[:, None] * P + i[None]
    stored = live[:, None] & live[None]
    for time in range(TIMES):
        plane = ((patch.to(tl.int64) * 3 + channel) * TIMES + time) * (P * P)
        tl.store(out_ptr + plane + place, value, mask=stored)


@triton.jit
def _to_bytes(values):
    """Round to bytes, as float32."""
    return tl.floor(tl.minimum(tl.maximum(values, 0.0), 255.0) + 0.5)


def resize_patches(
    rgb: torch.Tensor, cut: Cut, table: torch.Tensor, rows: Taps, columns: Taps
) -> torch.Tensor:
    """Launch.

    Args:
        rgb: uint8 `[H, W, 3]`, contiguous.
        cut: size and patches of the result.
        table: `[3, 256]`, contiguous.
        rows: weights from H to `cut.height`.
        columns: weights from W to `cut.width`.

    Returns:
        `[N, 3 * times * P * P]` of the table's type, every element written.
    """
    out = table.new_empty(cut.num_patches, cut.patch_dim)
    chosen = config("resize_patches", f"p{cut.patch}", rgb.device, DEFAULT)
    tables = (
        torch.from_numpy(x).to(rgb.device)
        for x in (rows.starts, rows.weights, columns.starts, columns.weights)
    )
    _patch[cut.num_patches, 3](
        rgb, *tables, table, out, rgb.shape[0], rgb.shape[1], cut.width // cut.patch,
        rows.weights.shape[1], columns.weights.shape[1],
        P=cut.patch, MERGE=cut.merge, TIMES=cut.times,
        TILE_P=max(16, triton.next_power_of_2(cut.patch)), **chosen,
    )  # fmt: skip
    return out

"""SiLU·mul in Triton:  y = silu(g) * u,  silu(g) = g / (1 + exp(-g)).

Shapes: M rows, N columns.

Reference: `vlm_kernels.silu_mul.silu_mul_reference`.

Tiles: a program computes TILE_N elements of one row. Rows may be strided, as the two halves of a
joint product are. SiLU is rounded to its type before the product, as in the definition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_kernels.gpu.configs import config

DEFAULT = {"TILE_N": 1024, "num_warps": 4}


@triton.jit
def _silu_mul(gate_ptr, up_ptr, y_ptr, gate_row, up_row, N, TILE_N: tl.constexpr):
    """Grid: [rows, tiles of a row]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    inside = column < N
    gate = tl.load(gate_ptr + row * gate_row + column, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    opened = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(y_ptr + row * N + column, (opened * up).to(gate.dtype), mask=inside)


def silu_mul(gate_MN: torch.Tensor, up_MN: torch.Tensor) -> torch.Tensor:
    """Launch.

    Args:
        gate_MN: `[M, N]`; rows may be strided, the inner axis has stride 1.
        up_MN: of the same shape and type.

    Returns:
        `[M, N]` contiguous, every element written.
    """
    num_rows, num_columns = gate_MN.shape
    y_MN = gate_MN.new_empty(num_rows, num_columns)
    if y_MN.numel():
        chosen = config("silu_mul", "any", gate_MN.device, DEFAULT)
        _silu_mul[num_rows, triton.cdiv(num_columns, chosen["TILE_N"])](
            gate_MN, up_MN, y_MN, gate_MN.stride(0), up_MN.stride(0), num_columns, **chosen
        )
    return y_MN

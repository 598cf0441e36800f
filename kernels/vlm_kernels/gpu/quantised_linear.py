"""Products with quantised weights in Triton:  y = x W^T + b,  W_nk = s_ng * c_nk.

Shapes: M rows of x, K inputs, N outputs; g is the group of input k; int8 has one group of K inputs.

Reference: `vlm_kernels.quantised_linear.quantised_linear_reference`.

Tiles: a program computes `[TILE_M, TILE_N]` of y in a loop over K. Codes are converted to x's type,
which represents them exactly. Scales multiply sums: of int8 once at the end, of int4 once per
group. A byte of int4 has one element of the first and one of the second half of its group. So each
half is a product with whole columns of x, without shuffles of bits.

For few rows (decode), TILE_M is 16, and many narrow tiles of outputs keep all processors busy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_kernels.gpu.configs import config

FEW_ROWS = {"TILE_M": 16, "TILE_N": 32, "TILE_K": 128, "num_warps": 4, "num_stages": 4}
MANY_ROWS = {"TILE_M": 64, "TILE_N": 64, "TILE_K": 64, "num_warps": 4, "num_stages": 3}


@triton.jit
def _int8_product(
    x_ptr, code_ptr, scale_ptr, bias_ptr, y_ptr, x_row, M, N, K,
    HAS_BIAS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Grid: [tiles of rows, tiles of outputs]."""
    m = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, K, TILE_K):
        k = start + tl.arange(0, TILE_K)
        x_here = (m < M)[:, None] & (k < K)[None]
        x = tl.load(x_ptr + m[:, None] * x_row + k[None], mask=x_here, other=0.0)
        c_here = (n < N)[:, None] & (k < K)[None]
        c = tl.load(code_ptr + n[:, None] * K + k[None], mask=c_here, other=0)  # [TILE_N, TILE_K]
        c = c.to(tl.float32).to(x.dtype)
        acc = tl.dot(x, tl.trans(c), acc, input_precision="ieee")
    acc *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[None]
    _finish(acc, bias_ptr, y_ptr, m, n, M, N, HAS_BIAS)


@triton.jit
def _int4_product(
    x_ptr, code_ptr, scale_ptr, bias_ptr, y_ptr, x_row, M, N, K,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Grid: [tiles of rows, tiles of outputs]."""
    m = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    HALF: tl.constexpr = GROUP // 2
    i = tl.arange(0, HALF)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for group in range(K // GROUP):
        place = x_ptr + m[:, None] * x_row + (group * GROUP + i)[None]
        first = tl.load(place, mask=(m < M)[:, None], other=0.0)
        second = tl.load(place + HALF, mask=(m < M)[:, None], other=0.0)
        pair = code_ptr + n[:, None] * (K // 2) + (group * HALF + i)[None]
        pair = tl.load(pair, mask=(n < N)[:, None], other=0).to(tl.int32)  # [TILE_N, HALF]
        low = _signed(pair & 15).to(tl.float32).to(first.dtype)
        high = _signed(pair >> 4).to(tl.float32).to(first.dtype)
        found = tl.dot(first, tl.trans(low), input_precision="ieee")
        found = tl.dot(second, tl.trans(high), found, input_precision="ieee")
        acc += found * tl.load(scale_ptr + n * (K // GROUP) + group, mask=n < N, other=0.0)[None]
    _finish(acc, bias_ptr, y_ptr, m, n, M, N, HAS_BIAS)


@triton.jit
def _signed(code):
    """Four bits as a number from -8 to 7."""
    return tl.where(code > 7, code - 16, code)


@triton.jit
def _finish(acc, bias_ptr, y_ptr, m, n, M, N, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None]
    written = (m < M)[:, None] & (n < N)[None]
    tl.store(y_ptr + m[:, None] * N + n[None], acc.to(y_ptr.dtype.element_ty), mask=written)


def quantised_linear(
    x_MK: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    bias_N: torch.Tensor | None,
) -> torch.Tensor:
    """Launch.

    Args:
        x_MK: `[M, K]`; rows may be strided, the inner axis has stride 1.
        codes: int8 `[N, K]`, or uint8 `[N, K / 2]`; contiguous.
        scales: float32 `[N, K / group]`, contiguous.
        group: inputs that share a scale.
        bias_N: `[N]`, contiguous, of x's type, or None.

    Returns:
        `[M, N]` contiguous, every element written.
    """
    (num_rows, num_inputs), num_outputs = x_MK.shape, len(codes)
    y_MN = x_MK.new_empty(num_rows, num_outputs)
    if not y_MN.numel():
        return y_MN
    is_int4 = codes.dtype == torch.uint8
    shape = f"{'int4' if is_int4 else 'int8'}/n{num_outputs}/k{num_inputs}"
    few = num_rows <= FEW_ROWS["TILE_M"]
    chosen = dict(
        config(
            "quantised_linear/few" if few else "quantised_linear/many", shape, x_MK.device,
            FEW_ROWS if few else MANY_ROWS,
        )
    )  # fmt: skip
    if is_int4:
        chosen["GROUP"] = group
        del chosen["TILE_K"]
    grid = (triton.cdiv(num_rows, chosen["TILE_M"]), triton.cdiv(num_outputs, chosen["TILE_N"]))
    (_int4_product if is_int4 else _int8_product)[grid](
        x_MK, codes, scales, y_MN if bias_N is None else bias_N, y_MN, x_MK.stride(0),
        num_rows, num_outputs, num_inputs, HAS_BIAS=bias_N is not None, **chosen,
    )  # fmt: skip
    return y_MN

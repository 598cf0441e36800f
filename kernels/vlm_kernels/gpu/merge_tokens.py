"""Merge tokens in Triton:  y_n = sum_i share_i x_(s_i), over the sources of kept token n.

Shapes: T tokens, D features, N kept tokens, I sources; kept token n has the sources
`[edges_n, edges_(n+1))`.

Reference: `vlm_kernels.merge_tokens.merge_tokens_reference`; the shares are its normalised weights.

Tiles: a program computes TILE_D features of one kept token in a loop over its sources in their
order, without atomics, so sums are the same in each call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_kernels.gpu.configs import config

DEFAULT = {"TILE_D": 1024, "num_warps": 4}


@triton.jit
def _merge(x_ptr, source_ptr, edge_ptr, share_ptr, y_ptr, x_row, D, TILE_D: tl.constexpr):
    """Grid: [kept tokens, tiles of features]."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE_D + tl.arange(0, TILE_D)
    inside = column < D
    acc = tl.zeros([TILE_D], tl.float32)
    for i in range(tl.load(edge_ptr + n), tl.load(edge_ptr + n + 1)):
        source = tl.load(source_ptr + i)
        x = tl.load(x_ptr + source * x_row + column, mask=inside, other=0.0)
        acc += x.to(tl.float32) * tl.load(share_ptr + i)
    tl.store(y_ptr + n * D + column, acc.to(y_ptr.dtype.element_ty), mask=inside)


def merge_tokens(
    x_TD: torch.Tensor, sources_I: torch.Tensor, edges_N1: torch.Tensor, share_I: torch.Tensor
) -> torch.Tensor:
    """Launch.

    Args:
        x_TD: `[T, D]`; rows may be strided, the inner axis has stride 1.
        sources_I: int64 `[I]`, rows of x.
        edges_N1: int64 `[N + 1]`, strictly rising from 0 to I.
        share_I: float32 `[I]`; the shares of one kept token sum to 1.

    Returns:
        `[N, D]` contiguous, every element written.
    """
    num_kept, size = len(edges_N1) - 1, x_TD.shape[1]
    y_ND = x_TD.new_empty(num_kept, size)
    if y_ND.numel():
        chosen = config("merge_tokens", "any", x_TD.device, DEFAULT)
        _merge[num_kept, triton.cdiv(size, chosen["TILE_D"])](
            x_TD, sources_I, edges_N1, share_I, y_ND, x_TD.stride(0), size, **chosen
        )
    return y_ND

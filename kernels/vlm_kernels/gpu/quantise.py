"""Rows of KV as int8 or float8 with a scale each, for kernels that write them.

    scale = max |x| / limit      element = x * (limit / max |x|), rounded to even ties

as `vlm_kernels.kv_rows` defines it. A row that is not finite has a scale that is not.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def greatest(x):
    """Greatest |x| of each row of `[M, D]`; infinite where an element is not a number."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)  # `tl.max` passes NaN over


@triton.jit
def elements(x, most, LIMIT: tl.constexpr):
    """Rows `[M, D]` of float32 as elements, still float32: int8 as whole numbers."""
    is_finite = (most > 0.0) & (most < float("inf"))
    factor = tl.where(is_finite, tl.div_rn(LIMIT * 1.0, tl.where(is_finite, most, 1.0)), 0.0)
    y = tl.where(is_finite[:, None], x, 0.0) * factor[:, None]
    if LIMIT == 127:
        y = (y + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is added rounds to whole numbers
    return y

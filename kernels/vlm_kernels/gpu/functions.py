"""Triton functions that several kernels use: online softmax, segments, and quantised rows of KV.

Online softmax (arXiv 1805.02867) processes scores in tiles. A row keeps the maximum so far and sums
of `2^(score - maximum)`; a new maximum scales the earlier sums down. Scores are in base 2: callers
multiply them by log2(e).

A quantised row is int8 or float8 with one scale, as `vlm_kernels.kv_rows` defines it. The scale of
a row that is not finite is not finite.

    scale = max |x| / limit      element = x * (limit / max |x|), rounded to even ties
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def add_scores(x, top, total):
    """Add a tile of scores `[M, N]`, -inf for keys that a row does not see.

    Returns:
        The weights of the tile, the factor of earlier sums, and the new `top` and `total` `[M]`.
    """
    higher = tl.maximum(top, tl.max(x, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
    weight = tl.exp2(x - base[:, None])
    shrink = tl.exp2(top - base)
    return weight, shrink, higher, total * shrink + tl.sum(weight, 1)


@triton.jit
def segment_of(tile, cu_ptr, num_segments, num_tokens, TILE_M: tl.constexpr):
    """The edges of a tile's segment, and its first token.

    The edges of segments are only on the GPU, and the host does not read them: there are
    `T // TILE_M + C` tiles, enough for any segments. Those of segment c are numbered from
    `cu_c // TILE_M + c`, so each program finds its segment by bisection. A tile may have no token.
    """
    # bisect [segment, limit); a variable of a loop must keep its type, here that of `tile`
    segment, limit = tile * 0, tile * 0 + num_segments
    while limit - segment > 1:
        middle = (segment + limit) // 2
        begins = tl.load(cu_ptr + middle) // TILE_M + middle <= tile
        segment = tl.where(begins, middle, segment)
        limit = tl.where(begins, limit, middle)
    # clamp: edges of an invalid tensor must not lead to reads outside of [0, num_tokens)
    start = tl.maximum(tl.load(cu_ptr + segment), 0)
    end = tl.minimum(tl.load(cu_ptr + segment + 1), num_tokens)
    return start, end, start + (tile - start // TILE_M - segment) * TILE_M


@triton.jit
def max_abs(x):
    """The maximum of |x| in each row of `[M, D]`; infinite if an element is NaN."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)  # `tl.max` ignores NaN


@triton.jit
def elements(x, row_max, LIMIT: tl.constexpr):
    """The quantised rows `[M, D]` as float32; of int8 (LIMIT 127), integers."""
    is_finite = (row_max > 0.0) & (row_max < float("inf"))
    factor = tl.where(is_finite, tl.div_rn(LIMIT * 1.0, tl.where(is_finite, row_max, 1.0)), 0.0)
    y = tl.where(is_finite[:, None], x, 0.0) * factor[:, None]
    if LIMIT == 127:
        y = (y + 12582912.0) - 12582912.0  # the sum with 1.5 * 2^23 is rounded to an integer
    return y

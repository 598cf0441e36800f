"""Softmax over scores that come in pieces (arXiv 1805.02867), for kernels that attend.

A row keeps the greatest score so far, and sums of `2^(score - greatest)`: a greater one shrinks
what is there. Scores are in base 2, multiplied by log2(e) before.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def weigh(x, top, total):
    """Take in a piece of scores `[M, N]`, -inf where nothing is seen.

    Returns:
        The weights of the piece, what multiplies earlier sums, and the new `top` and `total` `[M]`.
    """
    higher = tl.maximum(top, tl.max(x, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that saw nothing so far
    weight = tl.exp2(x - base[:, None])
    shrink = tl.exp2(top - base)
    return weight, shrink, higher, total * shrink + tl.sum(weight, 1)

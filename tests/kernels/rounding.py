"""How far a result may differ from its definition in float32: derived, not measured.

u is the unit roundoff: 2^-8 of bfloat16, which has 8 significant bits, 2^-11 of float16, which has
11. Sums are float32, so roundings to the narrow type are all that is lost:

    attention     o = sum_j p_j v_j: each weight p_j is rounded, and then the answer
                  |got - o| <= u * sum_j p_j |v_j| + u * |o|
    product       y = W x + b: products of two bfloat16 are exact in float32, the answer is rounded
                  |got - y| <= u * |y|

What float32 itself loses is below FLOAT32 times the same magnitudes.
"""

from __future__ import annotations

import torch

UNIT = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FLOAT32 = 1e-5
OVER_OTHER_KV = 0.006
"""Relative, of prompts over KV in int8 or float32: keys are rounded to bfloat16 too."""

BY_TORCH = 0.009
"""Relative, where torch's operations attend: they round scores as well (docs/performance.md)."""


def assert_attended(got: torch.Tensor, exact: torch.Tensor, weighed: torch.Tensor) -> None:
    """Every element of an attention's answer is as near as its roundings allow.

    Args:
        got: the answer.
        exact: its definition in float32, of the same inputs.
        weighed: the same with the magnitudes of values: `sum_j p_j |v_j|`.
    """
    unit = UNIT[got.dtype]
    assert_within(got, exact, unit * (weighed + exact.abs()) + FLOAT32 * weighed)


def assert_within(got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    """No element differs from `exact` by more than its bound."""
    assert got.shape == exact.shape
    assert torch.isfinite(got).all(), "an element was not written, or unused memory was read"
    share = (got.double() - exact.double()).abs() / (bound.double() + 1e-9)
    assert (share <= 1).all(), f"an element lies {share.max():.2f} times as far as roundings reach"


def assert_near(got: torch.Tensor, exact: torch.Tensor, *, error: float) -> None:
    """The norm of all differences is below a share of the norm."""
    assert torch.isfinite(got).all(), "an element was not written, or unused memory was read"
    assert relative_error(got, exact) <= error


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Of all elements together, by their norm."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())

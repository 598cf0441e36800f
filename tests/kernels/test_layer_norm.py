"""LayerNorm is its definition, row by row, and torch's up to the order of sums."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.guards import among_nan, assert_guards_stand, bf16
from kernels.variants import each_variant

from vlm_kernels import layer_norm
from vlm_kernels.layer_norm import layer_norm_reference

module = importlib.import_module("vlm_kernels.layer_norm")  # the package has the function so named
variant = each_variant(module)

EPS = 1e-6


@given(
    st.integers(0, 40),
    st.integers(1, 300),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0.0, 30.0]),
)
@settings(max_examples=60)
def test_it_is_its_definition_and_torchs_on_any_shape(
    rows: int, size: int, dtype: torch.dtype, offset: float
) -> None:
    torch.manual_seed(rows * size)
    x = among_nan((torch.randn(rows, size) + offset).to(dtype))
    w, b = torch.randn(2, size).to(dtype)
    tight = 2e-4 if dtype == torch.float32 else 1e-2  # of float32, what 30 - 30 leaves
    got = layer_norm(x, w, b, eps=EPS)
    for want in (
        layer_norm_reference(x, w, b, eps=EPS),
        torch.nn.functional.layer_norm(x, (size,), w, b, EPS),
    ):
        torch.testing.assert_close(got, want, atol=tight, rtol=tight)


def test_a_row_is_the_same_among_others_as_alone() -> None:
    torch.manual_seed(0)
    x, (w, b) = bf16(300, 1000), bf16(2, 1000)
    together = layer_norm(x, w, b, eps=EPS)
    for i in (0, 31, 32, 299):
        assert torch.equal(together[i], layer_norm(x[i : i + 1], w, b, eps=EPS)[0])


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    x, w = torch.randn(3, 64), torch.ones(64)
    x[1, 5] = float("nan")
    y = layer_norm(x, w, w, eps=EPS)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_every_output_is_written_and_nothing_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, (w, b) = bf16(5, 33), bf16(2, 33)
    want = layer_norm(x, w, b, eps=EPS)
    field = torch.full((64 + 5 * 33 + 64,), float("nan"), dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_: field[64:-64].view(5, 33))
    assert torch.equal(layer_norm(x, w, b, eps=EPS), want)
    assert_guards_stand([field])


@pytest.mark.parametrize(
    ("x", "w", "b"),
    [
        (torch.zeros(2, 8), torch.zeros(7), torch.zeros(8)),
        (torch.zeros(2, 8), torch.zeros(8), torch.zeros(7)),
        (torch.zeros(8), torch.zeros(8), torch.zeros(8)),
        (torch.zeros(2, 8), torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)),
    ],
)
def test_what_does_not_fit_raises(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="layer_norm"):
        layer_norm(x, w, b, eps=EPS)

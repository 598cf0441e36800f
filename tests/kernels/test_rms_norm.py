"""RMSNorm is its definition, row by row."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.variants import each_variant

from vlm_kernels import rms_norm
from vlm_kernels.rms_norm import rms_norm_reference

module = importlib.import_module("vlm_kernels.rms_norm")  # the package has the function by its name
variant = each_variant(module)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
EPS = 1e-6


@given(st.integers(0, 40), st.integers(1, 300), DTYPES, st.booleans())
@settings(max_examples=60)
def test_it_is_its_definition_on_any_shape(
    rows: int, size: int, dtype: torch.dtype, adds_one: bool
) -> None:
    torch.manual_seed(rows * size)
    x, w = torch.randn(rows, size + 3).to(dtype)[:, 1 : size + 1], torch.randn(size).to(dtype)
    want = rms_norm_reference(x, w, eps=EPS, adds_one=adds_one)
    tight = 1e-5 if dtype == torch.float32 else 1e-2
    got = rms_norm(x, w, eps=EPS, adds_one=adds_one)
    torch.testing.assert_close(got, want, atol=tight, rtol=tight)


def test_a_row_is_the_same_among_others_as_alone() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(300, 1000), torch.randn(1000)
    together = rms_norm(x, w, eps=EPS)
    for i in (0, 31, 32, 299):
        assert torch.equal(together[i], rms_norm(x[i : i + 1], w, eps=EPS)[0])


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    x, w = torch.randn(3, 64), torch.ones(64)
    x[1, 5] = float("nan")
    y = rms_norm(x, w, eps=EPS)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_every_output_is_written_and_nothing_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    field = torch.full((64 + 5 * 33 + 64,), float("nan"))
    inside = field[64:-64].view(5, 33)
    x, w = torch.randn(5, 33), torch.randn(33)
    want = rms_norm(x, w, eps=EPS)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_: inside)
    assert torch.equal(rms_norm(x, w, eps=EPS), want)
    assert field[:64].isnan().all()
    assert field[-64:].isnan().all()


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (torch.zeros(2, 8), torch.zeros(7)),
        (torch.zeros(8), torch.zeros(8)),
        (torch.zeros(2, 8), torch.zeros(8, dtype=torch.bfloat16)),
    ],
)
def test_what_does_not_fit_raises(x: torch.Tensor, w: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(x, w, eps=EPS)


def test_without_a_library_the_definition_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(4, 50), torch.randn(50)
    fast = rms_norm(x, w, eps=EPS)
    monkeypatch.setattr(module, "_kernel", lambda: None)
    torch.testing.assert_close(fast, rms_norm(x, w, eps=EPS))

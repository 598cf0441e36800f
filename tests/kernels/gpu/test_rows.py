"""RMSNorm, alone and after an addition, and SiLU·mul in Triton equal their definitions."""

from __future__ import annotations

import pytest
import torch

from vlm_kernels import add_rms_norm, rms_norm, silu_mul
from vlm_kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from vlm_kernels.silu_mul import silu_mul_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(0, 64), (1, 7), (33, 128), (3, 1000)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-6


def apart(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Strided rows at odd addresses."""
    return torch.randn(num_rows, size + 3).to(dtype)[:, 1 : size + 1]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got.cpu(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_are_their_definitions(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x, r, w = apart(*shape, dtype), apart(*shape, dtype), torch.randn(shape[1]).to(dtype)
    for adds_one in (False, True):
        got = rms_norm(x.to(device), w.to(device), eps=EPS, adds_one=adds_one)
        assert_close(got, rms_norm_reference(x, w, eps=EPS, adds_one=adds_one))
    got = add_rms_norm(x.to(device), r.to(device), w.to(device), eps=EPS)
    want = add_rms_norm_reference(x, r, w, eps=EPS)
    assert_close(got[0], want[0])
    assert torch.equal(got[1].cpu(), want[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (3, 7), (2, 1500)], ids=str)
def test_the_gate_is_its_definition(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(shape[0], 2 * shape[1]).to(dtype).chunk(2, dim=1)
    assert_close(silu_mul(gate.to(device), up.to(device)), silu_mul_reference(gate, up))


def test_a_row_is_the_same_among_others_as_alone(device: torch.device) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(40, 100, device=device), torch.randn(100, device=device)
    together, gated = rms_norm(x, w, eps=EPS), silu_mul(x, x)
    for i in (0, 31, 39):
        assert torch.equal(together[i], rms_norm(x[i : i + 1], w, eps=EPS)[0])
        assert torch.equal(gated[i], silu_mul(x[i : i + 1], x[i : i + 1])[0])


def test_a_row_that_is_not_finite_spoils_no_other(device: torch.device) -> None:
    x, w = torch.randn(3, 64, device=device), torch.ones(64, device=device)
    x[1, 5] = float("nan")
    y = rms_norm(x, w, eps=EPS)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_what_does_not_fit_raises_before_anything_runs(device: torch.device) -> None:
    x, w = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    with pytest.raises(ValueError, match="rms_norm: x "):
        rms_norm(x, w[:7], eps=EPS)
    with pytest.raises(ValueError, match=r"add_rms_norm: .* the residual"):
        add_rms_norm(x, x[:1], w, eps=EPS)
    with pytest.raises(ValueError, match=r"add_rms_norm: .* the weight torch.bfloat16"):
        add_rms_norm(x, x, w.bfloat16(), eps=EPS)
    with pytest.raises(ValueError, match=r"silu_mul: .* up"):
        silu_mul(x, x[:, :7])
    with pytest.raises(ValueError, match="the last must be 1"):
        silu_mul(x.T, x.T)
    for name, call in (
        ("rms_norm: x", lambda: rms_norm(x.int(), w.int(), eps=EPS)),
        ("add_rms_norm: x", lambda: add_rms_norm(x.double(), x.double(), w.double(), eps=EPS)),
        ("silu_mul: gate", lambda: silu_mul(x.int(), x.int())),
    ):
        with pytest.raises(ValueError, match=rf"{name} is torch.*must be float32, float16 or bflo"):
            call()

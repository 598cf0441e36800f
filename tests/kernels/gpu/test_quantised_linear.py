"""Products with quantised weights are those with the weights brought back."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vlm_kernels import quantise_weights, quantised_linear
from vlm_kernels.quantised_linear import dequantised, quantised_linear_reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group"),
    [
        pytest.param(1, 40, 70, None, id="int8, decode"),
        pytest.param(35, 33, 96, None, id="int8, prefill"),
        pytest.param(3, 40, 64, 32, id="int4 by 32"),
        pytest.param(35, 33, 256, 128, id="int4 by 128"),
        pytest.param(0, 8, 32, 32, id="no row"),
    ],
)
def test_it_is_its_definition(
    rows: int, outputs: int, inputs: int, group: int | None, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    x = torch.randn(rows, inputs + 5).to(dtype)[:, 2:-3]
    weights = quantise_weights(torch.randn(outputs, inputs) / inputs**0.5, group=group)
    on_device = dataclasses.replace(
        weights, codes=weights.codes.to(device), scales=weights.scales.to(device)
    )
    for bias in (None, torch.randn(outputs).to(dtype)):
        there = None if bias is None else bias.to(device)
        got = quantised_linear(x.to(device), on_device, there).cpu()
        want = quantised_linear_reference(x, weights, bias)
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("group", [None, 32])
def test_weights_may_be_a_view(group: int | None, device: torch.device) -> None:
    x, weight = torch.randn(3, 64), torch.randn(64, 40).T
    got, want = (
        quantised_linear(
            x.to(device),
            dataclasses.replace(w, codes=w.codes.to(device), scales=w.scales.to(device)),
        )
        for w in (quantise_weights(w, group=group) for w in (weight, weight.contiguous()))
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize(("group", "steps"), [(None, 127), (32, 7), (128, 7)])
def test_no_weight_is_further_off_than_half_a_step(group: int | None, steps: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(9, 256)
    weight[2] = 0
    weights = quantise_weights(weight, group=group)
    off = (dequantised(weights) - weight).abs().view(9, -1, weights.group)
    most = weight.abs().view(9, -1, weights.group).amax(-1, keepdim=True)
    assert (off <= most / steps / 2 * 1.0001).all()
    assert (dequantised(weights)[2] == 0).all()


def test_what_does_not_fit_raises_before_anything_runs(device: torch.device) -> None:
    x, weights = torch.zeros(2, 64, device=device), quantise_weights(torch.ones(3, 64))
    weights = dataclasses.replace(
        weights, codes=weights.codes.to(device), scales=weights.scales.to(device)
    )
    with pytest.raises(ValueError, match="64 inputs"):
        quantised_linear(x[:, :63], weights)
    with pytest.raises(ValueError, match="the last must be 1"):
        quantised_linear(torch.zeros(64, 2, device=device).T, weights)
    with pytest.raises(ValueError, match=r"x is torch\.int32"):
        quantised_linear(x.int(), weights)
    with pytest.raises(ValueError, match="the bias is"):
        quantised_linear(x, weights, torch.zeros(4, device=device))
    with pytest.raises(ValueError, match=r"codes on .*, scales on meta"):
        quantised_linear(x, dataclasses.replace(weights, scales=weights.scales.to("meta")))
    for group in (64, 128):
        with pytest.raises(ValueError, match=f"group {group} of 96"):
            quantise_weights(torch.ones(3, 96), group=group)

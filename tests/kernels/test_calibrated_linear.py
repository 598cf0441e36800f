"""A product whose inputs have one known scale is its definition to the bit, in every library."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.guards import among_nan, assert_guards_stand, bf16, poisoned_results
from kernels.variants import each_variant

from vlm_kernels.packed_linear import Activation, packed_linear, packed_linear_reference
from vlm_kernels.packed_weights import (
    MAX_CODE,
    SYMMETRIC,
    InputScale,
    PackedWeights,
    clip,
    pack,
    pack_gated,
)

module = importlib.import_module("vlm_kernels.packed_linear")  # the package has the function
variant = each_variant(module)

ROWS = st.sampled_from([1, 2, 5, 7, 15, 16, 17, 29, 43, 61])
INPUTS = st.builds(
    InputScale,
    st.floats(1e-4, 1.0),
    st.one_of(st.just(SYMMETRIC), st.integers(0, MAX_CODE)),
)
"""Scales below and above those that clip normal values, and any zero."""


@given(ROWS, st.integers(1, 140), st.integers(1, 140), INPUTS, st.booleans())
@settings(max_examples=25)
def test_it_is_its_definition_to_the_bit_on_any_shape(
    rows: int, num_out: int, num_in: int, inputs: InputScale, has_bias: bool
) -> None:
    torch.manual_seed(rows * num_out * num_in)
    x, weights = bf16(rows, num_in), pack(bf16(num_out, num_in), int8=True).calibrated(inputs)
    bias = bf16(num_out) if has_bias else None
    residual = bf16(rows, num_out)
    want = packed_linear_reference(x, weights, bias, residual)
    assert torch.equal(packed_linear(x, weights, bias, residual), want)


@given(ROWS, st.integers(1, 60), INPUTS, st.sampled_from([Activation.SILU, Activation.GELU]))
@settings(max_examples=15)
def test_gated_weights_read_the_same_codes(
    rows: int, size: int, inputs: InputScale, activation: Activation
) -> None:
    torch.manual_seed(rows * size)
    x, w = bf16(rows, size), bf16(size, size, scale=size**-0.5)
    weights = pack_gated(w, w.flip(0), int8=True).calibrated(inputs)
    got = packed_linear(x, weights, activation=activation)
    want = packed_linear_reference(x, weights, activation=activation)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 40])
def test_the_scale_of_a_row_gives_the_product_of_that_row(rows: int) -> None:
    """If the known scale is the one that each row would get, nothing differs."""
    torch.manual_seed(rows)
    x, weights = bf16(rows, 96), pack(bf16(70, 96), int8=True)
    x[:, 5] = 4.0  # the largest
    assert x.abs().max() == 4.0
    known = weights.calibrated(InputScale(4.0 / 127))
    assert torch.equal(packed_linear(x, known), packed_linear(x, weights))


@pytest.mark.parametrize("rows", [2, 7, 16, 17, 40])
@pytest.mark.parametrize("zero", [SYMMETRIC, 13])
def test_a_row_is_the_same_among_others_as_alone_whatever_their_size(rows: int, zero: int) -> None:
    torch.manual_seed(rows)
    x, weights = bf16(rows, 96), pack(bf16(70, 96), int8=True).calibrated(InputScale(0.02, zero))
    x *= torch.logspace(-6, 6, rows)[:, None]
    together = packed_linear(x, weights)
    alone = torch.cat([packed_linear(x[i : i + 1], weights) for i in range(rows)])
    assert torch.equal(together, alone)


def test_values_beyond_the_codes_are_clipped() -> None:
    x = torch.tensor([[3.0, -3.0, 1e38, -1e38]], dtype=torch.bfloat16)
    codes, _ = clip(x, InputScale(0.01))
    assert codes.tolist() == [[127, -127, 127, -127]]
    codes, _ = clip(x, InputScale(0.01, 10))
    assert codes.tolist() == [[245, -10, 245, -10]]
    weights = pack(torch.eye(4, dtype=torch.bfloat16), int8=True).calibrated(InputScale(0.01, 10))
    assert torch.equal(packed_linear(x, weights), packed_linear_reference(x, weights))


def test_a_zero_gives_values_of_one_sign_twice_the_levels() -> None:
    torch.manual_seed(3)
    x, w = bf16(64, 512).abs(), bf16(256, 512, scale=512**-0.5)
    most = float(x.max())
    exact = x.double() @ w.double().T
    weights = pack(w, int8=True)
    errors = [
        (packed_linear(x, weights.calibrated(inputs)).double() - exact).norm()
        for inputs in (InputScale(most / 127), InputScale(most / 255, 0))
    ]
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("zero", [SYMMETRIC, 0, 40])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_spoils_itself_alone(value: float, zero: int) -> None:
    torch.manual_seed(1)
    x, weights = bf16(5, 33), pack(bf16(40, 33), int8=True).calibrated(InputScale(0.03, zero))
    want = packed_linear(x, weights)
    x[2, 32] = value
    got = packed_linear(x, weights)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3, 4]], want[[0, 1, 3, 4]])


@pytest.mark.parametrize("zero", [0, SYMMETRIC, MAX_CODE])
def test_extreme_codes_in_every_place_neither_saturate_nor_overflow(zero: int) -> None:
    num_in = 1 << 16
    x = torch.ones(2, num_in, dtype=torch.bfloat16)
    x[1] = -1
    w = torch.ones(40, num_in, dtype=torch.bfloat16)
    w[::2] = -1
    weights = pack(w, int8=True).calibrated(InputScale(1e-4, zero))
    want = packed_linear_reference(x, weights)
    assert want.abs().max() > 0.7
    assert torch.equal(packed_linear(x, weights), want)


@pytest.mark.parametrize(("rows", "num_out"), [(1, 31), (7, 33), (16, 70), (40, 1)])
def test_every_output_is_written_and_nothing_beside_it(
    rows: int, num_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, weights = bf16(rows, 43), pack(bf16(num_out, 43), int8=True).calibrated(InputScale(0.02, 9))
    want = packed_linear_reference(x, weights)
    fields = poisoned_results(monkeypatch)
    assert torch.equal(packed_linear(among_nan(x), weights), want)
    assert fields or module._kernel() is None, "the result lies in the poisoned field"
    assert_guards_stand(fields)


@pytest.mark.parametrize(
    "inputs",
    [
        *map(InputScale, (0.0, -1.0, float("nan"), float("inf"))),
        InputScale(0.1, -1),
        InputScale(0.1, 256),
    ],
)
def test_a_scale_that_makes_no_codes_is_refused(inputs: InputScale) -> None:
    with pytest.raises(ValueError, match="positive scale and a zero of 0 to 255"):
        pack(bf16(4, 4), int8=True).calibrated(inputs)


def test_weights_in_bfloat16_have_no_scale_of_their_inputs() -> None:
    weights: PackedWeights = pack(bf16(4, 4))
    with pytest.raises(ValueError, match="only int8"):
        weights.calibrated(InputScale(0.1))

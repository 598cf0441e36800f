"""A product on int8 weights is its definition in every library, to the bit: sums are integers."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.guards import among_nan, assert_guards_stand, bf16, poisoned_results
from kernels.variants import each_variant
from torch.nn import functional

from vlm_kernels.packed_linear import Activation, packed_linear, packed_linear_reference
from vlm_kernels.packed_weights import MAX_INPUTS, PackedWeights, pack, pack_gated, quantise

module = importlib.import_module("vlm_kernels.packed_linear")  # the package has the function
variant = each_variant(module)

KINDS = st.sampled_from(
    [
        *((activation, False) for activation in (Activation.QUICK_GELU, Activation.GELU)),
        *((activation, True) for activation in (Activation.SILU, Activation.GELU)),
    ]
)
"""What may follow a product, and whether it is gated."""

ROWS = st.sampled_from([1, 2, 5, 6, 7, 13, 14, 15, 16, 17, 29, 43, 56, 57, 61])


@given(ROWS, st.integers(1, 140), st.integers(1, 140), st.booleans(), st.booleans())
@settings(max_examples=25)
def test_it_is_its_definition_to_the_bit_on_any_shape(
    rows: int, num_out: int, num_in: int, has_bias: bool, has_residual: bool
) -> None:
    torch.manual_seed(rows * num_out * num_in)
    x, weights = bf16(rows, num_in), pack(bf16(num_out, num_in), int8=True)
    bias = bf16(num_out) if has_bias else None
    residual = bf16(rows, num_out) if has_residual else None
    want = packed_linear_reference(x, weights, bias, residual)
    assert torch.equal(packed_linear(x, weights, bias, residual), want)


@given(ROWS, st.integers(1, 90), st.integers(1, 90), KINDS)
@settings(max_examples=25)
def test_an_activation_follows_the_same_integers(
    rows: int, num_out: int, num_in: int, kind: tuple[Activation, bool]
) -> None:
    activation, is_gated = kind
    torch.manual_seed(rows * num_out * num_in)
    x, w = bf16(rows, num_in), bf16(num_out, num_in, scale=num_in**-0.5)
    weights = pack_gated(w, w.flip(0), int8=True) if is_gated else pack(w, int8=True)
    bias = bf16(weights.num_biases)
    got = packed_linear(x, weights, bias, activation=activation)
    want = packed_linear_reference(x, weights, bias, activation=activation)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-2)


def test_the_error_of_a_product_is_that_of_two_roundings_to_int8() -> None:
    """Rounding an operand of normal values to 127 levels of its largest costs it about 1 %."""
    torch.manual_seed(0)
    x, w = bf16(64, 512), bf16(256, 512, scale=512**-0.5)
    exact = functional.linear(x.double(), w.double())
    error = packed_linear(x, pack(w, int8=True)).double() - exact
    assert error.norm() < 0.015 * exact.norm()


@pytest.mark.parametrize("rows", [2, 7, 16, 17, 40])
def test_a_row_is_the_same_among_others_as_alone_whatever_their_size(rows: int) -> None:
    torch.manual_seed(rows)
    x, weights = bf16(rows, 96), pack(bf16(70, 96), int8=True)
    x *= torch.logspace(-6, 6, rows)[:, None]
    together = packed_linear(x, weights)
    alone = torch.cat([packed_linear(x[i : i + 1], weights) for i in range(rows)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_spoils_itself_alone(value: float) -> None:
    torch.manual_seed(1)
    x, weights = bf16(5, 33), pack(bf16(40, 33), int8=True)
    want = packed_linear(x, weights)
    x[2, 32] = value
    got = packed_linear(x, weights)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3, 4]], want[[0, 1, 3, 4]])


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e30])
def test_a_row_of_any_size_has_codes(scale: float) -> None:
    torch.manual_seed(2)
    x, weights = bf16(3, 40, scale=scale), pack(bf16(40, 40, scale=0.1), int8=True)
    got = packed_linear(x, weights)
    assert torch.equal(got, packed_linear_reference(x, weights))
    assert got.isfinite().all()


def test_extreme_codes_in_every_place_neither_saturate_nor_overflow() -> None:
    """The largest sum there can be, of both signs: 127 * 127 * K, and 255 * 127 * K on the way."""
    num_in = 4096
    x = torch.ones(2, num_in, dtype=torch.bfloat16)
    x[1] = -1
    w = torch.ones(40, num_in, dtype=torch.bfloat16)
    w[::2] = -1
    want = packed_linear_reference(x, pack(w, int8=True))
    assert want.abs().min() > 0.99 * num_in
    assert torch.equal(packed_linear(x, pack(w, int8=True)), want)


@pytest.mark.parametrize(("rows", "num_out"), [(1, 31), (7, 33), (16, 70), (40, 1)])
def test_every_output_is_written_and_nothing_beside_it(
    rows: int, num_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, weights = bf16(rows, 43), pack(bf16(num_out, 43), int8=True)
    want = packed_linear_reference(x, weights)
    fields = poisoned_results(monkeypatch)
    assert torch.equal(packed_linear(among_nan(x), weights), want)
    assert fields or module._kernel() is None, "the result lies in the poisoned field"
    assert_guards_stand(fields)


def test_threads_change_nothing() -> None:
    torch.manual_seed(0)
    x, weights, before = bf16(70, 512), pack(bf16(300, 512), int8=True), torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(packed_linear(x, weights))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@given(st.integers(1, 70), st.integers(1, 70))
@settings(max_examples=25)
def test_packing_keeps_every_weight_to_half_a_level(num_out: int, num_in: int) -> None:
    torch.manual_seed(num_out * 100 + num_in)
    w = bf16(num_out, num_in)
    weights = pack(w, int8=True)
    assert weights.scales is not None
    values = (weights.rows() * weights.scales[:, None])[:num_out]
    half = w.float().abs().amax(1, keepdim=True) / 127 / 2
    assert ((values - w.float()).abs() <= half * 1.001).all()


def test_codes_of_a_row_that_is_not_finite_are_none() -> None:
    codes, scales = quantise(torch.tensor([[1.0, -2.0], [float("nan"), 1.0], [0.0, 0.0]]))
    assert codes.tolist() == [[64, -127], [0, 0], [0, 0]]
    assert scales[1].isnan()


def test_more_inputs_than_a_sum_has_room_for_are_refused() -> None:
    with pytest.raises(ValueError, match="65536"):
        pack(torch.zeros(1, MAX_INPUTS + 1, dtype=torch.bfloat16), int8=True)


def test_no_rows_at_all_are_none() -> None:
    weights: PackedWeights = pack(bf16(40, 8), int8=True)
    assert packed_linear(bf16(0, 8), weights).shape == (0, 40)

"""The product on packed weights is its definition, whatever the shapes, and writes nothing else."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.guards import among_nan, assert_guards_stand, bf16, poisoned_results
from kernels.rounding import FLOAT32, UNIT, assert_within
from kernels.variants import each_variant
from torch.nn import functional

from vlm_kernels import packed_linear
from vlm_kernels.packed_linear import Activation, activate, has_kernel, packed_linear_reference
from vlm_kernels.packed_weights import PackedWeights, mix_biases, pack, pack_gated

module = importlib.import_module("vlm_kernels.packed_linear")
variant = each_variant(
    module,
    kernel="_bfloat16_kernel",
    symbol="triptych_linear_bf16",
    arguments=module.BFLOAT16_ARGUMENTS,
    needs="avx512_bf16",
)


@pytest.fixture
def needs_kernel() -> None:
    """What torch does not promise of its own sums."""
    if not has_kernel():
        pytest.skip("torch multiplies: its sums depend on how many rows there are")


ROWS = st.sampled_from([1, 2, 5, 6, 7, 12, 13, 14, 15, 16, 17, 24, 29, 43, 56, 57, 61])


U = UNIT[torch.bfloat16]


def both(
    x: torch.Tensor, weights: PackedWeights, exact: torch.Tensor, lost: torch.Tensor, **more: Any
) -> None:
    """The kernel and its definition alike are as near as their roundings allow: `lost`, and one."""
    bound = lost + U * (exact.abs() + lost) + FLOAT32 * (1 + exact.abs())
    assert_within(packed_linear_reference(x, weights, **more), exact, bound)
    assert_within(packed_linear(x, weights, **more), exact, bound)


def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Nothing is lost: products of bfloat16 have 16 bits."""
    return functional.linear(x.double(), w.double(), None if bias is None else bias.double())


@given(ROWS, st.integers(1, 140), st.integers(1, 140), st.booleans(), st.booleans())
@settings(max_examples=40)
def test_it_is_its_definition_on_any_shape(
    rows: int, num_out: int, num_in: int, has_bias: bool, has_residual: bool
) -> None:
    torch.manual_seed(rows * num_out * num_in)
    x, w = bf16(rows, num_in), bf16(num_out, num_in, scale=num_in**-0.5)
    bias = bf16(num_out) if has_bias else None
    residual = bf16(rows, num_out) if has_residual else None
    plain = product(x, w, bias)
    if residual is None:
        both(x, pack(w), plain, torch.zeros_like(plain), bias_N=bias)
    else:
        exact = residual.double() + plain
        both(x, pack(w), exact, U * plain.abs(), bias_N=bias, residual_MN=residual)


@given(ROWS, st.integers(1, 140), st.integers(1, 140), st.booleans(), st.booleans())
@settings(max_examples=40)
def test_a_gated_product_is_its_definition_on_any_shape(
    rows: int, num_out: int, num_in: int, has_bias: bool, by_gelu: bool
) -> None:
    torch.manual_seed(rows * num_out * num_in)
    x = bf16(rows, num_in)
    gate, up = (bf16(num_out, num_in, scale=num_in**-0.5) for _ in range(2))
    biases = [bf16(num_out), bf16(num_out)] if has_bias else [None, None]
    mixed = mix_biases(*biases) if has_bias else None
    activation = Activation.GELU if by_gelu else Activation.SILU
    z, other = product(x, gate, biases[0]), product(x, up, biases[1])
    opened = activate(z, activation)
    lost = other.abs() * of_activated(z, opened) + opened.abs() * U * other.abs()
    both(x, pack_gated(gate, up), opened * other, 1.01 * lost, bias_N=mixed, activation=activation)


@given(
    ROWS,
    st.integers(1, 140),
    st.integers(1, 140),
    st.sampled_from([Activation.QUICK_GELU, Activation.GELU]),
)
@settings(max_examples=30)
def test_an_activated_product_is_its_definition_on_any_shape(
    rows: int, num_out: int, num_in: int, activation: Activation
) -> None:
    torch.manual_seed(rows * num_out * num_in)
    x, w, bias = bf16(rows, num_in), bf16(num_out, num_in, scale=num_in**-0.5), bf16(num_out)
    z = product(x, w, bias)
    exact = activate(z, activation)
    both(x, pack(w), exact, of_activated(z, exact), bias_N=bias, activation=activation)


def of_activated(z: torch.Tensor, activated: torch.Tensor) -> torch.Tensor:
    """What roundings of the argument and of an activation lose; none is steeper than 1.14.

    torch computes QUICK_GELU in two steps: its sigmoid is rounded, and then the product.
    """
    return U * (1.14 * z.abs() + 2 * activated.abs())


@pytest.mark.usefixtures("needs_kernel")
@pytest.mark.parametrize(
    ("rows", "num_in"),
    [
        *((rows, 320) for rows in (2, 6, 7, 16, 17, 31, 40, 56, 57)),
        *((175, 3072), (60, 30_000), (1100, 70)),
    ],
)
def test_a_row_is_the_same_among_others_as_alone(rows: int, num_in: int) -> None:
    """However many blocks of rows pass by a panel: with many inputs, a block is of few rows."""
    torch.manual_seed(rows)
    x, weights = bf16(rows, num_in), pack(bf16(200, num_in))
    together = packed_linear(x, weights)
    alone = torch.cat([packed_linear(x[i : i + 1], weights) for i in range(rows)])
    assert torch.equal(together, alone)


@pytest.mark.usefixtures("needs_kernel")
@pytest.mark.parametrize("rows", [9, 77, 530])
def test_the_number_of_threads_changes_nothing(rows: int) -> None:
    torch.manual_seed(0)
    x, weights, before = bf16(rows, 128), pack(bf16(1000, 128)), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(packed_linear(x, weights))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("value", [0.0, -100.0, 100.0, float("inf"), float("nan")])
def test_a_gate_far_out_opens_as_silu_does(value: float) -> None:
    gate, up = bf16(40, 2), bf16(40, 2)
    gate[:, 0], gate[:, 1], up[:, 1] = 1, 0, 0
    x = torch.tensor([[value, 0.0]]).to(torch.bfloat16)
    want = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
    got = packed_linear(x, pack_gated(gate, up))
    torch.testing.assert_close(got, want, atol=1e-30, rtol=1e-2, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 7, 16, 40])
@pytest.mark.parametrize("num_out", [1, 31, 33, 70])
def test_every_output_is_written_and_nothing_beside_it(
    rows: int, num_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is cut out of a poisoned field; x and the residual are cut out of NaN."""
    torch.manual_seed(0)
    x, weights, residual = bf16(rows, 34), pack(bf16(num_out, 34)), bf16(rows, num_out)
    want = packed_linear(x, weights, None, residual)
    fields = poisoned_results(monkeypatch)
    assert torch.equal(packed_linear(among_nan(x), weights, None, among_nan(residual)), want)
    assert fields or not has_kernel(), "the result lies in the poisoned field"
    assert_guards_stand(fields)


def _call(**changed: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {
        "x_MK": bf16(3, 8), "weights": pack(bf16(40, 8)), "bias_N": None, "residual_MN": None,
    }  # fmt: skip
    return packed_linear(**(arguments | changed))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"x_MK": bf16(3, 9)}, "x has shape"),
        ({"x_MK": bf16(2, 3, 8)}, "x has shape"),
        ({"x_MK": torch.zeros(3, 8)}, "float32"),
        ({"x_MK": bf16(8, 3).T}, "strides"),
        ({"bias_N": bf16(39)}, "bias has shape"),
        ({"bias_N": torch.zeros(40)}, "bias is"),
        ({"residual_MN": bf16(3, 39)}, "residual"),
        ({"residual_MN": bf16(40, 3).T}, "residual is"),
        ({"residual_MN": bf16(3, 40), "activation": Activation.QUICK_GELU}, "not activated"),
        ({"weights": pack_gated(bf16(40, 8), bf16(40, 8)), "residual_MN": bf16(3, 40)}, "gated"),
        ({"weights": pack_gated(bf16(40, 8), bf16(40, 8)), "bias_N": bf16(40)}, "bias has shape"),
    ],
)
def test_what_does_not_fit_raises_before_anything_is_computed(
    changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        _call(**changed)


def test_only_bfloat16_is_packed() -> None:
    with pytest.raises(ValueError, match="float32"):
        pack(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="differ"):
        pack_gated(bf16(4, 4), bf16(5, 4))


def test_without_a_library_the_definition_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    x, weights = bf16(5, 62), pack(bf16(70, 62))
    fast = packed_linear(x, weights)
    monkeypatch.setattr(module, "_bfloat16_kernel", lambda: None)
    assert not has_kernel()
    torch.testing.assert_close(fast, packed_linear(x, weights), atol=1e-5, rtol=2 * U)


def test_weights_of_no_rows_at_all_are_none() -> None:
    weights = PackedWeights(torch.zeros(2, 4, 32, 2, dtype=torch.bfloat16), 40, 8)
    assert packed_linear(bf16(0, 8), weights).shape == (0, 40)

"""Rotation is its definition, to the bit, and in place."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.variants import each_variant

from vlm_kernels import rope
from vlm_kernels.rope import rope_reference

module = importlib.import_module("vlm_kernels.rope")  # the package has the function by its name
variant = each_variant(module)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 40), DTYPES, st.booleans())
@settings(max_examples=60)
def test_it_is_its_definition_and_leaves_what_lies_beside(
    num_tokens: int, num_heads: int, half: int, dtype: torch.dtype, has_wide_tables: bool
) -> None:
    torch.manual_seed(num_tokens * half)
    head_dim = 2 * half
    field = torch.randn(num_tokens, num_heads * head_dim + 7).to(dtype)
    before = field.clone()
    x = field[:, 3 : 3 + num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    tables = torch.float32 if has_wide_tables else dtype
    cos, sin = (torch.randn(num_tokens, head_dim).to(tables) for _ in range(2))
    want = rope_reference(x, cos, sin)
    rope(x, cos, sin)
    assert torch.equal(x, want)
    assert torch.equal(field[:, :3], before[:, :3])
    assert torch.equal(field[:, -4:], before[:, -4:])


@pytest.mark.parametrize(
    ("x", "cos", "named"),
    [
        (torch.zeros(3, 2, 8), torch.zeros(2, 8), "cos"),
        (torch.zeros(3, 2, 7), torch.zeros(3, 7), "cos"),
        (torch.zeros(3, 2, 8), torch.zeros(3, 8, dtype=torch.bfloat16), "bfloat16"),
        (torch.zeros(3, 8, 2).transpose(1, 2), torch.zeros(3, 8), "strides"),
    ],
)
def test_what_does_not_fit_raises_and_changes_nothing(
    x: torch.Tensor, cos: torch.Tensor, named: str
) -> None:
    x.fill_(1)
    with pytest.raises(ValueError, match=named):
        rope(x, cos, cos)
    assert (x == 1).all()


def test_without_a_library_the_definition_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, cos, sin = torch.randn(4, 2, 16), torch.randn(4, 16), torch.randn(4, 16)
    fast, slow = x.clone(), x.clone()
    rope(fast, cos, sin)
    monkeypatch.setattr(module, "_kernel", lambda: None)
    rope(slow, cos, sin)
    assert torch.equal(fast, slow)

"""Attention inside segments is the textbook sum, whatever their lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.batches import one_thread
from kernels.rounding import BY_TORCH, assert_attended, assert_near

from vlm_kernels import varlen_attention
from vlm_kernels.flash_attention import can_attend_segments
from vlm_kernels.varlen_attention import varlen_attention_reference


def check(
    lengths: list[int], num_heads: int, head_dim: int, dtype: torch.dtype, *, use_native: bool
) -> None:
    rng = torch.Generator().manual_seed(sum(lengths))
    # as a model passes them: the packed axis is not the first in memory
    q, k, v = (
        torch.randn(3, num_heads, sum(lengths), head_dim, generator=rng).to(dtype).transpose(1, 2)
    )
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    got = varlen_attention(q, k, v, cu, scale=0.4, use_native=use_native)
    with one_thread():
        exact, weighed = (
            varlen_attention_reference(q.float(), k.float(), x.float(), cu, scale=0.4)
            for x in (v, v.abs())
        )
    assert got.dtype == dtype
    if dtype == torch.float32 or (use_native and can_attend_segments(dtype, q.device)):
        assert_attended(got, exact, weighed)
    else:
        assert_near(got, exact, error=BY_TORCH)


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([64] * 9, id="equal windows"),
        pytest.param([64, 64, 32, 64, 64, 32, 16, 16, 8], id="windows of one image"),
        pytest.param([1], id="one token"),
        pytest.param([3, 0, 5], id="an empty segment"),
    ],
)
def test_segments_attend_to_themselves_alone(
    lengths: list[int], dtype: torch.dtype, use_native: bool
) -> None:
    check(lengths, 2, 24, dtype, use_native=use_native)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(1, 3),
    st.sampled_from([1, 5, 16]),
)
@settings(max_examples=50)
def test_any_segments_equal_the_definition(
    lengths: list[int], num_heads: int, head_dim: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(lengths, num_heads, head_dim, dtype, use_native=True)

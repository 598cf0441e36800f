"""Attention inside segments in Triton is the textbook sum, whatever the segments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.rounding import assert_attended

from vlm_kernels import varlen_attention
from vlm_kernels.varlen_attention import varlen_attention_reference

TYPES = [torch.float32, torch.float16, torch.bfloat16]


def attend(
    lengths: list[int], num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(len(lengths))
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    # as a joint product gives them
    joint = torch.randn(sum(lengths), 3, num_heads, head_dim).to(dtype)
    got = varlen_attention(*joint.to(device).unbind(1), cu.to(device), scale=0.3).cpu()
    q, k, v = joint.float().unbind(1)
    exact, weighed = (varlen_attention_reference(q, k, x, cu, scale=0.3) for x in (v, v.abs()))
    assert_attended(got, exact, weighed)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "num_heads", "head_dim"),
    [
        pytest.param([64, 0, 1, 130], 2, 16, id="several, one empty"),
        pytest.param([3, 5, 7, 1, 1], 1, 80, id="shorter than a tile"),
        pytest.param([33], 3, 72, id="one"),
        pytest.param([0, 0], 1, 16, id="no token"),
    ],
)
def test_it_is_its_definition(
    lengths: list[int], num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    attend(lengths, num_heads, head_dim, dtype, device)


@pytest.mark.full
@given(st.lists(st.integers(0, 200), min_size=1, max_size=7))
@settings(max_examples=40, deadline=None)
def test_any_segments_equal_the_definition(lengths: list[int]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attend(lengths, 1, 16, torch.float32, device)


def test_what_does_not_fit_raises_before_anything_runs(device: torch.device) -> None:
    q, cu = torch.ones(4, 2, 8, device=device), torch.tensor([0, 4], device=device)
    with pytest.raises(ValueError, match="must be alike"):
        varlen_attention(q, q[:, :1], q, cu.int(), scale=1)
    with pytest.raises(ValueError, match="the last stride"):
        varlen_attention(q, q.mT.contiguous().mT, q, cu.int(), scale=1)
    with pytest.raises(ValueError, match="not int32"):
        varlen_attention(q, q, q, cu, scale=1)
    with pytest.raises(ValueError, match=r"q is torch.int32"):
        varlen_attention(q.int(), q.int(), q.int(), cu.int(), scale=1)
    for x in (q[0], q[None]):
        with pytest.raises(ValueError, match=r"must be alike, \[T, H, D\]"):
            varlen_attention(x, x, x, cu.int(), scale=1)
    for wrong in (cu[:1], cu[None]):
        with pytest.raises(ValueError, match="cu "):
            varlen_attention(q, q, q, wrong.int(), scale=1)


@pytest.mark.parametrize("edges", [[-9, 4], [0, 900], [3, 1, 4], [900, 1000]], ids=str)
def test_edges_that_lie_elsewhere_read_and_write_nothing_there(
    edges: list[int], device: torch.device
) -> None:
    field = torch.full((44, 1, 16), 1e4, device=device)
    q = field[20:24]
    q.copy_(torch.randn(4, 1, 16))
    got = varlen_attention(q, q, q, torch.tensor(edges, dtype=torch.int32, device=device), scale=0)
    means = got.nan_to_num(0)  # NaN is what no program wrote
    assert means.abs().max() <= q.abs().max(), "what lies beside q was read"

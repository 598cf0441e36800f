"""Received attention in Triton is its definition, whatever the segments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_kernels import received_attention
from vlm_kernels.received_attention import received_attention_reference

TYPES = [torch.float32, torch.float16, torch.bfloat16]
ERROR = 2e-5
"""Relative, of sums in float32: products of two bfloat16 are exact."""


def receive(
    lengths: list[int], num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Check against the definition."""
    torch.manual_seed(len(lengths))
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    # as a joint product gives them
    joint = torch.randn(sum(lengths), 3, num_heads, head_dim).to(dtype)
    q, k, _ = joint.to(device).unbind(1)
    got = received_attention(q, k, cu.to(device), scale=0.3).cpu()
    want = received_attention_reference(*joint.unbind(1)[:2], cu, scale=0.3)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=ERROR, atol=0)
    return got


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
    got = receive(lengths, num_heads, head_dim, dtype, device)
    for part in got.split(lengths):
        assert part.sum().item() == pytest.approx(float(len(part) > 0), abs=1e-5)


@pytest.mark.full
@given(st.lists(st.integers(0, 200), min_size=1, max_size=7))
@settings(max_examples=40, deadline=None)
def test_any_segments_equal_the_definition(lengths: list[int]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    receive(lengths, 1, 16, torch.float32, device)


@pytest.mark.parametrize("edges", [[-9, 4], [0, 900], [3, 1, 4], [900, 1000]], ids=str)
def test_edges_outside_of_the_tokens_read_and_write_nothing_there(
    edges: list[int], device: torch.device
) -> None:
    field = torch.full((44, 1, 16), float("nan"), device=device)
    q = field[20:24]
    q.copy_(torch.randn(4, 1, 16))
    got = received_attention(q, q, torch.tensor(edges, dtype=torch.int32, device=device), scale=1)
    assert got.isfinite().all(), "memory beside q was read"
    assert got.sum() <= 1 + 1e-5


def test_what_does_not_fit_raises_before_anything_runs(device: torch.device) -> None:
    q, cu = torch.ones(4, 2, 8, device=device), torch.tensor([0, 4], device=device).int()
    with pytest.raises(ValueError, match="must be alike"):
        received_attention(q, q[:, :1], cu, scale=1)
    with pytest.raises(ValueError, match=r"q is torch.int32"):
        received_attention(q.int(), q.int(), cu, scale=1)
    for wrong in (cu.long(), cu[:1], cu[None]):
        with pytest.raises(ValueError, match="cu is"):
            received_attention(q, q, wrong, scale=1)

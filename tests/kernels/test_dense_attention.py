"""Dense attention is the textbook sum, however it is computed and cut into pieces."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_kernels import dense_attention

module = importlib.import_module("vlm_kernels.dense_attention")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def check(shape: tuple[int, int, int, int], head_dim: int, dtype: torch.dtype, kind: str) -> None:
    """Compare with the definition; `kind` is what limits the keys."""
    batches, groups, queries, keys = shape
    rng = torch.Generator().manual_seed(sum(shape))
    q = torch.randn(batches, groups, queries, head_dim, generator=rng).to(dtype)
    k, v = torch.randn(2, batches, keys, head_dim, generator=rng).to(dtype)
    mask = None
    if kind == "mask":
        mask = torch.zeros(batches, 1, queries, keys, dtype=dtype)
        hidden = torch.rand(mask.shape, generator=rng) < 0.5
        hidden[..., 0] = False
        mask.masked_fill_(hidden, float("-inf"))
    limits = {"scale": 0.3, "mask": mask, "causal": kind == "causal"}
    got = dense_attention(q, k, v, **limits)
    want = module.dense_attention_reference(q, k, v, **limits)
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        pytest.param((6, 4, 1, 70), "mask", id="decode, padded to the longest"),
        pytest.param((2, 4, 1, 70), "none", id="decode"),
        pytest.param((2, 3, 300, 300), "causal", id="a prompt in two pieces"),
        pytest.param((2, 3, 40, 90), "mask", id="a chunk"),
        pytest.param((12, 1, 64, 64), "none", id="windows of an image"),
    ],
)
def test_keys_are_weighed_as_the_definition_says(
    shape: tuple[int, int, int, int], kind: str, dtype: torch.dtype
) -> None:
    check(shape, 32, dtype, kind)


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 20)),
    st.integers(1, 30),
    st.sampled_from(["none", "mask", "causal"]),
    st.integers(1, 200),
    st.integers(1, 9),
)
@settings(max_examples=60)
def test_no_cut_into_pieces_changes_the_answer(
    shape: tuple[int, int, int], keys: int, kind: str, max_scores: int, max_queries: int
) -> None:
    keys = shape[2] if kind == "causal" else keys
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_SCORES", max_scores)
        patch.setattr(module, "MAX_QUERIES", max_queries)
        check((*shape, keys), 8, torch.bfloat16, kind)

"""Received attention is its definition, whatever the segments, and the tokens of each share 1."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.batches import one_thread
from kernels.guards import GUARD, among_nan, assert_guards_stand, bf16
from kernels.variants import each_variant

from vlm_kernels import received_attention
from vlm_kernels.received_attention import received_attention_reference

module = importlib.import_module("vlm_kernels.received_attention")  # the package has the function
variant = each_variant(module)

SCALE = 0.4
ERROR = 1e-5
"""Relative, of sums in float32: products of two bfloat16 are exact."""


def edges(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def queries_and_keys(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a joint product, as a model has them; NaN in place of the values."""
    torch.manual_seed(num_tokens)
    joint = torch.randn(num_tokens, 3, num_heads, head_dim).to(dtype)
    joint[:, 2] = float("nan")
    q, k, _ = joint.unbind(1)
    return q, k


def check(lengths: Sequence[int], num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    q, k = queries_and_keys(sum(lengths), num_heads, head_dim, dtype)
    got = received_attention(q, k, edges(*lengths), scale=SCALE)
    with one_thread():
        want = received_attention_reference(q, k, edges(*lengths), scale=SCALE)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=ERROR, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("lengths", "num_heads", "head_dim"),
    [
        pytest.param([1], 1, 1, id="one token"),
        pytest.param([3, 0, 5], 2, 24, id="an empty segment"),
        pytest.param([0], 2, 16, id="no token"),
        pytest.param([64, 63, 65, 97], 3, 80, id="around a tile"),
        pytest.param([260, 128], 2, 72, id="several chunks of queries"),
        pytest.param([2100], 1, 16, id="the most chunks"),
    ],
)
def test_it_is_its_definition(
    lengths: list[int], num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    check(lengths, num_heads, head_dim, dtype)


@given(
    st.lists(st.integers(0, 150), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from([1, 5, 16, 40]),
)
@settings(max_examples=40)
def test_any_segments_equal_the_definition(
    lengths: list[int], num_heads: int, head_dim: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(lengths, num_heads, head_dim, dtype)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.sampled_from([0.01, 1.0, 30.0]))
@settings(max_examples=20)
def test_the_tokens_of_a_segment_share_one(lengths: list[int], spread: float) -> None:
    q, k = queries_and_keys(sum(lengths), 2, 16, torch.bfloat16)
    got = received_attention(q * spread, k, edges(*lengths), scale=SCALE)
    assert (got >= 0).all()
    for part in got.split(lengths):
        assert part.sum().item() == pytest.approx(1, abs=1e-5)


def test_equal_keys_receive_the_same() -> None:
    q, k = queries_and_keys(50, 2, 16, torch.float32)
    got = received_attention(q, torch.ones_like(k), edges(20, 30), scale=SCALE)
    want = torch.cat([torch.full((20,), 1 / 20), torch.full((30,), 1 / 30)])
    torch.testing.assert_close(got, want)


def test_a_key_like_every_query_receives_all() -> None:
    q = torch.ones(40, 1, 16)
    k = torch.zeros(40, 1, 16)
    k[7] = 100
    got = received_attention(q, k, edges(40), scale=SCALE)
    assert torch.equal(got, torch.eye(40)[7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_segment_is_the_same_among_others_as_alone_on_any_number_of_threads(
    dtype: torch.dtype, variant: str
) -> None:
    lengths = [5, 300, 64, 129]
    q, k = queries_and_keys(sum(lengths), 2, 40, dtype)
    torch.set_num_threads(1)
    together = received_attention(q, k, edges(*lengths), scale=SCALE).split(lengths)
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        for part, qs, ks in zip(together, q.split(lengths), k.split(lengths), strict=True):
            alone = received_attention(qs, ks, edges(len(qs)), scale=SCALE)
            if variant == "torch":  # its library sums in an order that follows the threads
                torch.testing.assert_close(part, alone)
            else:
                assert torch.equal(part, alone)


def test_a_segment_that_is_not_finite_spoils_no_other() -> None:
    q, k = queries_and_keys(200, 2, 16, torch.bfloat16)
    want = received_attention(q, k, edges(70, 70, 60), scale=SCALE)
    q[100, 1, 3] = float("nan")
    got = received_attention(q, k, edges(70, 70, 60), scale=SCALE)
    assert got[70:140].isnan().all()
    for part in (slice(70), slice(140, None)):
        assert torch.equal(got[part], want[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_beside_queries_and_keys_is_read(dtype: torch.dtype) -> None:
    q, k = (among_nan(bf16(70, 24).to(dtype))[:, None] for _ in range(2))
    got = received_attention(q, k, edges(70), scale=SCALE)
    want = received_attention_reference(q, k, edges(70), scale=SCALE)
    torch.testing.assert_close(got, want, rtol=ERROR, atol=0)


def test_every_output_is_written_and_nothing_beside_it(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variant == "torch":
        pytest.skip("torch allocates its own results")
    q, k = queries_and_keys(71, 2, 16, torch.bfloat16)
    want = received_attention(q, k, edges(70, 1), scale=SCALE)
    field = torch.full((GUARD + 71 + GUARD,), float("nan"))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_, **__: field[GUARD:-GUARD])
    assert torch.equal(received_attention(q, k, edges(70, 1), scale=SCALE), want)
    assert_guards_stand([field])


def test_other_layouts_and_types_are_the_same_values() -> None:
    q, k = queries_and_keys(90, 2, 16, torch.float32)
    want = received_attention(q, k, edges(90), scale=SCALE)
    turned = (x.mT.contiguous().mT for x in (q, k))
    assert torch.equal(received_attention(*turned, edges(90), scale=SCALE), want)
    half = received_attention(q.half(), k.half(), edges(90), scale=SCALE)
    torch.testing.assert_close(half, want, rtol=2e-2, atol=0)


def test_what_does_not_fit_raises() -> None:
    q, cu = torch.ones(4, 2, 8), edges(4)
    for queries, keys, message in (
        (q, q[:, :1], "must be alike"),
        (q, q.bfloat16(), "must be alike"),
        (q[0], q[0], r"must be alike, \[T, H, D\]"),
        (q[:, :0], q[:, :0], "must be alike"),
        (q.int(), q.int(), "q is torch.int32"),
        (q, q.to("meta"), "k on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            received_attention(queries, keys, cu, scale=SCALE)
    for wrong in (cu.long(), cu[:1], cu[None]):
        with pytest.raises(ValueError, match="cu is"):
            received_attention(q, q, wrong, scale=SCALE)
    for wrong in (edges(3), edges(5), edges(5, -1), torch.tensor([1, 4], dtype=torch.int32)):
        with pytest.raises(ValueError, match="cu must not fall from 0 to 4"):
            received_attention(q, q, wrong, scale=SCALE)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            received_attention(q, q, cu, scale=scale)

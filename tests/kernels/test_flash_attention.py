"""The native dense kernel is the textbook sum; what it cannot read is refused."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_kernels.flash_attention import can_attend_dense, flash_attention

module = importlib.import_module("vlm_kernels.dense_attention")

if not can_attend_dense(torch.bfloat16, torch.device("cpu")):
    pytest.skip("no native kernel: this CPU does not multiply bfloat16", allow_module_level=True)

Shape = tuple[int, int, int, int, int, int]


def tensors(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seqs, heads, groups, queries, keys, head_dim = shape
    rng = torch.Generator().manual_seed(sum(shape))
    q = torch.randn(seqs, heads, groups, queries, head_dim, generator=rng).bfloat16()
    k, v = torch.randn(2, seqs, heads, keys, head_dim, generator=rng).bfloat16()
    return q, k, v


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    queries, keys = q.shape[3], k.shape[2]
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    mask = torch.zeros(1, 1, queries, keys).masked_fill(hidden & causal, float("-inf"))
    got = module.dense_attention_reference(
        q.flatten(0, 1).float(), k.flatten(0, 1), v.flatten(0, 1), scale=0.3, mask=mask
    )
    return got.view(q.shape)


def check(shape: Shape, *, causal: bool) -> None:
    q, k, v = tensors(shape)
    guarded = torch.full((shape[0] + 2, *q.shape[1:]), 7.0).bfloat16()
    out = guarded[1:-1]
    out.fill_(float("nan"))
    flash_attention(q, k, v, out, scale=0.3, causal=causal)
    torch.testing.assert_close(
        out.float(), definition(q, k, v, causal=causal), atol=2e-2, rtol=2e-2
    )
    assert (guarded[0] == 7).all()
    assert (guarded[-1] == 7).all()


@pytest.mark.parametrize(
    ("shape", "causal"),
    [
        pytest.param((1, 2, 4, 130, 130, 128), True, id="a prompt"),
        pytest.param((1, 2, 4, 40, 300, 64), True, id="a chunk"),
        pytest.param((1, 1, 7, 10, 64, 80), True, id="GQA-7, keys of one tile"),
        pytest.param((1, 1, 60, 3, 65, 32), True, id="more heads than rows of an item"),
        pytest.param((3, 4, 1, 64, 64, 80), False, id="windows of a picture"),
        pytest.param((1, 2, 1, 1, 1, 1), False, id="one of each"),
        pytest.param((2, 2, 1, 49, 129, 33), False, id="nothing fits"),
    ],
)
def test_keys_are_weighed_as_the_definition_says(shape: Shape, causal: bool) -> None:
    check(shape, causal=causal)


@given(
    st.tuples(
        st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 60),
        st.integers(0, 140), st.integers(1, 70),
    ),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=40)
def test_any_shape_computes_the_definition(shape: Shape, causal: bool) -> None:
    seqs, heads, groups, queries, past, head_dim = shape
    check((seqs, heads, groups, queries, queries + past, head_dim), causal=causal)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=4), st.integers(1, 5))
@settings(max_examples=20)
def test_chunks_answer_as_the_whole_prompt_to_the_last_bit(chunks: list[int], groups: int) -> None:
    total = sum(chunks)
    q, k, v = tensors((1, 2, groups, total, total, 32))
    whole = torch.empty_like(q)
    flash_attention(q, k, v, whole, scale=0.3, causal=True)
    end = 0
    for size in chunks:
        end += size
        out = torch.empty_like(q[:, :, :, end - size : end])
        flash_attention(
            q[:, :, :, end - size : end], k[:, :, :end], v[:, :, :end], out, scale=0.3, causal=True
        )
        assert torch.equal(out, whole[:, :, :, end - size : end])


def test_threads_change_no_bit() -> None:
    q, k, v = tensors((2, 2, 3, 100, 150, 64))
    outs = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        outs.append(torch.empty_like(q))
        flash_attention(q, k, v, outs[-1], scale=0.3)
    torch.set_num_threads(before)
    assert torch.equal(*outs)


def test_tensors_that_lie_token_by_token_are_read_in_place() -> None:
    q, k, v = tensors((2, 3, 2, 33, 33, 24))
    want = torch.empty_like(q)
    flash_attention(q, k, v, want, scale=0.3)
    by_token = [x.transpose(1, -2).contiguous().transpose(1, -2) for x in (q, k, v)]
    out = torch.empty(2, 33, 2, 3, 24, dtype=torch.bfloat16).transpose(1, 3)
    flash_attention(*by_token, out, scale=0.3)
    assert torch.equal(out, want)


@pytest.mark.parametrize("name", ["k", "v"])
def test_not_a_number_shows_and_stays_in_its_sequence(name: str) -> None:
    q, k, v = tensors((3, 1, 2, 80, 80, 16))
    {"k": k, "v": v}[name][1, 0, 70] = float("nan")
    out = torch.empty_like(q)
    flash_attention(q, k, v, out, scale=0.3, causal=True)
    assert torch.isnan(out[1, :, :, 70:]).all()
    assert torch.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"k": (1, 2, 9, 8)}, "must fit q", id="keys without values"),
        pytest.param({"k": (1, 3, 5, 8), "v": (1, 3, 5, 8)}, "must fit q", id="heads"),
        pytest.param({"k": (1, 2, 0, 8), "v": (1, 2, 0, 8)}, "too few", id="no keys"),
        pytest.param({"k": (1, 2, 3, 8), "v": (1, 2, 3, 8)}, "too few", id="causal, short"),
        pytest.param({"out": (1, 2, 2, 4, 9)}, "must be like q", id="out"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    changes: dict[str, tuple[int, ...]], message: str
) -> None:
    shapes = {"q": (1, 2, 2, 4, 8), "k": (1, 2, 5, 8), "v": (1, 2, 5, 8), "out": (1, 2, 2, 4, 8)}
    given = [torch.zeros(shape).bfloat16() for shape in {**shapes, **changes}.values()]
    with pytest.raises(ValueError, match=message):
        flash_attention(*given, scale=1.0, causal=True)


def test_other_types_and_strides_are_refused() -> None:
    q, k, v = tensors((1, 2, 2, 4, 5, 8))
    with pytest.raises(ValueError, match="k is"):
        flash_attention(q, k.float(), v, q.clone(), scale=1.0)
    by_feature = v.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="v has inner stride 5"):
        flash_attention(q, k, by_feature, q.clone(), scale=1.0)

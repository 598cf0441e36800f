"""The native kernel of packed segments is the textbook sum."""

from __future__ import annotations

import dataclasses
import importlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.batches import make_batch, one_thread, poison
from kernels.packed import Case
from kernels.rounding import OVER_OTHER_KV, assert_attended, assert_near
from kernels.variants import each_variant

from vlm_kernels.flash_attention import (
    can_attend_segments,
    flash_attention,
)
from vlm_kernels.segments import plan_segments, segment_attention_reference

if not can_attend_segments(torch.bfloat16, torch.device("cpu")):
    pytest.skip("this CPU has no AVX512-BF16", allow_module_level=True)

module = importlib.import_module("vlm_kernels.flash_attention")  # the package has the function
variant = each_variant(module, needs="avx512_bf16", has_torch=False)

KV_TYPES = [torch.float32, torch.bfloat16, torch.int8]


def attend(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Between two guards that nobody may touch."""
    guarded = torch.full((len(q) + 2, *q.shape[1:]), 7.0).bfloat16()
    out = guarded[1:-1]
    out.fill_(float("nan"))
    flash_attention(case.segments, q, k, v, out, scale=0.3, softcap=case.softcap)
    assert (guarded[0] == 7).all()
    assert (guarded[-1] == 7).all()
    return out


def check(case: Case) -> None:
    q, k, v = case.tensors()
    assert_defined(attend(case, q, k, v), case, q, k, v)


@one_thread()
def assert_defined(
    got: torch.Tensor, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    *, scale: float = 0.3,
) -> None:  # fmt: skip
    exact, weighed = (
        segment_attention_reference(
            case.segments, q.float(), k, x, scale=scale, softcap=case.softcap
        )
        for x in (v, v.abs())
    )
    assert_attended(got, exact, weighed)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(((130, 130),), 2, 4, 128), id="a prompt"),
        pytest.param(Case(((40, 300), (7, 7)), 2, 4, 64), id="a chunk, and a prompt"),
        pytest.param(Case(((10, 64),), 1, 7, 80), id="GQA-7, keys of one tile"),
        pytest.param(Case(((3, 65),), 1, 60, 32), id="more heads than rows of an item"),
        pytest.param(Case(((64, 64),) * 3 + ((16, 16),), 4, 1, 80, False), id="windows"),
        pytest.param(Case(((1, 1),), 2, 1, 1, False), id="one of each"),
        pytest.param(Case(((49, 129), (2, 3)), 2, 1, 33, False), id="nothing fits"),
        pytest.param(Case(((90, 200),), 1, 2, 64, window=70), id="a sliding window"),
        pytest.param(Case(((150, 150),), 1, 2, 64, spans=((5, 80), (90, 150))), id="spans"),
        pytest.param(Case(((70, 90),), 1, 2, 64, softcap=0.7), id="a soft cap"),
        pytest.param(
            Case(((90, 130),), 2, 3, 48, window=20, spans=((60, 110),), softcap=2.0), id="all three"
        ),
    ],
)
def test_keys_are_weighed_as_the_definition_says(case: Case) -> None:
    check(case)


def test_a_segment_too_large_to_be_packed_at_once_is_attended_some_heads_at_a_time() -> None:
    """16,400 keys of 9 heads are more than what is packed at once; all keys of all heads count."""
    check(Case(((3, 16_400),), 9, 1, 128))


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 140)), min_size=1, max_size=3),
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 140)),
    st.booleans(),
    st.sampled_from([None, 1, 9, 70]),
    st.sampled_from([(), ((3, 20),), ((0, 70), (75, 90))]),
    st.sampled_from([None, 1.5]),
)
@settings(max_examples=40)
def test_any_segments_compute_the_definition(
    lens: list[tuple[int, int]],
    shape: tuple[int, int, int],
    causal: bool,
    window: int | None,
    spans: tuple[tuple[int, int], ...],
    softcap: float | None,
) -> None:
    segments = tuple((queries, queries + past) for queries, past in lens)
    check(Case(segments, *shape, causal, window, spans, softcap))


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([None, 30]),
)
@settings(max_examples=20)
def test_chunks_answer_as_the_whole_prompt_to_the_last_bit(
    chunks: list[int], groups: int, window: int | None
) -> None:
    total = sum(chunks)
    whole = Case(((total, total),), 2, groups, 32, window=window)
    q, k, v = whole.tensors()
    want = attend(whole, q, k, v)
    for end, size in zip(itertools.accumulate(chunks), chunks, strict=True):
        chunk = dataclasses.replace(whole, lens=((size, end),))
        got = attend(chunk, q[end - size : end], k[:end], v[:end])
        assert torch.equal(got, want[end - size : end])


def test_together_is_alone_to_the_last_bit_on_any_number_of_threads() -> None:
    case = Case(((100, 150), (1, 70), (64, 64), (30, 31)), 2, 3, 64)
    q, k, v = case.tensors()
    together = attend(case, q, k, v)
    starts = np.cumsum([(0, 0), *case.lens], axis=0)
    for s, lens in enumerate(case.lens):
        (a, c), (b, d) = starts[s], starts[s + 1]
        alone = dataclasses.replace(case, lens=(lens,))
        assert torch.equal(attend(alone, q[a:b], k[c:d], v[c:d]), together[a:b])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):  # one shares no head, three nearly all
            torch.set_num_threads(num_threads)
            assert torch.equal(attend(case, q, k, v), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("softcap", [None, 200.0])
def test_scores_that_grow_along_the_keys_outgrow_no_weight(softcap: float | None) -> None:
    case = Case(((300, 300),), 1, 2, 64, softcap=softcap)
    q, k, v = case.tensors()
    k = k * torch.linspace(0.1, 60, 300)[:, None, None].bfloat16()
    got = attend(case, q, k, v)
    assert_defined(got, case, q, k, v)
    for row in (63, 64, 200, 299):  # which of the rows beside it grow is all the same to it
        alone = dataclasses.replace(case, lens=((1, row + 1),))
        assert torch.equal(attend(alone, q[[row]], k[: row + 1], v[: row + 1])[0], got[row])
    q[[10, 250]] = float("nan")
    beside = attend(case, q, k, v)
    assert torch.isnan(beside[[10, 250]]).all(), "the fault took no effect"
    rest = np.setdiff1d(np.arange(300), [10, 250])
    assert torch.equal(beside[rest], got[rest])


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_may_be_no_more_than_zero(scale: float) -> None:
    case = Case(((70, 90),), 1, 2, 64)
    q, k, v = case.tensors()
    out = torch.empty_like(q)
    flash_attention(case.segments, q, k, v, out, scale=scale)
    assert_defined(out, case, q, k, v, scale=scale)


@pytest.mark.parametrize("name", ["k", "v"])
def test_not_a_number_shows_and_stays_in_its_segment(name: str) -> None:
    case = Case(((80, 80),) * 3, 1, 2, 16)
    q, k, v = case.tensors()
    {"k": k, "v": v}[name][80 + 70, 0] = float("nan")
    out = attend(case, q, k, v)
    assert torch.isnan(out[80 + 70 : 160]).all()
    assert torch.isfinite(out[:80]).all()
    assert torch.isfinite(out[160:]).all()


def test_tokens_of_no_segment_are_left_alone() -> None:
    q, k, v = Case(((9, 9),), 1, 1, 8).tensors()
    segments = plan_segments(
        np.array([2]), np.array([9]), np.zeros(9, int), np.full(9, 9), tokens=np.array([4])
    )
    out = torch.full_like(q, 7.0)
    flash_attention(segments, q, k, v, out, scale=0.3)
    assert (out[[0, 1, 2, 3, 6, 7, 8]] == 7).all()
    assert (out[4:6] != 7).all()


# ---- over KV blocks ----


@pytest.mark.parametrize("kv_dtype", KV_TYPES, ids=str)
@pytest.mark.parametrize("window", [None, 40], ids=["full", "window"])
@pytest.mark.parametrize(
    ("num_kv_heads", "num_groups", "head_dim", "block_size"),
    [
        pytest.param(2, 1, 128, 64, id="MHA"),
        pytest.param(1, 8, 64, 16, id="GQA-8"),
        pytest.param(2, 3, 33, 4, id="nothing fits"),
    ],
)
def test_blocks_of_every_type_compute_the_definition(
    num_kv_heads: int, num_groups: int, head_dim: int, block_size: int,
    window: int | None, kv_dtype: torch.dtype,
) -> None:  # fmt: skip
    batch = make_batch(
        [(70, 30), (5, 1), (0, 90), (64, 2)], num_kv_heads=num_kv_heads, num_groups=num_groups,
        head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16, kv_dtype=kv_dtype,
        window=window, spans=(((72, 85),), (), ((4, 40), (60, 90)), ()),
    )  # fmt: skip
    got = batch.fast(1)
    assert_near(got, batch.exact(1), error=OVER_OTHER_KV)
    if kv_dtype == torch.bfloat16:
        assert_attended(got, batch.exact(1), batch.weighed(1))


@pytest.mark.parametrize("kv_dtype", KV_TYPES, ids=str)
def test_a_poisoned_neighbour_stays_alone(kv_dtype: torch.dtype) -> None:
    batch = make_batch([(9, 5), (14, 6), (11, 7)], dtype=torch.bfloat16, kv_dtype=kv_dtype)
    clean = batch.fast(0)
    batch.kv_cache[int(batch.block_table[1, 0])] = poison(kv_dtype)
    got = batch.fast(0)
    assert torch.isnan(got[5:11]).all(), "the fault took no effect"
    assert torch.equal(got[:5], clean[:5])
    assert torch.equal(got[11:], clean[11:])

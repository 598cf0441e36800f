"""Paged attention equals the definition, for any batch and any content of unused memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.batches import NUM_LAYERS, Batch, make_batch
from kernels.rounding import (
    BY_TORCH,
    OVER_OTHER_KV,
    assert_attended,
    assert_near,
    assert_within,
)

from vlm_kernels import plan_attention
from vlm_kernels.flash_attention import can_attend_blocks

INT8_TOLERANCE = 1e-3
"""Over int8 float32 queries are whole numbers where the CPU multiplies such."""


def check(batch: Batch, layer: int) -> None:
    """As near to the definition as what is rounded on the way allows."""
    got, exact = batch.fast(layer), batch.exact(layer)
    over_int8 = batch.kv_cache.dtype == torch.int8
    # a CPU without products of bfloat16 has no kernel for chunks of prefill: torch attends
    native = batch.use_native and can_attend_blocks(batch.kv_cache, batch.q.dtype)
    assert got.dtype == batch.q.dtype
    if got.dtype == torch.float32 and over_int8:
        assert_within(got, exact, torch.full_like(exact, INT8_TOLERANCE))
    elif got.dtype == torch.float32 or (native and not over_int8):
        assert_attended(got, exact, batch.weighed(layer))
    elif native:
        assert_near(got, exact, error=OVER_OTHER_KV)
    else:
        assert_near(got, exact, error=BY_TORCH if not over_int8 else 1.5 * BY_TORCH)


MIXED = [(40, 1), (3, 1), (0, 13), (17, 30), (55, 1), (20, 9), (41, 1)]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        pytest.param(torch.float32, torch.float32, id="float32"),
        pytest.param(torch.bfloat16, torch.bfloat16, id="bfloat16"),
        pytest.param(torch.float32, torch.int8, id="float32 over int8"),
        pytest.param(torch.bfloat16, torch.int8, id="bfloat16 over int8"),
    ],
)
@pytest.mark.parametrize("use_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("window", [None, 11], ids=["full", "window"])
@pytest.mark.parametrize(
    ("num_kv_heads", "num_groups", "head_dim", "block_size"),
    [
        pytest.param(2, 2, 64, 64, id="shapes model"),
        pytest.param(1, 7, 24, 16, id="one KV head, odd sizes"),
        pytest.param(3, 1, 8, 4, id="no grouping"),
        pytest.param(2, 4, 32, 1, id="one slot per block"),
    ],
)
def test_a_mixed_step_equals_the_definition(
    num_kv_heads: int, num_groups: int, head_dim: int, block_size: int,
    window: int | None, use_native: bool, dtype: torch.dtype, kv_dtype: torch.dtype,
) -> None:  # fmt: skip
    batch = make_batch(
        MIXED, num_kv_heads=num_kv_heads, num_groups=num_groups, head_dim=head_dim,
        block_size=block_size, dtype=dtype, kv_dtype=kv_dtype, window=window,
    )  # fmt: skip
    batch.use_native = use_native
    for layer in range(NUM_LAYERS):
        check(batch, layer)


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "torch"])
def test_a_soft_cap_bounds_the_scores_of_chunks_and_decoding_rows(use_native: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        batch = make_batch(MIXED, dtype=dtype, window=30)
        batch.use_native, batch.softcap = use_native, 0.7
        check(batch, 0)


@pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])
def test_tokens_of_one_span_see_each_other_in_both_directions(window: int | None) -> None:
    spans = (((2, 8), (9, 12)), (), ((18, 30),), ((1, 5),))
    batch = make_batch([(0, 13), (6, 4), (17, 30), (20, 1)], spans=spans, window=window)
    check(batch, 1)
    got = batch.fast(1)
    causal = dataclasses.replace(batch, spans=((),) * 4).fast(1)
    assert (got - causal).abs().max() > 0.1, "the spans change nothing"


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_see_the_start_of_their_span_beyond_the_window(
    dtype: torch.dtype, use_native: bool
) -> None:
    """The last two are one query each: the end of a span, and a token behind it."""
    spans = (((0, 11),), (), ((0, 47),), ((3, 19),), ((0, 21),), ((0, 20),))
    lens = [(0, 13), (6, 4), (0, 47), (0, 22), (20, 1), (20, 1)]
    batch = make_batch(lens, spans=spans, window=5, dtype=dtype)
    batch = dataclasses.replace(batch, use_native=use_native, spans_exceed_window=True)
    check(batch, 1)
    got = batch.fast(1)
    differs = (got - dataclasses.replace(batch, spans_exceed_window=False).fast(1)).abs() > 0.01
    assert differs[-2].any(), "the end of a span sees no more than its window"
    assert not differs[-1].any(), "a token behind a span sees more than its window"


lengths = st.lists(
    st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 12))), min_size=1, max_size=7
)


@given(
    lengths,
    st.sampled_from([1, 3, 4, 16]),
    st.sampled_from([None, 1, 6]),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=60)
def test_any_batch_equals_the_definition_and_together_is_alone(
    lens: list[tuple[int, int]], block_size: int, window: int | None, use_native: bool, seed: int
) -> None:
    batch = make_batch(lens, block_size=block_size, head_dim=8, window=window, seed=seed)
    batch.use_native = use_native
    check(batch, 0)
    got = batch.fast(0)
    for s in range(len(lens)):
        rows = slice(int(batch.query_start[s]), int(batch.query_start[s + 1]))
        torch.testing.assert_close(batch.alone(s).fast(0), got[rows], atol=1e-5, rtol=1e-5)


def test_padding_to_the_longest_at_most_doubles_what_is_read() -> None:
    lens = [(c, 1) for c in (3, 500, 7, 260, 120, 499, 9, 3, 64)]
    batch = make_batch(lens, head_dim=4, block_size=4)
    plan = plan_attention(
        batch.query_start, batch.context_lens, batch.block_table, batch.kv_cache,
        head_dim=4, dtype=torch.float32, use_native=False,
    )  # fmt: skip
    batch.use_native = False
    read = sum(group.num_seqs * group.num_kv for group in plan.groups)
    assert read <= 2 * sum(context + 1 for context, _ in lens)
    check(batch, 0)


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "torch"])
def test_a_poisoned_neighbour_stays_alone(use_native: bool) -> None:
    batch = make_batch([(9, 1), (14, 1), (11, 1)])
    batch.use_native = use_native
    clean = batch.fast(0)
    batch.kv_cache[int(batch.block_table[1, 0])] = float("nan")
    got = batch.fast(0)
    assert torch.isnan(got[1]).all(), "the fault took no effect"
    assert torch.equal(got[[0, 2]], clean[[0, 2]])

"""Paged attention in Triton is the textbook sum, whatever the tiles, splits and unused memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.batches import Batch, make_batch
from kernels.rounding import assert_attended

from vlm_kernels import gpu, paged_attention, plan_attention
from vlm_kernels.attention_plan import AttentionPlan
from vlm_kernels.gpu import attention_step
from vlm_kernels.gpu import paged_attention as launcher
from vlm_kernels.gpu.attention_shapes import SIZES
from vlm_kernels.tiled_attention import check_blocks, plan_captured

MIXED = [(40, 1), (3, 1), (0, 13), (17, 20), (20, 9)]
LONG = [(90, 1), (3, 1), (70, 13), (130, 1), (20, 9), (64, 1)]
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def planned(batch: Batch, kv_cache: torch.Tensor) -> AttentionPlan:
    return plan_attention(
        batch.query_start, batch.context_lens, batch.block_table, kv_cache,
        head_dim=batch.q.shape[-1], dtype=batch.q.dtype, spans=batch.spans, window=batch.window,
        num_heads=batch.q.shape[1], spans_exceed_window=batch.spans_exceed_window,
    )  # fmt: skip


def attend(batch: Batch, device: torch.device) -> torch.Tensor:
    kv_cache = batch.kv_cache.to(device)
    plan = planned(batch, kv_cache)
    assert plan.tiles is not None
    return paged_attention(
        batch.q.to(device), kv_cache, 1, plan, scale=0.3, softcap=batch.softcap
    ).cpu()


def check(batch: Batch, device: torch.device) -> torch.Tensor:
    got = attend(batch, device)
    assert_attended(got, batch.exact(1), batch.weighed(1))
    return got


def splits_of(batch: Batch, device: torch.device) -> list[int]:
    """Of the launches of one step."""
    tiles = planned(batch, batch.kv_cache.to(device)).tiles
    assert tiles is not None
    return [launch.num_splits for launch in tiles.launches]


@pytest.fixture(params=[1, 1000], ids=["whole", "split"])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As on a GPU with several processors; short sequences have several tiles of positions."""
    monkeypatch.setattr(gpu, "num_processors", lambda device: request.param)
    monkeypatch.setattr(attention_step, "MIN_SPLIT", 8)
    monkeypatch.setitem(launcher.DEFAULT, "TILE_N", 16)
    return int(request.param)


def test_the_batches_of_this_file_are_split_where_they_say_so(
    splits: int, device: torch.device
) -> None:
    for lens in (MIXED, LONG):
        assert (max(splits_of(make_batch(lens), device)) > 1) == (splits > 1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("num_kv_heads", "num_groups", "head_dim", "block_size", "window"),
    [
        pytest.param(2, 2, 16, 4, None, id="small"),
        pytest.param(1, 7, 24, 16, 11, id="one KV head, odd sizes, a window"),
        pytest.param(2, 1, 64, 64, None, id="no grouping"),
    ],
)
def test_a_mixed_step_equals_the_definition(
    num_kv_heads: int, num_groups: int, head_dim: int, block_size: int, window: int | None,
    dtype: torch.dtype, splits: int, device: torch.device,
) -> None:  # fmt: skip
    batch = make_batch(
        MIXED, num_kv_heads=num_kv_heads, num_groups=num_groups, head_dim=head_dim,
        block_size=block_size, dtype=dtype, window=window,
    )  # fmt: skip
    check(batch, device)


@pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])
def test_tokens_of_one_span_see_each_other_in_both_directions(
    window: int | None, splits: int, device: torch.device
) -> None:
    spans = (((2, 8), (9, 12)), (), ((18, 30),), ((1, 5),))
    batch = make_batch([(0, 13), (6, 4), (17, 30), (20, 1)], spans=spans, window=window)
    got = check(batch, device)
    causal = attend(dataclasses.replace(batch, spans=((),) * 4), device)
    assert (got - causal).abs().max() > 0.1, "the spans change nothing"


def test_tokens_see_the_start_of_their_span_beyond_the_window(
    splits: int, device: torch.device
) -> None:
    """The last two are one query each: the end of a span, and a token behind it."""
    spans = (((2, 11),), (), ((0, 47),), ((3, 19),), ((0, 21),), ((0, 20),))
    lens = [(0, 13), (6, 4), (0, 47), (0, 22), (20, 1), (20, 1)]
    batch = make_batch(lens, spans=spans, window=5)
    got = check(dataclasses.replace(batch, spans_exceed_window=True), device)
    differs = (got - attend(batch, device)).abs() > 0.01
    assert differs[-2].any(), "the end of a span sees no more than its window"
    assert not differs[-1].any(), "a token behind a span sees more than its window"


def test_a_soft_cap_bounds_the_scores(splits: int, device: torch.device) -> None:
    batch = make_batch([(30, 1), (2, 5)])
    want = attend(batch, device)
    batch.q *= 4
    batch.softcap = 0.5
    got = check(batch, device)
    assert (got - want).abs().max() > 0.1, "the cap changes nothing"


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_quantised_kv_reads_as_its_values(
    dtype: torch.dtype, kv_dtype: torch.dtype, splits: int, device: torch.device
) -> None:
    batch = make_batch(MIXED, head_dim=24, dtype=dtype, kv_dtype=kv_dtype)
    check(batch, device)


@pytest.mark.parametrize("num_splits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_split_as_often_a_sequence_is_the_same_among_others_as_alone(
    dtype: torch.dtype, num_splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of splits is one per launch; its tiles and its longest sequence decide it."""
    monkeypatch.setattr(attention_step, "num_splits", lambda *args, **kwargs: num_splits)
    monkeypatch.setitem(launcher.DEFAULT, "TILE_N", 16)
    batch = make_batch(LONG, dtype=dtype)
    together = attend(batch, device)
    for s in range(len(LONG)):
        rows = slice(int(batch.query_start[s]), int(batch.query_start[s + 1]))
        assert torch.equal(attend(batch.alone(s), device), together[rows])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_however_often_it_is_split_a_sequence_is_the_same_but_for_roundings(
    dtype: torch.dtype, splits: int, device: torch.device
) -> None:
    """Alone it may be split more often than among others: other weights are rounded then."""
    batch = make_batch(LONG, dtype=dtype)
    together, weighed = attend(batch, device), batch.weighed(1)
    counts = set(splits_of(batch, device))
    for s in range(len(LONG)):
        rows = slice(int(batch.query_start[s]), int(batch.query_start[s + 1]))
        alone = batch.alone(s)
        counts.update(splits_of(alone, device))
        # both are rounded: each weight, and the answer
        assert_attended(attend(alone, device), together[rows].float(), 3 * weighed[rows])
    assert (len(counts) > 1) == (splits > 1), "sequences are split differently alone"


def test_a_poisoned_neighbour_stays_alone(splits: int, device: torch.device) -> None:
    batch = make_batch([(9, 1), (14, 1), (11, 3)])
    clean = attend(batch, device)
    batch.kv_cache[int(batch.block_table[1, 0])] = float("nan")
    got = attend(batch, device)
    assert torch.isnan(got[1]).all(), "the fault took no effect"
    assert torch.equal(got[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


@pytest.mark.full
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=6),
    st.sampled_from([1, 4, 16, 64]),
    st.sampled_from([1, 3, 4, 8]),
    st.sampled_from([None, 1, 6]),
)
@settings(max_examples=40, deadline=None)
def test_any_batch_equals_the_definition(
    lens: list[tuple[int, int]], block_size: int, num_groups: int, window: int | None
) -> None:
    batch = make_batch(
        lens, block_size=block_size, num_groups=num_groups, head_dim=8, window=window
    )
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check(batch, where)


def test_what_does_not_fit_raises_before_anything_runs(device: torch.device) -> None:
    batch = make_batch([(9, 1), (14, 3)])
    for block in (-1, len(batch.kv_cache)):
        table = batch.block_table.copy()
        table[1, 0] = block
        with pytest.raises(ValueError, match="a block is not in 0 to"):
            attend(dataclasses.replace(batch, block_table=table), device)
    with pytest.raises(ValueError, match="2 sequences of up to 17 positions, a block table"):
        attend(dataclasses.replace(batch, block_table=batch.block_table[:, :4]), device)
    with pytest.raises(ValueError, match="2 sequences of up to 17 positions, a block table"):
        attend(dataclasses.replace(batch, block_table=batch.block_table[:1]), device)
    with pytest.raises(ValueError, match="a span ends after its 17 positions"):
        attend(dataclasses.replace(batch, spans=((), ((15, 18),))), device)
    with pytest.raises(ValueError, match="3 query heads, 2 KV heads"):
        attend(dataclasses.replace(batch, q=batch.q[:, :3]), device)
    with pytest.raises(ValueError, match="the last must be 1"):
        attend(dataclasses.replace(batch, q=batch.q.transpose(1, 2).contiguous().mT), device)
    with pytest.raises(ValueError, match=r"q is torch.int32: must be float32, float16 or bfloat16"):
        attend(dataclasses.replace(batch, q=batch.q.int()), device)
    with pytest.raises(ValueError, match="a window of 0 tokens sees nothing"):
        attend(dataclasses.replace(batch, window=0), device)
    with pytest.raises(ValueError, match=r"softcap 0.0 must be above 0"):
        attend(dataclasses.replace(batch, softcap=0.0), device)
    for changes in (
        {"query_start": np.array([0, 0, 4], np.int32)},
        {"query_start": np.array([1, 2, 5], np.int32)},
        {"context_lens": np.array([-1, 14], np.int32)},
    ):
        with pytest.raises(ValueError, match="each sequence needs a query, and no negative past"):
            attend(dataclasses.replace(batch, **changes), device)


def test_a_plan_reads_no_other_cache_than_it_was_made_for(device: torch.device) -> None:
    batch = make_batch([(9, 1), (14, 3)])
    cache, q = batch.kv_cache.to(device), batch.q.to(device)
    plan = plan_attention(
        batch.query_start, batch.context_lens, batch.block_table, cache,
        head_dim=q.shape[-1], dtype=q.dtype, num_heads=q.shape[1],
    )  # fmt: skip
    for other in (cache[:-1], cache[..., : cache.shape[-1] // 2].contiguous()):
        with pytest.raises(ValueError, match=r"kv_cache is CacheShape.* the plan is of CacheShape"):
            paged_attention(q, other, 1, plan, scale=1)
    with pytest.raises(ValueError, match="the plan is of 4 tokens and 4 heads"):
        paged_attention(q[:3], cache, 1, plan, scale=1)
    with pytest.raises(ValueError, match="layer 2"):
        paged_attention(q, cache, 2, plan, scale=1)
    for form in (cache[:, :, :1].contiguous(), cache[0]):
        with pytest.raises(
            ValueError, match=r"must be \[T, H \* G, D\] and \[N, L, 2, H, P \* D\]"
        ):
            paged_attention(q, form, 1, plan, scale=1)
    with pytest.raises(ValueError, match=r"kv_cache is torch.float64"):
        paged_attention(q, cache.double(), 1, plan, scale=1)


class TestTiles:
    """Every query is in one tile, and a tile has no more rows than its launch."""

    @given(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 90)), min_size=1, max_size=9),
        st.integers(1, 20),
        st.sampled_from([None, 1, 7]),
        st.sampled_from(SIZES),
    )
    def test_tiles_cover_the_queries(
        self,
        lens: list[tuple[int, int]],
        num_groups: int,
        window: int | None,
        prefill_rows: int,
    ) -> None:
        context, queries = np.array(lens, np.int32).T
        query_start = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        first, limit = attention_step.intervals(query_start, context, window=window)
        assert (first < limit).all()
        found = attention_step.launches(
            query_start, first, limit, num_groups=num_groups, prefill_rows=prefill_rows
        )
        covered = np.zeros(query_start[-1], np.int32)
        for launch in found:
            for s, token, count in launch.tiles.tolist():
                assert count * num_groups <= launch.num_rows
                assert query_start[s] <= token
                assert token + count <= query_start[s + 1]
                covered[token : token + count] += 1
                seen = limit[token : token + count].max() - first[token : token + count].min()
                assert seen <= launch.longest
        assert (covered == 1).all()

    @given(st.integers(1, 10_000), st.integers(1, 1 << 20), st.integers(1, 200))
    def test_a_short_batch_is_split_and_a_full_one_is_not(
        self, programs: int, longest: int, processors: int
    ) -> None:
        splits = attention_step.num_splits(programs, longest, num_processors=processors)
        assert splits & (splits - 1) == 0
        assert splits == 1 or splits * programs <= 2 * processors
        assert splits == 1 or longest // splits >= attention_step.MIN_SPLIT


@pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])
def test_a_plan_that_is_refilled_answers_as_one_of_that_step_and_padding_is_zero(
    window: int | None, splits: int, device: torch.device
) -> None:
    size, longest = 4, 64
    first = torch.zeros(size, dtype=torch.int32, device=device)
    limit, table = torch.ones_like(first), torch.zeros(size, longest, dtype=torch.int32)
    table = table.to(device)
    for steps in ([(40, 1), (3, 1), (17, 1)], [(8, 1), (0, 1)]):
        batch = make_batch(steps, window=window)
        kv_cache, count = batch.kv_cache.to(device), len(steps)
        plan = plan_captured(
            first, limit, table, kv_cache, head_dim=batch.q.shape[-1], num_heads=batch.q.shape[1]
        )
        positions = torch.from_numpy(batch.context_lens)
        limit[:count], limit[count:] = (positions + 1).to(device), 1
        first.zero_()
        first[:count] = (positions + 1 - (window or longest)).clamp(min=0).to(device)
        table.zero_()
        width = batch.block_table.shape[1]
        table[:count, :width] = torch.from_numpy(batch.block_table).to(device)
        q = torch.cat([batch.q, batch.q[:1].expand(size - count, -1, -1)]).to(device)
        got = paged_attention(q, kv_cache, 1, plan, scale=0.3).cpu()
        assert_attended(got[:count], batch.exact(1), batch.weighed(1))
        assert (got[count:] == 0).all()


def test_a_plan_to_be_refilled_is_checked(device: torch.device) -> None:
    kv_cache = make_batch([(3, 1)]).kv_cache.to(device)
    ints = torch.zeros(2, dtype=torch.int32, device=device)
    table = torch.zeros(2, 3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="5 query heads"):
        plan_captured(ints, ints, table, kv_cache, head_dim=16, num_heads=5)
    with pytest.raises(ValueError, match=r"limit is torch\.int64"):
        plan_captured(ints, ints.long(), table, kv_cache, head_dim=16, num_heads=4)
    with pytest.raises(ValueError, match="a block is not in 0 to"):
        check_blocks(np.array([1]), np.array([[len(kv_cache)]]), kv_cache, head_dim=16)
    with pytest.raises(ValueError, match="1 sequences of up to 9000 positions"):
        check_blocks(np.array([9000]), np.array([[0]]), kv_cache, head_dim=16)

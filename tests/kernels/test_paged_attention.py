"""Paged attention is the textbook sum, whatever the batch and what lies in unused memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_kernels import paged_attention, plan_attention
from vlm_kernels.paged_attention import paged_attention_reference

NUM_LAYERS = 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclasses.dataclass
class Batch:
    """A packed step over a cache whose unused slots are NaN, but for the null block."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    query_start: np.ndarray
    context_lens: np.ndarray
    block_table: np.ndarray
    spans: tuple[tuple[tuple[int, int], ...], ...]
    window: int | None

    def fast(self, layer: int) -> torch.Tensor:
        plan = plan_attention(
            self.query_start, self.context_lens, self.block_table, self.kv_cache,
            head_dim=self.q.shape[-1], dtype=self.q.dtype, spans=self.spans, window=self.window,
        )  # fmt: skip
        return paged_attention(self.q, self.kv_cache, layer, plan, scale=0.3)

    def definition(self, layer: int) -> torch.Tensor:
        return paged_attention_reference(
            self.q, self.kv_cache, layer, self.query_start, self.context_lens, self.block_table,
            scale=0.3, spans=self.spans, window=self.window,
        )  # fmt: skip

    def alone(self, s: int) -> Batch:
        start, end = self.query_start[s], self.query_start[s + 1]
        return dataclasses.replace(
            self, q=self.q[start:end], query_start=np.array([0, end - start], np.int32),
            context_lens=self.context_lens[s : s + 1], block_table=self.block_table[s : s + 1],
            spans=self.spans[s : s + 1],
        )  # fmt: skip


def make_batch(
    lens: list[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    num_groups: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    spans: tuple[tuple[tuple[int, int], ...], ...] = (),
    seed: int = 0,
) -> Batch:
    """`lens` are (context, queries) of each sequence; blocks lie scattered in the cache."""
    rng = torch.Generator().manual_seed(seed)
    totals = [context + queries for context, queries in lens]
    need = [-(-total // block_size) for total in totals]
    order = (torch.randperm(sum(need) + 3, generator=rng) + 1).tolist()
    kv_cache = torch.full(
        (sum(need) + 4, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim),
        float("nan"),
        dtype=dtype,
    )
    kv_cache[0] = 0
    block_table = np.zeros((len(lens), max(need) + 1), np.int32)
    for s, total in enumerate(totals):
        block_table[s, : need[s]] = [order.pop() for _ in range(need[s])]
        for position in range(total):
            slots = kv_cache[block_table[s, position // block_size], :, :, :, position % block_size]
            slots.copy_(torch.randn(slots.shape, generator=rng))
    queries = [queries for _, queries in lens]
    return Batch(
        q=torch.randn(sum(queries), num_kv_heads * num_groups, head_dim, generator=rng).to(dtype),
        kv_cache=kv_cache.flatten(4),
        query_start=np.cumsum([0, *queries]).astype(np.int32),
        context_lens=np.array([context for context, _ in lens], np.int32),
        block_table=block_table,
        spans=spans or ((),) * len(lens),
        window=window,
    )


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert torch.isfinite(got).all(), "an element was not written, or unused memory was read"
    torch.testing.assert_close(got, want, atol=TOLERANCE[got.dtype], rtol=TOLERANCE[got.dtype])


MIXED = [(40, 1), (3, 1), (0, 13), (17, 30), (55, 1), (20, 9), (41, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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
    window: int | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    batch = make_batch(
        MIXED, num_kv_heads=num_kv_heads, num_groups=num_groups, head_dim=head_dim,
        block_size=block_size, dtype=dtype, window=window,
    )  # fmt: skip
    for layer in range(NUM_LAYERS):
        assert_close(batch.fast(layer), batch.definition(layer))


@pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])
def test_tokens_of_one_span_see_each_other_in_both_directions(window: int | None) -> None:
    spans = (((2, 8), (9, 12)), (), ((18, 30),), ((1, 5),))
    batch = make_batch([(0, 13), (6, 4), (17, 30), (20, 1)], spans=spans, window=window)
    got = batch.fast(1)
    assert_close(got, batch.definition(1))
    causal = dataclasses.replace(batch, spans=((),) * 4).fast(1)
    assert (got - causal).abs().max() > 0.1, "the spans change nothing"


lengths = st.lists(
    st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 12))), min_size=1, max_size=7
)


@given(lengths, st.sampled_from([1, 3, 4, 16]), st.sampled_from([None, 1, 6]), st.integers(0, 99))
@settings(max_examples=60)
def test_any_batch_equals_the_definition_and_together_is_alone(
    lens: list[tuple[int, int]], block_size: int, window: int | None, seed: int
) -> None:
    batch = make_batch(lens, block_size=block_size, head_dim=8, window=window, seed=seed)
    got = batch.fast(0)
    assert_close(got, batch.definition(0))
    for s in range(len(lens)):
        rows = slice(int(batch.query_start[s]), int(batch.query_start[s + 1]))
        assert_close(batch.alone(s).fast(0), got[rows])


def test_padding_to_the_longest_at_most_doubles_what_is_read() -> None:
    lens = [(c, 1) for c in (3, 500, 7, 260, 120, 499, 9, 3, 64)]
    batch = make_batch(lens, head_dim=4, block_size=4)
    plan = plan_attention(
        batch.query_start, batch.context_lens, batch.block_table, batch.kv_cache,
        head_dim=4, dtype=torch.float32,
    )  # fmt: skip
    read = sum(group.num_seqs * group.num_kv for group in plan.groups)
    assert read <= 2 * sum(context + 1 for context, _ in lens)
    assert_close(batch.fast(0), batch.definition(0))


def test_a_poisoned_neighbour_stays_alone() -> None:
    batch = make_batch([(9, 1), (14, 1), (11, 1)])
    clean = batch.fast(0)
    batch.kv_cache[int(batch.block_table[1, 0])] = float("nan")
    got = batch.fast(0)
    assert torch.isnan(got[1]).all(), "the fault took no effect"
    assert torch.equal(got[[0, 2]], clean[[0, 2]])

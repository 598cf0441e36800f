"""Which steps a graph may compute, and how they are padded to its size."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.step_values import ImageRows, SampleParams, StepInputs
from vlm_worker.model.gpu.decode_steps import graph_sizes, is_decode, size_for, static_steps
from vlm_worker.model.gpu.graphs import total_bytes

BLOCK_SIZE, HEAD_DIM, NUM_HEADS = 4, 8, 4
CACHE = torch.zeros(20, 1, 2, 2, BLOCK_SIZE * HEAD_DIM)


@given(st.integers(1, 600))
def test_sizes_rise_to_the_most_sequences_and_waste_less_than_a_stride(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == most
    for num_seqs in range(1, most + 1):
        size = size_for(num_seqs, sizes)
        assert size is not None
        assert num_seqs <= size < num_seqs + 8
        assert size_for(size, sizes) == size
    assert size_for(most + 1, sizes) is None


def test_sizes_are_these() -> None:
    assert graph_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(0) == ()


def decode(contexts: list[int], *, width: int = 4) -> StepInputs:
    """Sequences with one new token each; sequence s has the blocks s + 1, s + 2, ..."""
    count = len(contexts)
    context = np.array(contexts, np.int32)
    table = 1 + np.arange(count)[:, None] + np.arange(width)
    return StepInputs(
        token_ids=np.arange(count) + 50,
        positions=np.tile(context.astype(np.int64), (3, 1)),
        slot_mapping=np.arange(count, dtype=np.int64) + 100,
        query_start=np.arange(count + 1, dtype=np.int32),
        context_lens=context,
        block_table=table.astype(np.int32),
        spans=((),) * count,
        image_rows=(),
        sample_rows=np.arange(count),
        sampling=SampleParams.all_greedy(count),
    )


STEP = decode([5, 9])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"token_ids": np.arange(3)}, id="a chunk of a prompt"),
        pytest.param({"image_rows": (ImageRows(None, 0, 0, 1),)}, id="an image's token"),
        pytest.param({"spans": ((), ((0, 9),))}, id="a span of an image"),
        pytest.param({"sample_rows": np.array([1])}, id="a token that is not sampled"),
    ],
)
def test_only_decode_is_replayed(change: dict[str, Any]) -> None:
    assert is_decode(STEP)
    assert not is_decode(dataclasses.replace(STEP, **change))


@given(st.lists(st.integers(0, 15), min_size=1, max_size=8), st.sampled_from([None, 3]))
def test_a_step_is_loaded_with_harmless_rows_behind(
    contexts: list[int], window: int | None
) -> None:
    steps = static_steps(
        graph_sizes(8), num_position_rows=3, table_width=6, device=torch.device("cpu")
    )
    for of_size in (decode([15] * 8, width=6), decode(contexts)):  # the second in the same memory
        count = len(of_size.context_lens)
        size = size_for(count, tuple(steps))
        assert size is not None
        step = steps[size]
        step.plan(None, CACHE, head_dim=HEAD_DIM, num_heads=NUM_HEADS)
        step.plan(window, CACHE, head_dim=HEAD_DIM, num_heads=NUM_HEADS)
        step.load(of_size, CACHE, head_dim=HEAD_DIM)
        fields, context = step.fields, of_size.context_lens
        assert fields.ids[:count].tolist() == of_size.token_ids.tolist()
        assert fields.slots[:count].tolist() == of_size.slot_mapping.tolist()
        assert fields.positions[:, :count].tolist() == of_size.positions.tolist()
        assert fields.limit[:count].tolist() == (context + 1).tolist()
        first = np.maximum(0, context + 1 - (window or 99))
        assert fields.firsts[0, :count].tolist() == [0] * count
        assert fields.firsts[0 if window is None else 1, :count].tolist() == first.tolist()
        width = of_size.block_table.shape[1]
        assert fields.table[:count, :width].tolist() == of_size.block_table.tolist()
        assert fields.slots[count:].tolist() == [-1] * (size - count)
        assert fields.limit[count:].tolist() == [1] * (size - count)
        assert not any(x[..., count:].any() for x in (fields.ids, fields.positions, fields.firsts))
        assert not fields.table[count:, 0].any(), "padding reads the null block"


def test_what_would_read_another_block_is_not_loaded() -> None:
    (step,) = static_steps(
        [2], num_position_rows=3, table_width=4, device=torch.device("cpu")
    ).values()
    assert step.fits(decode([1]))
    assert not step.fits(decode([1], width=5))
    before = step.fields.ids.clone()
    wrong = dataclasses.replace(STEP, block_table=np.full((2, 4), 20, np.int32))
    with pytest.raises(ValueError, match="a block is not in 0 to 19"):
        step.load(wrong, CACHE, head_dim=HEAD_DIM)
    with pytest.raises(ValueError, match="2 sequences of up to 17 positions"):
        step.load(decode([16, 1]), CACHE, head_dim=HEAD_DIM)
    assert torch.equal(step.fields.ids, before)


def test_memory_of_all_graphs_follows_from_two() -> None:
    assert total_bytes([100, 7], num_graphs=5) == 128
    assert total_bytes([100], num_graphs=1) == 100
    assert total_bytes([-3, 7], num_graphs=2) == 7, "others gave memory back meanwhile"

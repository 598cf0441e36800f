"""Rows move bit by bit, with their scales, some at a time, and touch nothing else."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_kernels import move_rows
from vlm_kernels.kv_rows import LIMITS
from vlm_kernels.move_rows import move_rows_reference

module = importlib.import_module("vlm_kernels.move_rows")  # the package has the function

TYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def make_cache(dtype: torch.dtype, *, block_size: int = 4, head_dim: int = 8) -> torch.Tensor:
    slot = head_dim * dtype.itemsize + (4 if dtype in LIMITS else 0)
    rng = np.random.default_rng(3)
    data = rng.integers(0, 255, (9, 2, 2, 3, block_size * slot), np.uint8)
    return torch.from_numpy(data).view(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("num_at_once", [1, 3, 1000])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_compaction_equals_the_definition(
    dtype: torch.dtype, num_at_once: int, data: st.DataObject
) -> None:
    cache = make_cache(dtype)
    order = data.draw(st.permutations(range(36)))  # of the slots: any blocks, or none
    kept = sorted(data.draw(st.sets(st.integers(0, 30), min_size=1)))
    sources = np.array([order[token] for token in kept], np.int64)
    targets = np.array([order[place] for place in range(len(kept))], np.int64)
    want = cache.clone()
    move_rows_reference(want, sources, targets, head_dim=8)
    with pytest.MonkeyPatch.context() as patch:
        row_bytes = cache[0].numel() * cache.element_size() // 4
        patch.setattr(module, "MAX_BYTES", num_at_once * row_bytes)
        move_rows(cache, sources, targets, head_dim=8)
    assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))


def test_a_row_is_in_its_new_slot_in_every_layer_and_head_with_its_scale() -> None:
    cache = make_cache(torch.int8)
    before = cache.clone()
    move_rows(cache, np.array([6], np.int64), np.array([33], np.int64), head_dim=8)
    elements, scales = before[1, ..., 16:24], before[1, ..., 40:44]
    assert torch.equal(cache[8, ..., 8:16], elements)
    assert torch.equal(cache[8, ..., 36:40], scales)
    cache[8, ..., 8:16], cache[8, ..., 36:40] = before[8, ..., 8:16], before[8, ..., 36:40]
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("sources", "targets"),
    [([1, 2], [3]), ([1, 2], [3, 3]), ([36], [1]), ([1], [-1])],
    ids=["another number", "a slot twice", "beyond the cache", "before it"],
)
def test_wrong_slots_are_refused(sources: list[int], targets: list[int]) -> None:
    cache = make_cache(torch.float32)
    with pytest.raises(ValueError, match=r"sources|targets"):
        move_rows(cache, np.array(sources, np.int64), np.array(targets, np.int64), head_dim=8)
    with pytest.raises(ValueError, match="int64"):
        move_rows(cache, np.array([1], np.int32), np.array([2], np.int32), head_dim=8)

"""Blocks leave and enter the cache bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vlm_kernels import block_memory, gather_blocks, scatter_blocks
from vlm_kernels.gather_blocks import gather_blocks_reference


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def cache(request: pytest.FixtureRequest) -> torch.Tensor:
    rng = torch.Generator().manual_seed(2)
    return torch.randn(9, 3, 2, 1, 5 * 7, generator=rng).to(request.param)


@pytest.mark.parametrize("ids", [[4], [8, 1, 3], [2, 2], []], ids=str)
def test_gathered_bytes_are_the_blocks_bytes(cache: torch.Tensor, ids: list[int]) -> None:
    at = np.array(ids, np.int64)
    got = gather_blocks(cache, at)
    assert got.shape == (len(ids), cache[0].numel() * cache.element_size())
    assert not np.shares_memory(got, cache.view(torch.uint8).numpy())
    if ids:
        assert np.array_equal(got, gather_blocks_reference(cache, at))


def test_blocks_are_gathered_into_memory_that_is_given(cache: torch.Tensor) -> None:
    at = np.array([8, 1], np.int64)
    around = np.full((4, cache[0].numel() * cache.element_size()), 7, np.uint8)
    gather_blocks(cache, at, around[1:3])
    assert np.array_equal(around[1:3], gather_blocks_reference(cache, at))
    assert (around[[0, 3]] == 7).all(), "what lies beside it is not touched"
    with pytest.raises(ValueError, match="for 2 blocks"):
        gather_blocks(cache, at, around[:3])


def test_the_memory_of_blocks_is_the_cache_itself(cache: torch.Tensor) -> None:
    other = torch.zeros_like(cache)
    ids = np.array([5, 0, 6], np.int64)
    for buffer, block in zip(block_memory(other, ids), gather_blocks(cache, ids), strict=True):
        buffer[:] = block.tobytes()
    want = torch.zeros_like(cache)
    scatter_blocks(want, ids, gather_blocks(cache, ids))
    assert torch.equal(other.view(torch.uint8), want.view(torch.uint8))


def test_there_is_no_memory_of_blocks_elsewhere(cache: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="host memory"):
        block_memory(cache.to("meta"), np.array([0], np.int64))
    with pytest.raises(ValueError, match="block"):
        block_memory(cache, np.array([len(cache)], np.int64))


def test_scatter_undoes_gather_and_touches_nothing_else(cache: torch.Tensor) -> None:
    moved = gather_blocks(cache, np.array([1, 2, 3], np.int64))
    moved.flags.writeable = False
    other = torch.full_like(cache, float("nan"))
    scatter_blocks(other, np.array([7, 0, 5], np.int64), moved)
    assert torch.equal(other[[7, 0, 5]], cache[[1, 2, 3]])
    assert torch.isnan(other[[1, 2, 3, 4, 6, 8]]).all()

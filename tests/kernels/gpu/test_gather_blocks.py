"""Blocks leave and enter a GPU's cache bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vlm_kernels import gather_blocks, scatter_blocks
from vlm_kernels.gather_blocks import gather_blocks_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("inner", [7, 64 * 24], ids=["odd", "several tiles"])
def test_scatter_undoes_gather_and_touches_nothing_else(
    inner: int, dtype: torch.dtype, device: torch.device
) -> None:
    cache = (torch.randn(9, 3, 2, 1, inner) * 99).to(dtype).to(device)
    moved = gather_blocks(cache, np.array([1, 8, 3], np.int64))
    assert np.array_equal(moved, gather_blocks_reference(cache, np.array([1, 8, 3], np.int64)))
    moved.flags.writeable = False
    other = torch.full_like(cache, 5)
    scatter_blocks(other, np.array([7, 0, 5], np.int64), moved)
    assert torch.equal(other[[7, 0, 5]], cache[[1, 8, 3]])
    assert (other[[1, 2, 3, 4, 6, 8]] == 5).all()


def test_no_block_is_no_work(device: torch.device) -> None:
    cache = torch.randn(3, 2, 2, 1, 8, device=device)
    assert gather_blocks(cache, np.array([], np.int64)).shape == (0, 128)


def test_what_does_not_fit_raises_before_anything_runs(device: torch.device) -> None:
    cache = torch.zeros(3, 2, 2, 1, 8, device=device)
    for ids in ([0, 3], [-1]):
        with pytest.raises(ValueError, match="a block is not in 0 to 2"):
            gather_blocks(cache, np.array(ids, np.int64))
    with pytest.raises(ValueError, match="must be int64"):
        gather_blocks(cache, np.array([1], np.int32))
    with pytest.raises(ValueError, match="bytes for 1 blocks"):
        scatter_blocks(cache, np.array([1], np.int64), np.ones((1, 127), np.uint8))
    with pytest.raises(ValueError, match="of float32"):
        scatter_blocks(cache, np.array([1], np.int64), np.ones((1, 128), np.float32))
    with pytest.raises(ValueError, match="a block is written twice"):
        scatter_blocks(cache, np.array([1, 2, 1]), np.ones((3, 128), np.uint8))
    constant, apart = np.ones((1, 128), np.uint8), np.ones((1, 256), np.uint8)[:, ::2]
    constant.flags.writeable = False
    for out in (constant, apart):
        with pytest.raises(ValueError, match="out_IC must be contiguous, and writeable"):
            gather_blocks(cache, np.array([1]), out)
    assert not cache.any()

"""Storing writes exactly the slots that it is told to."""

from __future__ import annotations

import pytest
import torch

from vlm_kernels import store_kv
from vlm_kernels.store_kv import store_kv_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "block_size"),
    [
        pytest.param(2, 64, 64, id="shapes model"),
        pytest.param(1, 7, 3, id="odd"),
        pytest.param(5, 8, 1, id="one slot"),
    ],
)
def test_new_tokens_land_in_their_slots_and_nothing_else_changes(
    num_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(1)
    num_blocks, num_layers = 6, 3
    shape = (num_blocks, num_layers, 2, num_heads, block_size * head_dim)
    cache = torch.randn(shape, generator=rng).to(dtype)
    want = cache.clone()
    slots = torch.randperm(num_blocks * block_size, generator=rng)[:5]
    k, v = torch.randn(2, 5, num_heads, head_dim, generator=rng)
    store_kv(k, v, cache, 1, slots)
    store_kv_reference(k, v, want, 1, slots)
    assert torch.equal(cache, want)
    assert torch.equal(
        cache.view(num_blocks, num_layers, 2, num_heads, block_size, head_dim)[
            int(slots[3]) // block_size, 1, 0, :, int(slots[3]) % block_size
        ],
        k[3].to(dtype),
    )

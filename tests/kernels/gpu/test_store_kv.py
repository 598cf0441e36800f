"""Storing in Triton writes exactly the requested slots, rounded as in the definition."""

from __future__ import annotations

import pytest
import torch
from kernels.batches import poisoned_cache

from vlm_kernels import store_kv
from vlm_kernels.kv_rows import values_of
from vlm_kernels.store_kv import store_kv_reference

CACHES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("kv_dtype", CACHES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "block_size", "given"),
    [
        pytest.param(2, 64, 64, torch.bfloat16, id="shapes model"),
        pytest.param(5, 12, 4, torch.float32, id="odd"),
        pytest.param(3, 24, 16, torch.float16, id="small"),
    ],
)
def test_new_tokens_land_in_their_slots_and_nothing_else_changes(
    num_heads: int, head_dim: int, block_size: int, given: torch.dtype, kv_dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    rng = torch.Generator().manual_seed(1)
    want = poisoned_cache((5, 2, 2, num_heads, block_size), head_dim, kv_dtype)
    cache = want.to(device, copy=True)
    slots = torch.randperm(5 * block_size, generator=rng)[:4]
    # as a model passes them: the packed axis is not the first in memory
    k, v = torch.randn(2, num_heads, 4, head_dim, generator=rng).to(given).transpose(1, 2)
    k[0, 0] = 0
    store_kv(k.to(device), v.to(device), cache, 1, slots.to(device))
    store_kv_reference(k, v, want, 1, slots)
    assert torch.equal(bits(cache), bits(want))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_a_slot_outside_the_cache_is_skipped(kv_dtype: torch.dtype, device: torch.device) -> None:
    cache = poisoned_cache((3, 2, 2, 2, 4), 8, kv_dtype).to(device)
    before = cache.clone()
    k = torch.ones(3, 2, 8, device=device)
    store_kv(k, k, cache, 0, torch.tensor([-1, 12, -1], device=device))
    assert torch.equal(bits(cache), bits(before))
    store_kv(k, k, cache, 0, torch.tensor([-1, 11, -1], device=device))
    assert not torch.equal(bits(cache), bits(before))


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_reads_as_such(
    spoiled: float, kv_dtype: torch.dtype, device: torch.device
) -> None:
    cache = torch.zeros(2, 1, 2, 1, 4 * 12, dtype=kv_dtype, device=device)
    k = torch.ones(2, 1, 8, device=device)
    k[0, 0, 3] = spoiled
    store_kv(k, torch.ones_like(k), cache, 0, torch.tensor([4, 5], device=device))
    values = values_of(cache.cpu(), 8)
    assert values[1, 0, 0, 0, 0].isnan().all()
    torch.testing.assert_close(values[1, 0, 0, 0, 1], torch.ones(8))
    torch.testing.assert_close(values[1, 0, 1, 0, :2], torch.ones(2, 8))


@pytest.mark.parametrize(
    ("slots", "k", "layer", "message"),
    [
        pytest.param([0, 3], torch.ones(2, 3, 8), 0, "must be", id="heads"),
        pytest.param([0, 3, 4], torch.ones(2, 2, 8), 0, "must be .3 slots", id="one slot too many"),
        pytest.param([0, 3], torch.ones(2, 2, 8), 5, "layer 5", id="layer"),
        pytest.param([0, 3], torch.ones(2, 8, 2).mT, 0, "the last must be 1", id="strides"),
        pytest.param([0.5, 3], torch.ones(2, 2, 8), 0, "int64", id="type"),
        pytest.param([0, 3], torch.ones(2, 2, 8).int(), 0, "k is torch.int32", id="type of k"),
        pytest.param([[0, 3]], torch.ones(1, 2, 8), 0, "slots .1, 2.: must be", id="two axes"),
    ],
)
def test_what_does_not_fit_raises_before_anything_runs(
    slots: list[int], k: torch.Tensor, layer: int, message: str, device: torch.device
) -> None:
    cache = torch.zeros(3, 2, 2, 2, 4 * 8, device=device)
    with pytest.raises(ValueError, match=message):
        store_kv(k.to(device), k.to(device), cache, layer, torch.tensor(slots, device=device))
    assert not cache.any()


def test_a_cache_of_another_form_raises_before_anything_runs(device: torch.device) -> None:
    k, slots = torch.ones(1, 2, 8, device=device), torch.tensor([0], device=device)
    for shape in ((3, 2, 2, 4 * 8), (3, 2, 1, 2, 4 * 8)):
        with pytest.raises(ValueError, match=r"kv_cache .* must be \[N, L, 2, H, P \* D\]"):
            store_kv(k, k, torch.zeros(shape, device=device), 0, slots)
    with pytest.raises(ValueError, match=r"kv_cache is torch.float64"):
        store_kv(k, k, torch.zeros(3, 2, 2, 2, 32, device=device).double(), 0, slots)
    with pytest.raises(ValueError, match="a slot of 7 does not divide 32 elements"):
        store_kv(k[..., :7], k[..., :7], torch.zeros(3, 2, 2, 2, 32, device=device), 0, slots)

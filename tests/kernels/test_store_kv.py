"""Storing writes exactly the requested slots."""

from __future__ import annotations

import importlib

import pytest
import torch

from vlm_kernels import store_kv
from vlm_kernels.kv_rows import slot_elements, values_of
from vlm_kernels.store_kv import store_kv_reference

module = importlib.import_module("vlm_kernels.store_kv")


@pytest.fixture(params=["native", "numpy"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library of this machine, if it has one, and without."""
    if request.param == "numpy":
        monkeypatch.setattr(module, "_kernel", lambda: None)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "block_size"),
    [
        pytest.param(2, 64, 64, id="shapes model"),
        pytest.param(1, 7, 3, id="odd"),
        pytest.param(5, 8, 1, id="one slot"),
    ],
)
def test_new_tokens_land_in_their_slots_and_nothing_else_changes(
    num_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, given: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(1)
    num_blocks, num_layers = 6, 3
    slot = slot_elements(dtype, head_dim)
    shape = (num_blocks, num_layers, 2, num_heads, block_size * slot)
    cache = (9 * torch.randn(shape, generator=rng)).to(dtype)
    want = cache.clone()
    slots = torch.randperm(num_blocks * block_size, generator=rng)[:5]
    # as a model passes them: the packed axis is not the first in memory
    k, v = torch.randn(2, num_heads, 5, head_dim, generator=rng).to(given).transpose(1, 2)
    store_kv(k, v, cache, 1, slots)
    store_kv_reference(k, v, want, 1, slots)
    assert torch.equal(cache, want)
    at = (int(slots[3]) // block_size, 1, 0, slice(None), int(slots[3]) % block_size)
    read = values_of(cache, head_dim)[at].float()
    if dtype == torch.int8:
        assert ((read - k[3].float()).abs() <= k[3].float().abs().amax(-1, True) / 253).all()
    else:
        assert torch.equal(read, k[3].to(dtype).float())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_int8_that_are_zero_read_as_zero_and_those_not_finite_as_nan(
    given: torch.dtype,
) -> None:
    cache = torch.zeros(2, 1, 2, 1, 4 * slot_elements(torch.int8, 40), dtype=torch.int8)
    k = torch.randn(4, 1, 40).to(given)
    k[0] = 0
    k[1, 0, 17], k[2, 0, 39] = float("nan"), -float("inf")
    store_kv(k, k, cache, 0, torch.arange(4, 8))
    read = values_of(cache, 40)[1, 0, 1, 0]
    assert (read[0] == 0).all()
    assert torch.isnan(read[1:3]).all()
    assert torch.isfinite(read[3]).all()
    assert not cache[0].any()


@pytest.mark.usefixtures("path")
def test_many_tokens_are_shared_by_threads() -> None:
    cache = torch.full((40, 2, 2, 2, 64 * 8), float("nan"))
    want = cache.clone()
    slots = torch.arange(64, 40 * 64)
    k, v = torch.randn(2, len(slots), 2, 8)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        store_kv(k, v, cache, 1, slots)
    finally:
        torch.set_num_threads(before)
    store_kv_reference(k, v, want, 1, slots)
    torch.testing.assert_close(cache, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("slots", "heads", "layer", "message"),
    [
        pytest.param([0, 12], 2, 0, "a slot is not in 0 to 11", id="behind the cache"),
        pytest.param([-1, 3], 2, 0, "a slot is not in 0 to 11", id="before the cache"),
        pytest.param([0, 3], 3, 0, "must be", id="heads"),
        pytest.param([0, 3, 4], 2, 0, "must be .3 slots", id="one slot too many"),
        pytest.param([0, 3], 2, 5, "layer 5", id="layer"),
    ],
)
def test_what_would_be_written_elsewhere_is_refused(
    slots: list[int], heads: int, layer: int, message: str
) -> None:
    cache = torch.zeros(3, 2, 2, 2, 4 * 8)
    k = torch.ones(2, heads, 8)
    with pytest.raises(ValueError, match=message):
        store_kv(k, k, cache, layer, torch.tensor(slots))
    assert not cache.any()

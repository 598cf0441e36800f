"""Blocks of 32 tokens in 4 bits: every kernel computes the definition over them."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.batches import NUM_LAYERS, Batch, make_batch, poison, poisoned_cache
from kernels.rounding import BY_TORCH, OVER_OTHER_KV, assert_near

from vlm_kernels import store_kv
from vlm_kernels.int4_groups import GROUP, piece_bytes, store_group, values_of_groups
from vlm_kernels.kv_rows import GROUPED, block_size_of
from vlm_kernels.mixed_blocks import num_parts, split_entries
from vlm_kernels.store_kv import store_kv_reference

store = importlib.import_module("vlm_kernels.store_kv")

CACHES = sorted(GROUPED, key=str)
TYPES = [(q, words) for q in (torch.float32, torch.bfloat16) for words in CACHES]
LENS = [(90, 1), (3, 1), (0, 23), (70, 30), (1, 1)]


def check(batch: Batch) -> None:
    for layer in range(NUM_LAYERS):
        got, exact = batch.fast(layer), batch.exact(layer)
        if got.dtype == torch.float32:
            torch.testing.assert_close(got, exact, atol=2e-5, rtol=2e-5)
        else:
            assert_near(got, exact, error=max(OVER_OTHER_KV, 1.5 * BY_TORCH))


# ---- the definition --------------------------------------------------------------------------


@given(st.sampled_from([2, 30, 64, 70]), st.booleans(), st.integers(0, 99))
@settings(max_examples=30)
def test_a_value_is_within_half_a_step_of_its_group(head_dim: int, is_key: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(GROUP, 3, head_dim, generator=rng) * 3 + torch.randn(head_dim, generator=rng)
    pieces = torch.full((3, piece_bytes(head_dim)), 255, dtype=torch.uint8)
    store_group(pieces, x, is_key=is_key)
    got = values_of_groups(pieces, torch.full((3,), is_key), head_dim).transpose(0, 1)
    for begin in range(0, head_dim, GROUP):
        of = slice(begin, begin + GROUP)
        values, axis = x[..., of], 0 if is_key else 2
        step = (values.amax(axis, keepdim=True) - values.amin(axis, keepdim=True)) / 15
        # scale and minimum are rounded to 8 bits
        rounding = values.abs().amax(axis, keepdim=True) / 128
        assert ((got[..., of] - values).abs() <= step / 2 + rounding).all()


def test_an_outlier_channel_of_keys_costs_the_other_channels_nothing() -> None:
    x = torch.randn(GROUP, 1, 64, generator=torch.Generator().manual_seed(1))
    pieces = torch.zeros(1, piece_bytes(64), dtype=torch.uint8)
    is_key = torch.ones(1, dtype=torch.bool)
    store_group(pieces, x, is_key=True)
    plain = values_of_groups(pieces, is_key, 64)[0]
    x[:, 0, 7] *= 1000
    store_group(pieces, x, is_key=True)
    got = values_of_groups(pieces, is_key, 64)[0]
    others = torch.arange(64) != 7
    assert torch.equal(got[:, others], plain[:, others])
    assert not torch.equal(got[:, 7], plain[:, 7])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
def test_a_group_with_a_number_that_is_not_finite_reads_as_nan(
    wrong: float, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr(store, "_kernel", lambda: None)
    cache = poisoned_cache((2, 1, 2, 1, 4), 64, torch.uint32)
    x = torch.randn(GROUP, 1, 64)
    x[5, 0, 40] = wrong
    store_kv(x, x, cache, 0, torch.arange(GROUP) + 3 * GROUP)
    is_key = torch.tensor([True, False])
    got = values_of_groups(cache[1, 0, :, 0].view(torch.uint8), is_key, 64)
    nans = torch.zeros(2, GROUP, 64, dtype=torch.bool)
    nans[0, :, 40], nans[1, 5, 32:] = True, True
    assert torch.equal(got.isnan(), nans)


# ---- the kernels -----------------------------------------------------------------------------


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("use_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize(
    ("num_kv_heads", "num_groups", "head_dim"),
    [pytest.param(2, 2, 64, id="shapes model"), pytest.param(1, 7, 34, id="nothing fits")],
)
def test_prompts_and_answers_over_groups_equal_the_definition(
    num_kv_heads: int, num_groups: int, head_dim: int,
    use_native: bool, types: tuple[torch.dtype, torch.dtype],
) -> None:  # fmt: skip
    batch = make_batch(
        LENS, num_kv_heads=num_kv_heads, num_groups=num_groups, head_dim=head_dim,
        dtype=types[0], kv_dtype=types[1],
    )  # fmt: skip
    batch.use_native = use_native
    kinds = split_entries(batch.block_table, num_parts(batch.kv_cache))[2]
    assert kinds.any()
    assert not kinds[batch.block_table > 0].all(), "the cache has one kind"
    check(batch)


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_together_is_alone_to_the_bit(types: tuple[torch.dtype, torch.dtype]) -> None:
    batch = make_batch([(700, 1), (4, 1), (299, 1)], dtype=types[0], kv_dtype=types[1])
    together = batch.fast(0)
    for s in range(3):
        assert torch.equal(batch.alone(s).fast(0), together[s : s + 1])


@pytest.mark.parametrize("kv_dtype", CACHES, ids=str)
def test_a_poisoned_neighbour_stays_alone(kv_dtype: torch.dtype) -> None:
    batch = make_batch([(9, 5), (14, 1), (11, 7)], dtype=torch.bfloat16, kv_dtype=kv_dtype)
    clean = batch.fast(0)
    block = split_entries(batch.block_table[1, :1], num_parts(batch.kv_cache))[0]
    batch.kv_cache[int(block[0])] = poison(kv_dtype)
    got = batch.fast(0)
    assert torch.isnan(got[5:6]).all(), "the fault took no effect"
    assert torch.equal(got[:5], clean[:5])
    assert torch.equal(got[6:], clean[6:])


@pytest.mark.parametrize("given_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_dtype", CACHES, ids=str)
@pytest.mark.parametrize("head_dim", [128, 34])
def test_new_tokens_have_the_bytes_of_the_definition_and_nothing_else_changes(
    head_dim: int, kv_dtype: torch.dtype, given_type: torch.dtype
) -> None:
    cache = poisoned_cache((6, 3, 2, 2, GROUP // (2 * kv_dtype.itemsize)), head_dim, kv_dtype)
    want, parts = cache.clone(), num_parts(cache)
    size = block_size_of(cache, head_dim)
    # a narrow block, a wide one, a narrow one
    entries = [*range(3 * parts, 4 * parts), 3 * 2 * parts, *range(11 * parts, 12 * parts)]
    slots = torch.tensor([e * size + o for e in entries for o in range(size)])
    k, v = torch.randn(2, 2, len(slots), head_dim).to(given_type).transpose(1, 2)
    store_kv(k, v, cache, 1, slots)
    store_kv_reference(k, v, want, 1, slots)
    assert torch.equal(cache, want)
    untouched = [0, 2, 4]
    ones = poisoned_cache((6, 3, 2, 2, size), head_dim, kv_dtype)
    assert torch.equal(cache[untouched], ones[untouched])
    assert torch.equal(cache[:, [0, 2]], ones[:, [0, 2]])
    assert not torch.equal(cache[1, 1], ones[1, 1])


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param(range(GROUP - 1), id="without its last token"),
        pytest.param(range(GROUP // 2, GROUP + GROUP // 2), id="over its end"),
        pytest.param([*range(16), *range(-64, -48), *range(16, 32)], id="with text between"),
        pytest.param([*range(1, GROUP), 0], id="in another order"),
    ],
)
def test_a_part_of_a_group_is_refused(slots: list[int]) -> None:
    cache = poisoned_cache((4, 1, 2, 1, 8), 16, torch.uint16)
    k = torch.ones(len(slots), 1, 16)
    with pytest.raises(ValueError, match="a block in 4 bits is written whole, 32 tokens in order"):
        store_kv(k, k, cache, 0, torch.tensor(slots) + 5 * GROUP)


def test_a_cache_of_another_size_is_refused() -> None:
    cache = torch.zeros(2, 1, 2, 1, 100, dtype=torch.uint16)
    with pytest.raises(ValueError, match="a block in 4 bits has 32 tokens of an even head_dim"):
        store_kv(torch.ones(1, 1, 16), torch.ones(1, 1, 16), cache, 0, torch.tensor([8]))
    assert np.prod(cache.shape) == 400

"""Caches with blocks of two kinds: every kernel computes the definition over them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.batches import NUM_LAYERS, Batch, make_batch, poison, poisoned_cache
from kernels.rounding import BY_TORCH, OVER_OTHER_KV, assert_near
from kernels.variants import library_of

from vlm_kernels import paged_attention, plan_attention, store_kv
from vlm_kernels.cpu import libraries, native
from vlm_kernels.kv_rows import MIXED
from vlm_kernels.mixed_blocks import num_entries, num_parts, split_entries
from vlm_kernels.paged_attention import paged_attention_reference
from vlm_kernels.store_kv import store_kv_reference

store = importlib.import_module("vlm_kernels.store_kv")
decode = importlib.import_module("vlm_kernels.decode_attention")

CACHES = sorted(MIXED, key=str)
TYPES = [
    pytest.param((torch.float32, torch.int32), id="float32 over float32 and int8"),
    pytest.param((torch.bfloat16, torch.int16), id="bfloat16 over bfloat16 and int8"),
    pytest.param((torch.bfloat16, torch.int32), id="bfloat16 over float32 and int8"),
    pytest.param((torch.float32, torch.int16), id="float32 over bfloat16 and int8"),
]


@pytest.fixture(params=[variant.name for variant in libraries.supported()])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Decode attention of each library that this machine can run, in place of the best."""
    if native.library() is None:
        pytest.skip("no native library on this machine")
    kernel = native.typed(library_of(request.param), decode.SYMBOL, *decode.ARGUMENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_kernel", lambda: kernel)
        yield request.param


def check(batch: Batch) -> None:
    """Values are read as the definition reads them, so only sums and weights round elsewhere."""
    for layer in range(NUM_LAYERS):
        got, exact = batch.fast(layer), batch.exact(layer)
        assert got.dtype == batch.q.dtype
        if got.dtype == torch.float32:
            torch.testing.assert_close(got, exact, atol=2e-5, rtol=2e-5)
        else:
            assert_near(got, exact, error=max(OVER_OTHER_KV, 1.5 * BY_TORCH))


lengths = st.lists(
    st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=6
)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("use_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize(
    ("num_kv_heads", "num_groups", "head_dim", "block_size"),
    [
        pytest.param(2, 2, 64, 16, id="shapes model"),
        pytest.param(1, 7, 33, 3, id="nothing fits"),
        pytest.param(2, 8, 128, 1, id="one slot per entry"),
    ],
)
def test_prompts_and_answers_over_both_kinds_equal_the_definition(
    num_kv_heads: int, num_groups: int, head_dim: int, block_size: int,
    use_native: bool, types: tuple[torch.dtype, torch.dtype],
) -> None:  # fmt: skip
    batch = make_batch(
        [(90, 1), (3, 1), (0, 23), (70, 30), (1, 1)], num_kv_heads=num_kv_heads,
        num_groups=num_groups, head_dim=head_dim, block_size=block_size,
        dtype=types[0], kv_dtype=types[1],
    )  # fmt: skip
    batch.use_native = use_native
    kinds = split_entries(batch.block_table, num_parts(batch.kv_cache))[2]
    assert kinds.any()
    assert not kinds[batch.block_table > 0].all(), "the cache has one kind"
    check(batch)


@given(
    lengths, st.sampled_from([1, 3, 4]), st.sampled_from(CACHES), st.sampled_from([None, 1, 6]),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60)
def test_any_batch_equals_the_definition_and_together_is_alone(
    lens: list[tuple[int, int]], block_size: int, kv_dtype: torch.dtype, window: int | None,
    use_native: bool, seed: int,
) -> None:  # fmt: skip
    batch = make_batch(
        lens, block_size=block_size, head_dim=8, kv_dtype=kv_dtype, window=window, seed=seed,
        dtype=torch.bfloat16 if seed % 2 else torch.float32,
    )  # fmt: skip
    batch.use_native = use_native
    check(batch)
    got = batch.fast(0)
    error = 1e-5 if got.dtype == torch.float32 else 2e-2
    for s in range(len(lens)):
        rows = slice(int(batch.query_start[s]), int(batch.query_start[s + 1]))
        torch.testing.assert_close(batch.alone(s).fast(0), got[rows], atol=error, rtol=error)


@pytest.mark.parametrize("types", TYPES)
def test_native_rows_have_the_same_bits_in_every_batch(
    types: tuple[torch.dtype, torch.dtype], variant: str
) -> None:
    batch = make_batch([(700, 1), (4, 1), (1099, 1)], dtype=types[0], kv_dtype=types[1])
    check(batch)
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


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("given_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_dtype", CACHES, ids=str)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (7, 3), (8, 1)])
def test_new_tokens_land_in_their_slots_and_nothing_else_changes(
    head_dim: int, block_size: int, kv_dtype: torch.dtype, given_type: torch.dtype,
    is_native: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not is_native:
        monkeypatch.setattr(store, "_kernel", lambda: None)
    cache = poisoned_cache((6, 3, 2, 2, block_size), head_dim, kv_dtype)
    want, parts = cache.clone(), num_parts(cache)
    # a narrow block, a wide one, a narrow one
    entries = [*range(3 * parts, 4 * parts), 3 * 2 * parts, 5 * 2 * parts + 2 * parts - 1]
    slots = torch.tensor([e * block_size + o for e in entries for o in range(block_size)])
    k, v = torch.randn(2, 2, len(slots), head_dim).to(given_type).transpose(1, 2)
    store_kv(k, v, cache, 1, slots)
    store_kv_reference(k, v, want, 1, slots)
    # 127 / max differs by the last bit in torch, which turns a tie of bfloat16 the other way
    differs = (cache.view(torch.int8).int() - want.view(torch.int8).int()).abs()
    assert differs.max() <= 1
    assert torch.equal(cache[3], want[3]), "wide rows have no ties"
    untouched = torch.ones(6, dtype=torch.bool)
    untouched[[0, 1, 3, 5]] = False
    assert (cache[untouched] == -1).all()
    assert (cache[1, 1] != -1).any()


@pytest.mark.parametrize("kv_dtype", CACHES, ids=str)
def test_wide_rows_are_exact_and_narrow_ones_within_half_a_step(kv_dtype: torch.dtype) -> None:
    wide, size, dim = MIXED[kv_dtype], 4, 16
    cache = poisoned_cache((3, 1, 2, 1, size), dim, kv_dtype)
    parts = num_parts(cache)
    k = torch.randn(2 * size, 1, dim).to(wide)
    entries = np.array([[2 * 2 * parts, 4 * parts - 1]], np.int32)
    slots = torch.tensor([e * size + o for e in entries[0].tolist() for o in range(size)])
    store_kv(k, k, cache, 0, slots)
    plan = plan_attention(
        np.array([0, 1], np.int32), np.array([0], np.int32), entries, cache,
        head_dim=dim, dtype=wide,
    )  # fmt: skip
    # a query that sees one token reads its value
    first = paged_attention(torch.zeros(1, 1, dim, dtype=wide), cache, 0, plan, scale=1.0)
    assert torch.equal(first[0, 0], k[0, 0])
    read = paged_attention_reference(
        torch.zeros(1, 1, dim), cache, 0, np.array([0, 1]), np.array([0]), entries[:, 1:], scale=1.0
    )[0, 0]
    most = float(k[size].float().abs().max())
    assert (read - k[size, 0].float()).abs().max() <= most / 253 + most / 256
    assert not torch.equal(read, k[size, 0].float()), "the narrow row is not quantised"


def test_an_entry_outside_the_cache_is_refused() -> None:
    batch = make_batch([(9, 1)], kv_dtype=torch.int32)
    table = batch.block_table.copy()
    table[0, 0] = num_entries(batch.kv_cache)
    with pytest.raises(ValueError, match="a block that is read is not in 0 to"):
        dataclasses.replace(batch, block_table=table).fast(0)
    k = torch.ones(1, 2, 16)
    with pytest.raises(ValueError, match="a slot is not in"):
        store_kv(k, k, batch.kv_cache, 0, torch.tensor([num_entries(batch.kv_cache) * 4]))

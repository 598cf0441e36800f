"""Attention mass is its definition, for every cache; each row gives 1 per head."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.batches import one_thread
from kernels.guards import GUARD, assert_guards_stand
from kernels.variants import each_variant

from vlm_kernels import attention_mass
from vlm_kernels.attention_mass import attention_mass_reference
from vlm_kernels.kv_rows import LIMITS
from vlm_kernels.store_kv import store_kv

module = importlib.import_module("vlm_kernels.attention_mass")  # the package has the function
variant = each_variant(module)

SCALE = 0.4
TYPES = [torch.float32, torch.bfloat16]


def sequence(
    num_tokens: int,
    num_rows: int,
    *,
    heads: tuple[int, int] = (2, 3),
    head_dim: int = 24,
    block_size: int = 5,
    q_type: torch.dtype = torch.bfloat16,
    kv_type: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Queries as a view of a joint product, a cache that is NaN elsewhere, and its blocks."""
    torch.manual_seed(num_tokens)
    num_kv_heads, groups = heads
    joint = torch.full((num_rows, num_kv_heads * groups + 2, head_dim), float("nan")).to(q_type)
    q = joint[:, 1:-1]
    q[:] = torch.randn(q.shape)
    num_blocks = -(-num_tokens // block_size)
    blocks = np.random.default_rng(num_tokens).permutation(num_blocks + 3)[:num_blocks]
    slot = block_size * (head_dim + (4 if kv_type in LIMITS else 0))
    cache = torch.full((num_blocks + 3, 2, 2, num_kv_heads, slot), float("nan"))
    cache = torch.full(cache.shape, 113, dtype=kv_type) if kv_type in LIMITS else cache.to(kv_type)
    index = np.arange(num_tokens)
    slots = torch.from_numpy(blocks[index // block_size] * block_size + index % block_size)
    k, v = torch.randn(2, num_tokens, num_kv_heads, head_dim).to(q_type)
    store_kv(k, v * float("nan") if kv_type not in LIMITS else v, cache, 1, slots)
    return q, cache, blocks.astype(np.int32)


def check(q: torch.Tensor, cache: torch.Tensor, blocks: np.ndarray, num_tokens: int) -> None:
    got = attention_mass(q, cache, 1, blocks, num_tokens, scale=SCALE)
    with one_thread():
        want = attention_mass_reference(q, cache, 1, blocks, num_tokens, scale=SCALE)
    assert got.dtype == torch.float32
    # int8 multiplies queries that are rounded to 16 bits
    error = 1e-3 if cache.dtype == torch.int8 else 2e-5
    torch.testing.assert_close(got, want, rtol=error, atol=1e-6)
    assert got.sum().item() == pytest.approx(q.shape[0] * q.shape[1], rel=1e-5)


@pytest.mark.parametrize("q_type", TYPES, ids=str)
@pytest.mark.parametrize("kv_type", [*TYPES, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "heads", "head_dim", "block_size"),
    [
        pytest.param(1, 1, (1, 1), 16, 1, id="one token"),
        pytest.param(7, 7, (2, 1), 24, 4, id="all rows"),
        pytest.param(64, 32, (2, 3), 80, 16, id="whole tiles"),
        pytest.param(65, 31, (1, 7), 64, 16, id="one more than a tile"),
        pytest.param(300, 32, (2, 2), 128, 16, id="a long sequence"),
    ],
)
def test_it_is_its_definition(
    num_tokens: int,
    num_rows: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    q_type: torch.dtype,
    kv_type: torch.dtype,
) -> None:
    made = sequence(
        num_tokens, num_rows, heads=heads, head_dim=head_dim, block_size=block_size,
        q_type=q_type, kv_type=kv_type,
    )  # fmt: skip
    check(*made, num_tokens)


@given(
    st.integers(1, 150), st.integers(1, 32), st.integers(1, 3), st.integers(1, 4),
    st.sampled_from([8, 20, 40]), st.integers(1, 9), st.sampled_from([*TYPES, torch.int8]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_sequence_equals_the_definition(
    num_tokens: int, num_rows: int, num_kv_heads: int, groups: int, head_dim: int,
    block_size: int, kv_type: torch.dtype,
) -> None:  # fmt: skip
    made = sequence(
        num_tokens, min(num_rows, num_tokens), heads=(num_kv_heads, groups), head_dim=head_dim,
        block_size=block_size, kv_type=kv_type,
    )  # fmt: skip
    check(*made, num_tokens)


@pytest.mark.parametrize("kv_type", [*TYPES, torch.int8], ids=str)
def test_it_is_the_same_on_any_number_of_threads(kv_type: torch.dtype, variant: str) -> None:
    q, cache, blocks = sequence(300, 32, kv_type=kv_type)
    before = torch.get_num_threads()
    try:
        masses = []
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            masses.append(attention_mass(q, cache, 1, blocks, 300, scale=SCALE))
    finally:
        torch.set_num_threads(before)
    for mass in masses[1:]:
        if variant == "torch":  # its library sums in an order that follows the threads
            torch.testing.assert_close(mass, masses[0])
        else:
            assert torch.equal(mass, masses[0])


def test_a_key_like_every_query_receives_all_that_see_it() -> None:
    q, cache, blocks = sequence(40, 8, heads=(1, 1), q_type=torch.float32, kv_type=torch.float32)
    k = torch.zeros(40, 1, 24)
    k[35] = 100
    index = np.arange(40)
    slots = torch.from_numpy(blocks[index // 5].astype(np.int64) * 5 + index % 5)
    store_kv(k, k, cache, 1, slots)
    got = attention_mass(torch.ones_like(q), cache, 1, blocks, 40, scale=SCALE)
    want = sum(1 / (seen + 1) for seen in range(32, 35))
    assert got[35].item() == pytest.approx(5, abs=1e-5)
    assert got[0].item() == pytest.approx(want, abs=1e-5)


def test_every_output_is_written_and_nothing_beside_it(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variant == "torch":
        pytest.skip("torch allocates its own results")
    q, cache, blocks = sequence(71, 9)
    want = attention_mass(q, cache, 1, blocks, 71, scale=SCALE)
    field = torch.full((GUARD + 71 + GUARD,), float("nan"))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_, **__: field[GUARD:-GUARD])
    assert torch.equal(attention_mass(q, cache, 1, blocks, 71, scale=SCALE), want)
    assert_guards_stand([field])


def test_wrong_arguments_are_refused() -> None:
    q, cache, blocks = sequence(20, 4)
    for wrong in (
        {"num_tokens": 3},
        {"num_tokens": 21},
        {"layer": 2},
        {"blocks": blocks.astype(np.int64)},
        {"blocks": blocks + len(cache)},
        {"scale": 0.0},
        {"q": q[:, :5]},
        {"q": q[:0]},
        {"cache": cache[:, :, :1]},
    ):
        given_ = {"q": q, "cache": cache, "layer": 1, "blocks": blocks, "num_tokens": 20} | wrong
        scale = given_.pop("scale", SCALE)
        with pytest.raises(ValueError, match=r"attention_mass|layer|kv_cache"):
            attention_mass(*given_.values(), scale=scale)  # type: ignore[arg-type]

"""Rotation in Triton is its definition, and so is rotation on the way into the cache."""

from __future__ import annotations

import pytest
import torch
from kernels.batches import poisoned_cache

from vlm_kernels import rope, rope_store_kv
from vlm_kernels.rope import rope_reference
from vlm_kernels.store_kv import store_kv_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def heads(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Strided, as the parts of a joint product are."""
    return (
        torch.randn(num_tokens, (num_heads + 1) * head_dim)
        .to(dtype)[:, head_dim:]
        .unflatten(1, (num_heads, head_dim))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["own tables", "float32 tables"])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(5, 24), (2, 64)])
def test_it_is_its_definition(
    num_heads: int, head_dim: int, wide: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = heads(3, num_heads, head_dim, dtype)
    cos, sin = torch.randn(2, 3, head_dim).to(torch.float32 if wide else dtype)
    field = torch.full((3, num_heads + 2, head_dim), float("nan"), dtype=dtype, device=device)
    inside = field[:, 1:-1]
    inside.copy_(x)
    rope(inside, cos.to(device), sin.to(device))
    torch.testing.assert_close(inside.cpu(), rope_reference(x, cos, sin), rtol=1e-6, atol=1e-6)
    assert field[:, [0, -1]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_keys_are_rotated_on_their_way(
    kv_dtype: torch.dtype | None, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    q, k, v = (heads(4, n, 24, dtype).to(device, copy=True) for n in (7, 2, 2))
    cos, sin = torch.randn(2, 4, 24).to(dtype)
    want = poisoned_cache((5, 2, 2, 2, 4), 24, kv_dtype or dtype)
    cache = want.to(device, copy=True)
    slots = torch.tensor([9, -1, 19, 4])
    rotated = rope_reference(q.cpu(), cos, sin)
    of_cache = [0, 2, 3]
    new_k = rope_reference(k.cpu(), cos, sin)[of_cache]
    rope_store_kv(q, k, v, cos.to(device), sin.to(device), cache, 1, slots.to(device))
    store_kv_reference(new_k, v.cpu()[of_cache], want, 1, slots[of_cache])
    torch.testing.assert_close(q.cpu(), rotated, rtol=1e-6, atol=1e-6)
    got, expected = (x.cpu().contiguous().view(torch.uint8) for x in (cache, want))
    assert torch.equal(got, expected)


def test_tables_in_float32_round_the_sum_alone_on_the_way_into_the_cache(
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    q, k, v = (heads(4, n, 24, torch.bfloat16).to(device, copy=True) for n in (3, 2, 2))
    cos, sin = (table.to(device) for table in torch.randn(2, 4, 24))
    rotated = [rope_reference(x, cos, sin) for x in (q, k)]
    got = torch.zeros(2, 1, 2, 2, 4 * 24, dtype=torch.bfloat16, device=device)
    want = got.clone().cpu()
    slots = torch.arange(4)
    rope_store_kv(q, k, v, cos, sin, got, 0, slots.to(device))
    store_kv_reference(rotated[1].cpu(), v.cpu(), want, 0, slots)
    torch.testing.assert_close(q, rotated[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=1e-6)


def test_what_does_not_fit_raises_before_anything_runs(device: torch.device) -> None:
    x, table = torch.ones(2, 3, 8, device=device), torch.ones(2, 8, device=device)
    with pytest.raises(ValueError, match=r"cos \(2, 7\)"):
        rope(x, table[:, :7], table)
    with pytest.raises(ValueError, match=r"sin torch.bfloat16"):
        rope(x, table, table.bfloat16())
    with pytest.raises(ValueError, match=r"x \(2, 24\): must be \[T, H, D\]"):
        rope(x.flatten(1), table, table)
    with pytest.raises(ValueError, match=r"x is torch.int32: must be float32, float16 or bfloat16"):
        rope(x.int(), table.int(), table.int())
    with pytest.raises(ValueError, match="the last must be 1"):
        rope(x.transpose(1, 2).contiguous().mT, table, table)
    cache = torch.zeros(3, 1, 2, 3, 4 * 8, device=device)
    with pytest.raises(ValueError, match="layer 1"):
        rope_store_kv(x, x, x, table, table, cache, 1, torch.tensor([0, 1], device=device))
    slots = torch.tensor([0, 1], device=device)
    for name, q, k in (("q", x[:1], x), ("k", x, x[:1])):
        with pytest.raises(ValueError, match=rf"rope: {name} \(1, 3, 8\), cos \(2, 8\)"):
            rope_store_kv(q, k, x, table, table, cache, 0, slots)
    with pytest.raises(ValueError, match=r"v \(2, 2, 8\): must be \[2 slots, 3, D\]"):
        rope_store_kv(x, x, x[:, :2], table, table, cache, 0, slots)
    assert (x == 1).all()
    assert not cache.any()

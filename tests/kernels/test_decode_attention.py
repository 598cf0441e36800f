"""The native decode kernel is the textbook sum in every variant; what it cannot read is refused."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.batches import Batch, make_batch, poison
from kernels.variants import library_of

from vlm_kernels import decode_attention as module
from vlm_kernels.cpu import libraries, native
from vlm_kernels.decode_attention import DecodeRows, attend_decode, plan_decode

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3}
"""bfloat16: one rounding of the result; results are below 2 here."""

INT8_TOLERANCE = 1e-3
"""float32 queries, which are whole numbers of 16 bits where the CPU multiplies such."""

TYPES = [
    pytest.param((torch.float32, torch.float32), id="float32"),
    pytest.param((torch.bfloat16, torch.bfloat16), id="bfloat16"),
    pytest.param((torch.bfloat16, torch.float32), id="bfloat16 over float32"),
    pytest.param((torch.float32, torch.bfloat16), id="float32 over bfloat16"),
    pytest.param((torch.float32, torch.int8), id="float32 over int8"),
    pytest.param((torch.bfloat16, torch.int8), id="bfloat16 over int8"),
]
"""Of queries and cache."""

if native.library() is None:
    pytest.skip("no native library on this machine", allow_module_level=True)


@pytest.fixture(params=[variant.name for variant in libraries.supported()])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each library that this machine can run, in place of the best."""
    kernel = native.typed(library_of(request.param), module.SYMBOL, *module.ARGUMENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_kernel", lambda: kernel)
        yield request.param


@dataclasses.dataclass
class Call:
    """A decode batch, planned."""

    batch: Batch
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def plan(self) -> DecodeRows:
        given = {
            "tokens": self.batch.query_start[:-1],
            "num_kv": self.batch.context_lens + 1,
            "block_table": self.batch.block_table,
            "kv_cache": self.batch.kv_cache,
            "head_dim": self.batch.q.shape[-1],
            "dtype": self.batch.q.dtype,
            "window": self.batch.window,
        }
        return plan_decode(**{**given, **self.changes})

    def answer(self, layer: int = 0) -> torch.Tensor:
        """Between two guards that nobody may touch."""
        q = self.batch.q
        guarded = torch.full((len(q) + 2, *q.shape[1:]), 7.0, dtype=q.dtype)
        softcap = self.batch.softcap
        attend_decode(self.plan(), q, layer, guarded[1:-1], scale=0.3, softcap=softcap)
        assert (guarded[0] == 7).all()
        assert (guarded[-1] == 7).all()
        return guarded[1:-1]


def decoding(lens: list[int], **shape: Any) -> Batch:
    return make_batch([(length - 1, 1) for length in lens], **shape)


def check(batch: Batch) -> None:
    got, want = Call(batch).answer(), batch.definition(0)
    assert torch.isfinite(got).all(), "an element was not written, or unused memory was read"
    exact = got.dtype == torch.bfloat16 or batch.kv_cache.dtype != torch.int8
    tolerance = TOLERANCE[got.dtype] if exact else INT8_TOLERANCE
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


LENGTHS = [1, 3, 31, 32, 33, 70]


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("window", [None, 33], ids=["full", "window"])
@pytest.mark.parametrize(
    ("num_kv_heads", "num_groups", "head_dim", "block_size"),
    [
        pytest.param(2, 1, 128, 64, id="MHA"),
        pytest.param(2, 4, 64, 4, id="GQA-4"),
        pytest.param(1, 7, 80, 16, id="GQA-7, a head of two and a half registers"),
        pytest.param(1, 8, 32, 16, id="GQA-8"),
        pytest.param(1, 3, 7, 5, id="nothing fits"),
        pytest.param(1, 2, 256, 1, id="one slot per block"),
    ],
)
def test_every_variant_computes_the_definition(
    num_kv_heads: int, num_groups: int, head_dim: int, block_size: int,
    window: int | None, types: tuple[torch.dtype, torch.dtype], variant: str,
) -> None:  # fmt: skip
    check(
        decoding(
            LENGTHS, num_kv_heads=num_kv_heads, num_groups=num_groups, head_dim=head_dim,
            block_size=block_size, dtype=types[0], kv_dtype=types[1], window=window,
        )
    )  # fmt: skip


@pytest.mark.parametrize("num_groups", [1, 2, 3, 4, 5, 8])
def test_heads_that_share_keys_keep_maxima_of_their_own(num_groups: int, variant: str) -> None:
    batch = decoding([100, 33], num_kv_heads=2, num_groups=num_groups, head_dim=32, block_size=16)
    growth = 2.0 ** (torch.arange(batch.q.shape[1]) % 5 - 2)  # the largest in no order of heads
    batch.q.mul_(growth.flip(0)[:, None])
    check(batch)


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-36])
def test_queries_of_next_to_nothing_weigh_all_positions_alike(size: float, variant: str) -> None:
    batch = decoding([70, 5], dtype=torch.float32, kv_dtype=torch.int8)
    batch.q.clamp_(-1, 1).mul_(size)
    check(batch)


def test_a_sequence_of_several_parts_is_added_up(variant: str) -> None:
    check(decoding([1024, 1025, 2050], num_kv_heads=1, num_groups=1, block_size=64))


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=5),
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 70), st.integers(1, 20)),
    st.sampled_from([None, 1, 6, 40]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
@settings(max_examples=60)
def test_any_shape_computes_the_definition(
    lens: list[int],
    shape: tuple[int, int, int, int],
    window: int | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> None:
    heads, groups, head_dim, block_size = shape
    batch = decoding(
        lens, num_kv_heads=heads, num_groups=groups, head_dim=head_dim, block_size=block_size,
        dtype=dtype, kv_dtype=kv_dtype, window=window,
    )  # fmt: skip
    check(batch)


def test_a_soft_cap_bounds_the_scores(variant: str) -> None:
    batch = dataclasses.replace(decoding(LENGTHS), softcap=0.7)
    check(batch)
    plain = dataclasses.replace(batch, softcap=None).definition(0)
    assert (batch.definition(0) - plain).abs().max() > 0.05, "the cap changes nothing"


@pytest.mark.parametrize("types", TYPES)
def test_together_is_alone_to_the_last_bit_on_any_number_of_threads(
    types: tuple[torch.dtype, torch.dtype],
) -> None:
    batch = decoding(
        [700, 5, 1100, 64], num_groups=3, dtype=types[0], kv_dtype=types[1], block_size=16
    )
    together = Call(batch).answer()
    for s in range(4):
        assert torch.equal(Call(batch.alone(s)).answer(), together[s : s + 1])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(Call(batch).answer(), together)
    finally:
        torch.set_num_threads(before)


def test_queries_may_lie_head_by_head_and_only_planned_rows_are_written() -> None:
    batch = decoding([12, 30, 7])
    want = Call(batch).answer()
    by_head = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    rows = Call(batch, {
        "tokens": np.array([2, 0]), "num_kv": np.array([7, 12]),
        "block_table": batch.block_table[[2, 0]],
    }).plan()  # fmt: skip
    out = torch.full(batch.q.shape, float("nan"))
    attend_decode(rows, by_head, 0, out, scale=0.3)
    assert torch.equal(out[[0, 2]], want[[0, 2]])
    assert torch.isnan(out[1]).all()


@pytest.mark.parametrize("types", TYPES)
def test_not_a_number_in_its_own_past_shows_and_stays_alone(
    types: tuple[torch.dtype, torch.dtype], variant: str
) -> None:
    batch = decoding([9, 14, 11], dtype=types[0], kv_dtype=types[1])
    clean = Call(batch).answer()
    batch.kv_cache[int(batch.block_table[1, 0])] = poison(types[1])
    got = Call(batch).answer()
    assert torch.isnan(got[1]).all(), "the fault took no effect"
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("block_table", lambda x: np.full_like(x, 10_000), "a block that is read is not in 0 to"),
        ("block_table", lambda x: np.full_like(x, -1), "a block that is read is not in 0 to"),
        ("block_table", lambda x: x[:1], "must have 2 rows"),
        ("num_kv", lambda x: x * 0, "num_kv must be 1 to"),
        ("num_kv", lambda x: x + 1000, "num_kv must be 1 to"),
        ("num_kv", lambda x: x[:1], "one of each per row"),
        ("tokens", lambda x: x - 5, "tokens at least 0"),
        ("window", lambda _: 0, "window 0"),
        ("head_dim", lambda _: 3, "does not divide"),
        ("dtype", lambda _: torch.float16, "not built"),
        ("kv_cache", lambda x: x.half(), "not built"),
        ("kv_cache", lambda x: x.transpose(0, 1), "must be contiguous"),
        ("kv_cache", lambda x: x[0], "must be contiguous"),
    ],
)
def test_a_plan_that_would_read_elsewhere_is_refused(
    name: str, change: Callable[[Any], Any], message: str
) -> None:
    call = Call(decoding([12, 30]))
    assert Call(call.batch).answer() is not None
    value = {
        "block_table": call.batch.block_table,
        "num_kv": call.batch.context_lens + 1,
        "tokens": call.batch.query_start[:-1],
        "kv_cache": call.batch.kv_cache,
    }.get(name)
    with pytest.raises(ValueError, match=message):
        Call(call.batch, {name: change(value)}).plan()


@pytest.mark.parametrize(
    ("q", "out", "layer", "message"),
    [
        pytest.param((1, 4, 16), (1, 4, 16), 0, "must be .2 or more", id="too few tokens"),
        pytest.param((2, 3, 16), (2, 3, 16), 0, "a multiple of 2", id="heads"),
        pytest.param((2, 4, 8), (2, 4, 8), 0, "must be", id="head size"),
        pytest.param((2, 4, 16), (2, 4, 8), 0, "like q", id="out"),
        pytest.param((2, 4, 16), (2, 4, 16), 2, "layer 2", id="layer"),
        pytest.param((2, 4, 16), (2, 4, 16), -1, "layer -1", id="negative layer"),
    ],
)
def test_queries_of_another_shape_are_refused(
    q: tuple[int, ...], out: tuple[int, ...], layer: int, message: str
) -> None:
    rows = Call(decoding([12, 30])).plan()
    with pytest.raises(ValueError, match=message):
        attend_decode(rows, torch.zeros(q), layer, torch.zeros(out), scale=1.0)


def test_queries_of_another_type_or_stride_are_refused() -> None:
    rows = Call(decoding([12, 30])).plan()
    q = torch.zeros(2, 4, 16)
    with pytest.raises(ValueError, match="planned for"):
        attend_decode(rows, q.bfloat16(), 0, q, scale=1.0)
    with pytest.raises(ValueError, match="inner stride 2"):
        attend_decode(rows, torch.zeros(2, 4, 32)[..., ::2], 0, q, scale=1.0)
    with pytest.raises(ValueError, match="contiguous"):
        attend_decode(rows, q, 0, torch.zeros(2, 4, 32)[..., :16], scale=1.0)
    assert ctypes.sizeof(module.Step) == 15 * 8

"""Packed steps over a KV cache whose unused slots are poisoned."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from vlm_kernels import paged_attention, plan_attention
from vlm_kernels.int4_groups import GROUP
from vlm_kernels.kv_rows import GROUPED, TWO_KINDS, quantise, slot_elements, split_pieces
from vlm_kernels.mixed_blocks import num_parts
from vlm_kernels.paged_attention import paged_attention_reference
from vlm_kernels.store_kv import store_kv_reference

NUM_LAYERS = 2


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: a definition is thousands of operations too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass
class Batch:
    """A packed step over a cache whose unused slots are NaN, but for the null block."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    query_start: np.ndarray
    context_lens: np.ndarray
    block_table: np.ndarray
    spans: tuple[tuple[tuple[int, int], ...], ...]
    window: int | None
    use_native: bool = True
    softcap: float | None = None
    spans_exceed_window: bool = False

    def fast(self, layer: int) -> torch.Tensor:
        plan = plan_attention(
            self.query_start, self.context_lens, self.block_table, self.kv_cache,
            head_dim=self.q.shape[-1], dtype=self.q.dtype, spans=self.spans, window=self.window,
            use_native=self.use_native, spans_exceed_window=self.spans_exceed_window,
        )  # fmt: skip
        return paged_attention(self.q, self.kv_cache, layer, plan, scale=0.3, softcap=self.softcap)

    @one_thread()
    def definition(self, layer: int) -> torch.Tensor:
        return paged_attention_reference(
            self.q, self.kv_cache, layer, self.query_start, self.context_lens, self.block_table,
            scale=0.3, spans=self.spans, window=self.window, softcap=self.softcap,
            spans_exceed_window=self.spans_exceed_window,
        )  # fmt: skip

    def exact(self, layer: int) -> torch.Tensor:
        """The definition, not rounded to the queries' type."""
        return dataclasses.replace(self, q=self.q.float()).definition(layer)

    def weighed(self, layer: int) -> torch.Tensor:
        """The same with the magnitudes of values: what roundings of weights are shares of."""
        cache = self.kv_cache.clone()
        rows, _ = split_pieces(cache, self.q.shape[-1])
        rows[:, :, 1] = rows[:, :, 1].float().abs().to(cache.dtype)
        return dataclasses.replace(self, kv_cache=cache).exact(layer)

    def alone(self, s: int) -> Batch:
        start, end = self.query_start[s], self.query_start[s + 1]
        return dataclasses.replace(
            self, q=self.q[start:end], query_start=np.array([0, end - start], np.int32),
            context_lens=self.context_lens[s : s + 1], block_table=self.block_table[s : s + 1],
            spans=self.spans[s : s + 1],
        )  # fmt: skip


def make_batch(
    lens: list[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    num_groups: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
    spans: tuple[tuple[tuple[int, int], ...], ...] = (),
    seed: int = 0,
) -> Batch:
    """`lens` are (context, queries) of each sequence; the blocks are scattered in the cache.

    `dtype` is the queries', and the cache's where `kv_dtype` is None. Of a cache of two kinds, the
    kind of each block is random; with 4 bits, its type has one block size.
    """
    if kv_dtype in GROUPED:
        block_size = GROUP // (2 * kv_dtype.itemsize)
    rng = torch.Generator().manual_seed(seed)
    totals = [context + queries for context, queries in lens]
    need = [-(-total // block_size) for total in totals]
    order = (torch.randperm(sum(need) + 3, generator=rng) + 1).tolist()
    shape = (sum(need) + 4, NUM_LAYERS, 2, num_kv_heads, block_size)
    kv_dtype = kv_dtype or dtype
    kv_cache = poisoned_cache(shape, head_dim, kv_dtype)
    if kv_dtype in TWO_KINDS:
        block_table = _fill_mixed(kv_cache, totals, order, block_size, head_dim, rng)
        return _batch(lens, kv_cache, block_table, num_kv_heads * num_groups, head_dim, dtype, rng,
                      spans, window)  # fmt: skip
    rows, scale_bytes = split_pieces(kv_cache, head_dim)
    block_table = np.zeros((len(lens), max(need) + 1), np.int32)
    for s, total in enumerate(totals):
        block_table[s, : need[s]] = [order.pop() for _ in range(need[s])]
        for position in range(total):
            at = (int(block_table[s, position // block_size]), ..., position % block_size)
            new = torch.randn((*shape[1:4], head_dim), generator=rng)
            if scale_bytes is None:
                rows[(*at, slice(None))] = new.to(kv_dtype)
            else:
                integers, scales = quantise(new, kv_dtype)
                rows[(*at, slice(None))] = integers
                scale_bytes[(*at, slice(None))] = scales[..., None].view(torch.int8)
    return _batch(lens, kv_cache, block_table, num_kv_heads * num_groups, head_dim, dtype, rng,
                  spans, window)  # fmt: skip


def _fill_mixed(
    kv_cache: torch.Tensor, totals: list[int], order: list[int], block_size: int, head_dim: int,
    rng: torch.Generator,
) -> np.ndarray:  # fmt: skip
    """Fill blocks of random kinds; returns the table of their entries."""
    parts = num_parts(kv_cache)
    table = np.zeros((len(totals), -(-max(totals) // block_size) + 1), np.int32)
    for s, total in enumerate(totals):
        entries: list[int] = []
        while len(entries) * block_size < total:
            first = order.pop() * 2 * parts
            if torch.rand((), generator=rng) < 0.5:
                entries += range(first + parts, first + 2 * parts)
            else:
                entries.append(first)
        need = -(-total // block_size)
        table[s, :need] = entries[:need]
        is_grouped = kv_cache.dtype in GROUPED  # a group is written whole
        slots = np.arange(len(entries) * block_size if is_grouped else total)
        slots = np.array(entries)[slots // block_size] * block_size + slots % block_size
        num_heads = kv_cache.shape[3]
        for layer in range(NUM_LAYERS):
            k, v = torch.randn(2, len(slots), num_heads, head_dim, generator=rng)
            store_kv_reference(k, v, kv_cache, layer, torch.from_numpy(slots.astype(np.int64)))
    return table


def _batch(
    lens: list[tuple[int, int]], kv_cache: torch.Tensor, block_table: np.ndarray, num_heads: int,
    head_dim: int, dtype: torch.dtype, rng: torch.Generator,
    spans: tuple[tuple[tuple[int, int], ...], ...], window: int | None,
) -> Batch:  # fmt: skip
    """The step over a filled cache, with random queries."""
    queries = [queries for _, queries in lens]
    return Batch(
        q=torch.randn(sum(queries), num_heads, head_dim, generator=rng).to(dtype),
        kv_cache=kv_cache,
        query_start=np.cumsum([0, *queries]).astype(np.int32),
        context_lens=np.array([context for context, _ in lens], np.int32),
        block_table=block_table,
        spans=spans or ((),) * len(lens),
        window=window,
    )


def poisoned_cache(shape: tuple[int, ...], head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A cache `[N, L, 2, H, P]` of `head_dim` that reads as NaN, but for the null block."""
    inner = (*shape[:4], shape[4] * slot_elements(dtype, head_dim))
    cache = torch.full(inner, poison(dtype), dtype=dtype)
    cache[0] = 0
    return cache


def poison(dtype: torch.dtype) -> float:
    """The value that reads as NaN in each type: its bits are ones, which are a scale of NaN."""
    if dtype in GROUPED:
        return torch.iinfo(dtype).max
    return float("nan") if dtype.is_floating_point else -1

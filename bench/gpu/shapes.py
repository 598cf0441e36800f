"""Heads, batches and caches that the cases share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from timing import Bench

from vlm_kernels import plan_attention
from vlm_kernels.attention_plan import AttentionPlan
from vlm_kernels.kv_rows import LIMITS, slot_elements

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Heads:
    """Of one model, or of one shard of it."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


MODELS = (
    Heads("llava-7b", 32, 32, 128),
    Heads("qwen2.5-vl-7b", 28, 4, 128),
    Heads("llama-3.2-90b", 64, 8, 128),
    Heads("llama-3.2-90b/tp4", 16, 2, 128),
)
TINY = (Heads("tiny", 4, 2, 32),)


def models(bench: Bench) -> tuple[Heads, ...]:
    """Those of this run."""
    return TINY if bench.is_smoke else MODELS


@dataclass(frozen=True)
class Steps:
    """One packed step over one layer of a cache, its blocks in random order."""

    heads: Heads
    queries: Sequence[int]
    totals: Sequence[int]
    block_size: int = BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        """The null block too."""
        return 1 + sum(-(-total // self.block_size) for total in self.totals)

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """That the step reads."""
        row = slot_elements(dtype, self.heads.head_dim) * dtype.itemsize
        return 2 * sum(self.totals) * self.heads.num_kv_heads * row

    def table(self) -> np.ndarray:
        """int32 `[S, B]`."""
        need = [-(-total // self.block_size) for total in self.totals]
        order = iter((1 + np.random.default_rng(0).permutation(sum(need))).tolist())
        table = np.zeros((len(need), max(need)), np.int32)
        for row, count in zip(table, need, strict=True):
            row[:count] = [next(order) for _ in range(count)]
        return table

    def cache(self, bench: Bench, dtype: torch.dtype) -> torch.Tensor:
        """Random bytes where rows are quantised, with scales near 1/100."""
        heads = self.heads
        inner = self.block_size * slot_elements(dtype, heads.head_dim)
        shape = (self.num_blocks, 1, 2, heads.num_kv_heads, inner)
        if dtype not in LIMITS:
            return bench.randn(*shape)
        codes = torch.randint(-100, 100, shape, dtype=torch.int8, device=bench.device)
        if dtype != torch.int8:
            codes &= -65  # below the bits of NaN
        scales = codes[..., self.block_size * heads.head_dim :].unflatten(-1, (-1, 4))
        scales.copy_(torch.tensor([0.01], device=bench.device).view(torch.int8))
        return codes.view(dtype)

    def plan(self, cache: torch.Tensor, dtype: torch.dtype) -> AttentionPlan:
        """Of queries that are the last of their sequence."""
        queries = np.array(self.queries, np.int32)
        return plan_attention(
            np.concatenate([[0], queries.cumsum()]).astype(np.int32),
            np.array(self.totals, np.int32) - queries,
            self.table(),
            cache,
            head_dim=self.heads.head_dim,
            dtype=dtype,
            num_heads=self.heads.num_heads,
        )

    def q(self, bench: Bench) -> torch.Tensor:
        """`[T, heads, head_dim]`."""
        return bench.randn(sum(self.queries), self.heads.num_heads, self.heads.head_dim)

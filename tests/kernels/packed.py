"""Segments of queries and keys, and tensors for them."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from vlm_kernels.segments import Segments, plan_segments, seen_by


@dataclasses.dataclass(frozen=True)
class Case:
    """Segments of (queries, keys), the queries last among the keys of a causal one."""

    lens: tuple[tuple[int, int], ...]
    num_kv_heads: int
    num_groups: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    spans: tuple[tuple[int, int], ...] = ()
    softcap: float | None = None

    @property
    def segments(self) -> Segments:
        queries, keys = np.array(self.lens).T
        intervals = [
            seen_by(np.arange(k - q, k), spans=self.spans, window=self.window)
            if self.causal
            else (np.zeros(q, int), np.full(q, k))
            for q, k in self.lens
        ]
        first, end = (np.concatenate(each) for each in zip(*intervals, strict=True))
        return plan_segments(queries, keys, first, np.minimum(end, np.repeat(keys, queries)))

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rng = torch.Generator().manual_seed(self.head_dim)
        queries, keys = (sum(each) for each in zip(*self.lens, strict=True))
        heads = self.num_kv_heads
        q = torch.randn(queries, heads * self.num_groups, self.head_dim, generator=rng)
        # as a model passes them: the packed axis is not the first in memory
        k, v = torch.randn(2, heads, keys, self.head_dim, generator=rng).bfloat16().transpose(1, 2)
        return q.bfloat16(), k, v

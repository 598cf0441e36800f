"""Causal prefill of packed prompts over KV blocks, and attention of vision towers.

    G4  prompts of 2048 and more  at least 0.55 of the matrix product's peak, 0.9 of `sdpa`'s speed

Share of the matrix product's peak; a causal prompt of n tokens counts half its products. `sdpa` is
torch's own attention, sequence by sequence, over contiguous KV, with the backend that it takes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from shapes import Heads, Steps, models
from timing import Bench, Case, report
from torch.nn import functional

from vlm_kernels import paged_attention, varlen_attention

PROMPTS = ((576,), (2048,), (8192,), (1024,) * 8, (64, 128, 576, 1200, 3000))
WINDOWS = ((64,) * 64, (1024,) * 4)
TOWER, TINY_TOWER = Heads("qwen2.5-vl tower", 16, 16, 80), Heads("tiny tower", 2, 2, 80)


def cases(bench: Bench) -> Iterator[Case]:
    """One line per model and prompts, then the tower's windows."""
    for heads in models(bench):
        for lengths in ((20, 9),) if bench.is_smoke else PROMPTS:
            yield functools.partial(prompts, bench, heads, lengths)
    for lengths in ((16, 5),) if bench.is_smoke else WINDOWS:
        yield functools.partial(images, bench, tower(bench), lengths)


def tower(bench: Bench) -> Heads:
    """Of this run."""
    return TINY_TOWER if bench.is_smoke else TOWER


def prompts(bench: Bench, heads: Heads, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Prompts without a past."""
    steps = Steps(heads, lengths, lengths)
    cache, q = steps.cache(bench, bench.dtype), steps.q(bench)
    plan = steps.plan(cache, bench.dtype)
    k, v = (bench.randn(sum(lengths), heads.num_kv_heads, heads.head_dim) for _ in range(2))
    scale = heads.head_dim**-0.5
    took = bench.medians(
        {
            "ours": lambda: paged_attention(q, cache, 0, plan, scale=scale),
            "sdpa": lambda: sdpa(q, k, v, lengths, causal=True),
        }
    )
    flops = sum(2 * n * n * heads.num_heads * heads.head_dim for n in lengths)
    name = f"prefill/{heads.name}/{'+'.join(map(str, lengths))}"
    line = report(name, took, of=flops, limit=bench.limits.flops)
    if min(lengths) >= 2048:
        fast = line["share"]["ours"] >= 0.55 and took["ours"] <= took["sdpa"] / 0.9
        line["goals"] = {"G4": fast}
    return line


def images(bench: Bench, heads: Heads, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Windows, in both directions."""
    shape = (sum(lengths), heads.num_heads, heads.head_dim)
    q, k, v = (bench.randn(*shape) for _ in range(3))
    cu = torch.tensor([0, *lengths], device=bench.device).cumsum(0).int()
    scale = heads.head_dim**-0.5
    took = bench.medians(
        {
            "ours": lambda: varlen_attention(q, k, v, cu, scale=scale),
            "sdpa": lambda: sdpa(q, k, v, lengths, causal=False),
        }
    )
    flops = sum(4 * n * n * heads.num_heads * heads.head_dim for n in lengths)
    name = f"vision/{heads.name}/{lengths[0]}x{len(lengths)}"
    return report(name, took, of=flops, limit=bench.limits.flops)


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], *, causal: bool
) -> None:
    """Sequence by sequence."""
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        functional.scaled_dot_product_attention(
            *(x[rows].transpose(0, 1)[None] for x in (q, k, v)),
            is_causal=causal,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        start += length

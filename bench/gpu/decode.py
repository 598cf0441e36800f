"""Decode attention over KV blocks.

    G1  64 sequences and more     at least 0.80 of read bandwidth
    G2  one, of 8192 and more     at least 0.45, and 5 times as fast as `gather`
    G3  int8 and float8 KV        at least 1.6 times as fast as our own of bfloat16

Share of read bandwidth: bytes of KV per second over what the probe read. `gather` is what torch
does: bring the blocks of a batch side by side, then its own attention, with a mask. `flashinfer` is
measured where it is installed. The caches of a case are rotated past the L2 cache.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from shapes import Heads, Steps, models
from timing import Bench, Case, report
from torch.nn import functional

from vlm_kernels import paged_attention

BATCHES = ((1, 1024), (1, 8192), (1, 32768), (16, 1024), (64, 1024), (64, 4096), (256, 1024))
QUANTISED = (64, 4096)
GATHER_BYTES = 8 << 30
"""Beyond this a copy of the batch does not fit beside it."""


def cases(bench: Bench) -> Iterator[Case]:
    """One line per model and batch."""
    for heads in models(bench):
        for batch, total in ((2, 40),) if bench.is_smoke else BATCHES:
            name = f"b{batch}/ctx{total}"
            yield functools.partial(measure, bench, heads, name, [total] * batch)
        low, high, count = (8, 40, 3) if bench.is_smoke else (64, 8192, 16)
        mixed = np.random.default_rng(0).integers(low, high, count)
        yield functools.partial(measure, bench, heads, f"b{count}/mixed", mixed.tolist())


def measure(bench: Bench, heads: Heads, name: str, totals: list[int]) -> dict[str, Any]:
    """Ours in bfloat16 and quantised, and torch's."""
    steps = Steps(heads, [1] * len(totals), totals)
    calls = {"ours": ours(bench, steps, bench.dtype)}
    is_quantised = bench.is_smoke or (len(totals), totals[0]) == QUANTISED
    if is_quantised:
        calls["ours int8"] = ours(bench, steps, torch.int8)
    if is_quantised and has_float8(bench):
        calls["ours float8"] = ours(bench, steps, torch.float8_e4m3fn)
    if len(totals) * max(totals) * heads.num_kv_heads * heads.head_dim * 4 < GATHER_BYTES:
        calls["gather"] = gather(bench, steps)
    flashinfer = flashinfer_or_none(bench, steps)
    if flashinfer is not None:
        calls["flashinfer"] = flashinfer
    took = bench.medians(calls)
    of, limit = steps.kv_bytes(bench.dtype), bench.limits.read
    line = report(f"decode/{heads.name}/{name}", took, of=of, limit=limit)
    times = {other: took[other] / took["ours"] for other in took if other != "ours"}
    line["times_of_ours"] = {other: round(ratio, 2) for other, ratio in times.items()}
    share, goals = line["share"]["ours"], {}
    if len(totals) >= 64:
        goals["G1"] = share >= 0.80
    if len(totals) == 1 and totals[0] >= 8192:
        goals["G2"] = share >= 0.45 and times.get("gather", 0) >= 5
    if is_quantised:
        goals["G3"] = all(r <= 1 / 1.6 for name, r in times.items() if name.startswith("ours"))
    return {**line, "goals": goals}


def ours(bench: Bench, steps: Steps, dtype: torch.dtype) -> Callable[[], Any]:
    """The kernel, on the next cache at each call."""
    caches = bench.rotating(steps.kv_bytes(dtype), lambda: steps.cache(bench, dtype))
    first = next(caches)
    plan, q = steps.plan(first, bench.dtype), steps.q(bench)
    scale = steps.heads.head_dim**-0.5
    return lambda: paged_attention(q, next(caches), 0, plan, scale=scale)


def gather(bench: Bench, steps: Steps) -> Callable[[], Any]:
    """Torch's operations; query heads of one KV head are rows, so that nothing is repeated."""
    heads, dtype = steps.heads, bench.dtype
    caches = bench.rotating(steps.kv_bytes(dtype), lambda: steps.cache(bench, dtype))
    table = torch.from_numpy(steps.table()).long().to(bench.device)
    q = steps.q(bench).view(len(table), heads.num_kv_heads, -1, heads.head_dim)
    totals = torch.tensor(steps.totals, device=bench.device)
    longest = table.shape[1] * steps.block_size
    mask = (torch.arange(longest, device=bench.device) < totals[:, None])[:, None, None]

    def run() -> torch.Tensor:
        blocks = next(caches)[table, 0]  # [S, B, 2, H, P * D]
        kv = blocks.unflatten(-1, (steps.block_size, -1)).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        return functional.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=mask)

    return run


def flashinfer_or_none(bench: Bench, steps: Steps) -> Callable[[], Any] | None:
    """FlashInfer's decode on its own layout; None where it is not installed."""
    try:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper
    except ImportError:
        return None
    heads, size = steps.heads, steps.block_size
    need = [-(-total // size) for total in steps.totals]
    table = steps.table()
    ids = np.concatenate([row[:count] for row, count in zip(table, need, strict=True)])
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=bench.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=heads.num_heads // heads.num_kv_heads >= 4
    )
    wrapper.plan(
        torch.tensor([0, *itertools.accumulate(need)], dtype=torch.int32, device=bench.device),
        torch.from_numpy(ids).to(bench.device),
        torch.tensor(
            [(t - 1) % size + 1 for t in steps.totals], dtype=torch.int32, device=bench.device
        ),
        heads.num_heads, heads.num_kv_heads, heads.head_dim, size, q_data_type=bench.dtype,
    )  # fmt: skip
    caches = bench.rotating(
        steps.kv_bytes(bench.dtype),
        lambda: steps.cache(bench, bench.dtype)[:, 0].unflatten(-1, (size, -1)),
    )
    q = steps.q(bench)
    return lambda: wrapper.run(q, next(caches))


def has_float8(bench: Bench) -> bool:
    """Of the interpreter and of GPUs since Ada."""
    return bench.device.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9)

"""Small operations around attention: add and RMSNorm, rotation and KV write, SiLU·mul.

    G5  64 MB and more            at least 0.80 of copy bandwidth
        256 rows                  at most 4 us, and half of what `eager` takes

Share of copy bandwidth: bytes read and written once, over what the probe copied. `eager` is torch's
operations one after the other; `compiled` what torch.compile makes of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from shapes import Heads, Steps, models
from timing import Bench, Case, report

from vlm_kernels import add_rms_norm, rope_store_kv, silu_mul
from vlm_kernels.rms_norm import add_rms_norm_reference
from vlm_kernels.rope import rope_reference
from vlm_kernels.silu_mul import silu_mul_reference

SHAPES = ((1, 4096), (64, 4096), (256, 3584), (4096, 4096), (4096, 8192))


def cases(bench: Bench) -> Iterator[Case]:
    """One line per operation and shape."""
    for rows, size in ((3, 50),) if bench.is_smoke else SHAPES:
        yield functools.partial(norm, bench, rows, size)
        yield functools.partial(gate, bench, rows, size)
    for heads in models(bench)[:2]:
        for rows in (4,) if bench.is_smoke else (1, 256, 4096):
            yield functools.partial(rotation, bench, heads, rows)


def norm(bench: Bench, rows: int, size: int) -> dict[str, Any]:
    """Two rows in, two rows out."""
    num_bytes = 4 * rows * size * bench.dtype.itemsize
    pairs = bench.rotating(num_bytes, lambda: (bench.randn(rows, size), bench.randn(rows, size)))
    w = bench.randn(size)
    calls = {
        "ours": lambda: add_rms_norm(*next(pairs), w, eps=1e-6),
        "eager": lambda: add_rms_norm_reference(*next(pairs), w, eps=1e-6),
    }
    if not bench.is_smoke:
        made = torch.compile(lambda x, r: add_rms_norm_reference(x, r, w, eps=1e-6), dynamic=False)
        calls["compiled"] = lambda: made(*next(pairs))
    return _line(bench, f"add_rms_norm/{rows}x{size}", calls, num_bytes, rows)


def gate(bench: Bench, rows: int, size: int) -> dict[str, Any]:
    """Two rows in, one row out."""
    num_bytes = 3 * rows * size * bench.dtype.itemsize
    joint = bench.rotating(num_bytes, lambda: bench.randn(rows, 2 * size).chunk(2, dim=1))
    calls = {
        "ours": lambda: silu_mul(*next(joint)),
        "eager": lambda: silu_mul_reference(*next(joint)),
    }
    return _line(bench, f"silu_mul/{rows}x{size}", calls, num_bytes, rows)


def rotation(bench: Bench, heads: Heads, rows: int) -> dict[str, Any]:
    """Queries in and out, keys and values in, and out to their slots."""
    steps = Steps(heads, [rows], [rows])
    cache = steps.cache(bench, bench.dtype)
    slots = torch.arange(rows, device=bench.device) + steps.block_size
    cos, sin = bench.randn(rows, heads.head_dim), bench.randn(rows, heads.head_dim)
    per_token = 2 * heads.num_heads + 4 * heads.num_kv_heads
    num_bytes = rows * per_token * heads.head_dim * bench.dtype.itemsize
    counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    sets = bench.rotating(
        num_bytes, lambda: [bench.randn(rows, count, heads.head_dim) for count in counts]
    )
    by_slot = cache[:, 0].unflatten(-1, (steps.block_size, -1))

    def eager() -> None:
        q, k, v = next(sets)
        q.copy_(rope_reference(q, cos, sin))
        k.copy_(rope_reference(k, cos, sin))
        block, offset = slots // steps.block_size, slots % steps.block_size
        by_slot[block, 0, :, offset] = k
        by_slot[block, 1, :, offset] = v

    calls = {
        "ours": lambda: rope_store_kv(*next(sets), cos, sin, cache, 0, slots),
        "eager": eager,
    }
    return _line(bench, f"rope_store_kv/{heads.name}/{rows}", calls, num_bytes, rows)


def _line(
    bench: Bench, case: str, calls: dict[str, Callable[[], Any]], num_bytes: int, rows: int
) -> dict[str, Any]:
    took = bench.medians(calls)
    line = report(case, took, of=num_bytes, limit=bench.limits.copy)
    line["megabytes"] = round(num_bytes / 1e6, 2)
    if num_bytes >= 64e6:
        line["goals"] = {"G5": line["share"]["ours"] >= 0.80}
    elif rows == 256:
        line["goals"] = {"G5": took["ours"] <= min(4e-6, 0.5 * took["eager"])}
    return line

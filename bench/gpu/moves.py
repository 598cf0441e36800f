"""Moves of whole KV blocks on a GPU, into one piece and back: what a transfer waits for.

Share of copy bandwidth: bytes read and written, over what the probe copied. `torch` is its own
indexing of the same blocks. The way over the bus is not in it. No goal speaks of these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from timing import Bench, Case, report

from vlm_kernels.gpu.gather_blocks import move_blocks

BLOCKS = (1, 36, 256)
"""36 of 16 tokens are a prompt of an image of 448 x 448 pixels and 320 tokens of text."""
BLOCK_BYTES = 28 * 2 * 4 * 16 * 128 * 2
"""Of Qwen2.5-VL-7B in bfloat16, 16 tokens."""


def cases(bench: Bench) -> Iterator[Case]:
    """One line per number of blocks, and way."""
    for count in (2,) if bench.is_smoke else BLOCKS:
        for into_cache in (False, True):
            yield functools.partial(measure, bench, count, into_cache=into_cache)


def measure(bench: Bench, count: int, *, into_cache: bool) -> dict[str, Any]:
    """Random blocks of a cache of twice as many."""
    size = 4096 if bench.is_smoke else BLOCK_BYTES
    caches = bench.rotating(
        count * size,
        lambda: torch.randint(0, 256, (2 * count, size), dtype=torch.uint8, device=bench.device),
    )
    ids = torch.randperm(2 * count, device=bench.device)[:count]
    piece = torch.zeros(count, size, dtype=torch.uint8, device=bench.device)

    def theirs() -> None:
        cache = next(caches)
        if into_cache:
            cache.index_copy_(0, ids, piece)
        else:
            torch.index_select(cache, 0, ids, out=piece)

    took = bench.medians(
        {
            "ours": lambda: move_blocks(next(caches), piece, ids, into_cache=into_cache),
            "torch": theirs,
        }
    )
    name = f"moves/{'scatter' if into_cache else 'gather'}/{count}"
    return report(name, took, of=2 * count * size, limit=bench.limits.copy)

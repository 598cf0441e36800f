"""Compile every kernel for a Hopper GPU, on a machine that has none; one JSON line each.

    python compile_all.py [NAME...]

The interpreter shows that a kernel computes the right values, not that it can be compiled: types of
loops, tile sizes, shared memory. Triton's own compiler needs no GPU for that; it is told of one
here, and launches end after compiling.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vlm_kernels import gpu
from vlm_kernels.gpu import (
    attention_step,
    gather_blocks,
    merge_tokens,
    paged_attention,
    quantised_linear,
    resize_patches,
    rms_norm,
    rope,
    silu_mul,
    store_kv,
    varlen_attention,
)
from vlm_kernels.kv_rows import layer_views, slot_elements
from vlm_kernels.quantised_linear import quantise_weights
from vlm_kernels.resize_patches import Cut, bicubic_taps

BFLOAT16 = torch.bfloat16


class Hopper:
    """What the compiler asks a driver for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def ones(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def views(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer of a cache of 8 blocks of 16 slots, 4 heads of 128."""
    cache = torch.zeros(8, 2, 2, 4, 16 * slot_elements(dtype, 128), dtype=dtype)
    return layer_views(cache, 1, 128)


def attend(dtype: torch.dtype, num_processors: int) -> None:
    """Decode and prefill of Qwen2.5-VL-7B's heads."""
    gpu.num_processors = lambda device: num_processors
    step = attention_step.plan_tiles(
        np.array([0, 1, 65], np.int32), np.array([1000, 0], np.int32), np.ones((2, 64), np.int32),
        num_groups=7, cache=attention_step.CacheShape(8, 4, 16), device=torch.device("cpu"),
    )  # fmt: skip
    paged_attention.paged_attention(ones(65, 28, 128), *views(dtype), step, scale=0.1, softcap=30)


def rotate(dtype: torch.dtype) -> None:
    q, k, table = ones(3, 28, 128), ones(3, 4, 128), ones(3, 128)
    slots = torch.zeros(3, dtype=torch.int64)
    rope.rope(q, table, table)
    rope.rope(q, table.float(), table.float())
    rope.rope_store_kv(q, k, k, table, table, *views(dtype), slots)
    store_kv.store_kv(k, k, *views(dtype), slots)


def multiply(group: int | None) -> None:
    weights = quantise_weights(ones(512, 1024), group=group)
    for rows in (1, 65):
        quantised_linear.quantised_linear(
            ones(rows, 1024), weights.codes, weights.scales, weights.group, ones(512)
        )


def cut() -> None:
    taps = bicubic_taps(200, 56), bicubic_taps(100, 28)
    rgb = torch.zeros(200, 100, 3, dtype=torch.uint8)
    resize_patches.resize_patches(rgb, Cut(56, 28, 14, 2, 2), ones(3, 256), *taps)


def move() -> None:
    cache, ids = torch.zeros(3, 4096, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    for into_cache in (True, False):
        gather_blocks.move_blocks(cache, cache[:2].clone(), ids, into_cache=into_cache)


def merge() -> None:
    edges = torch.tensor([0, 1, 2])
    merge_tokens.merge_tokens(ones(4, 2048), edges[:2], edges, torch.ones(2))


KERNELS: dict[str, Callable[[], Any]] = {
    "paged_attention": lambda: attend(BFLOAT16, 1),
    "paged_attention int8, split": lambda: attend(torch.int8, 1000),
    "paged_attention float8, split": lambda: attend(torch.float8_e4m3fn, 1000),
    "rope_store_kv": lambda: rotate(BFLOAT16),
    "rope_store_kv int8": lambda: rotate(torch.int8),
    "rope_store_kv float8": lambda: rotate(torch.float8_e4m3fn),
    "gather_blocks": move,
    "rms_norm": lambda: rms_norm.rms_norm(ones(9, 3584), ones(3584), ones(9, 3584), eps=1e-6),
    "rms_norm of Gemma": lambda: rms_norm.rms_norm(
        ones(9, 256), ones(256), eps=1e-6, adds_one=True
    ),
    "silu_mul": lambda: silu_mul.silu_mul(ones(2, 1500), ones(2, 1500)),
    "quantised_linear int8": lambda: multiply(None),
    "quantised_linear int4 by 32": lambda: multiply(32),
    "quantised_linear int4 by 128": lambda: multiply(128),
    "varlen_attention": lambda: varlen_attention.varlen_attention(
        *(ones(70, 2, 80) for _ in range(3)), torch.tensor([0, 70], dtype=torch.int32), scale=0.1
    ),
    "resize_patches": cut,
    "merge_tokens": merge,
}


def main() -> None:
    compile_and_run = JITFunction.run
    current = ""

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made = compile_and_run(kernel, *args, grid=grid, warmup=True, **kwargs)
        print(
            json.dumps(
                {
                    "name": current,
                    "module": kernel.__module__,
                    "kernel": kernel.__name__,
                    "cubin_bytes": len(made.asm["cubin"]),
                    "shared_bytes": made.metadata.shared,
                }
            ),
            flush=True,
        )
        return made

    driver.set_active(Hopper())
    JITFunction.run = compile_only
    for name in sys.argv[1:] or KERNELS:
        current = name
        KERNELS[name]()


if __name__ == "__main__":
    main()

"""Compile every kernel for a GPU, on a machine that has none; one JSON line each.

    python compile_all.py CAPABILITY [NAME...]        90 is Hopper, 89 Ada (L40S), 80 Ampere (A100)

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
    attention_mass,
    attention_step,
    gather_blocks,
    merge_tokens,
    paged_attention,
    quantised_linear,
    received_attention,
    resize_patches,
    rms_norm,
    rope,
    silu_mul,
    store_kv,
    varlen_attention,
)
from vlm_kernels.gpu.attention_shapes import Heads
from vlm_kernels.kv_rows import layer_views, slot_elements
from vlm_kernels.quantised_linear import quantise_weights
from vlm_kernels.resize_patches import Cut, bicubic_taps

BFLOAT16 = torch.bfloat16
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Of one program, by capability."""


CPU = torch.device("cpu")


class Driver:
    """What the compiler asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def ones(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def views(
    dtype: torch.dtype, head_dim: int = 128, block_size: int = 16
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer of a cache of 8 blocks, 4 heads."""
    cache = torch.zeros(8, 2, 2, 4, block_size * slot_elements(dtype, head_dim), dtype=dtype)
    return layer_views(cache, 1, head_dim)


def attend(
    kv_dtype: torch.dtype, num_processors: int, *,
    q_dtype: torch.dtype = BFLOAT16, head_dim: int = 128, num_groups: int = 7, block_size: int = 16,
) -> None:  # fmt: skip
    """Decode and prefill, with the heads of Qwen2.5-VL-7B by default."""
    gpu.num_processors = lambda device: num_processors
    cache = attention_step.CacheShape(8, 4, block_size)
    shape = Heads(head_dim, q_dtype.itemsize).prefill_shape(limit=gpu.shared_memory_bytes(CPU))
    step = attention_step.plan_tiles(
        np.array([0, 1, 65], np.int32), np.array([1000, 0], np.int32), np.ones((2, 64), np.int32),
        num_groups=num_groups, cache=cache, prefill_rows=shape.rows, device=CPU,
    )  # fmt: skip
    q = ones(65, 4 * num_groups, head_dim, dtype=q_dtype)
    kv = views(kv_dtype, head_dim, block_size)
    paged_attention.paged_attention(q, *kv, step, scale=0.1, softcap=30)


def gemma(kv_dtype: torch.dtype, *, q_dtype: torch.dtype = BFLOAT16) -> None:
    """Gemma 3's heads of 256, two queries each."""
    attend(kv_dtype, 1000, q_dtype=q_dtype, head_dim=256, num_groups=2)


def see(dtype: torch.dtype) -> None:
    """Qwen's tower."""
    varlen_attention.varlen_attention(
        *(ones(70, 2, 80, dtype=dtype) for _ in range(3)),
        torch.tensor([0, 70], dtype=torch.int32),
        scale=0.1,
    )


def receive(dtype: torch.dtype) -> None:
    """Qwen's tower."""
    received_attention.received_attention(
        *(ones(70, 2, 80, dtype=dtype) for _ in range(2)),
        torch.tensor([0, 70], dtype=torch.int32),
        scale=0.1,
    )


def observe(dtype: torch.dtype) -> None:
    attention_mass.attention_mass(
        ones(32, 28, 128), *views(dtype), torch.zeros(9, dtype=torch.int32), 100, scale=0.1
    )


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
    "paged_attention, blocks of 64": lambda: attend(BFLOAT16, 1000, block_size=64),
    "paged_attention float16": lambda: attend(torch.float16, 1000, q_dtype=torch.float16),
    "paged_attention float32": lambda: attend(torch.float32, 1000, q_dtype=torch.float32),
    "paged_attention of Gemma": lambda: gemma(BFLOAT16),
    "paged_attention of Gemma, float32": lambda: gemma(torch.float32, q_dtype=torch.float32),
    "paged_attention of Gemma, int8": lambda: gemma(torch.int8),
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
    "varlen_attention": lambda: see(BFLOAT16),
    "varlen_attention float32": lambda: see(torch.float32),
    "received_attention": lambda: receive(BFLOAT16),
    "received_attention float32": lambda: receive(torch.float32),
    "attention_mass": lambda: observe(BFLOAT16),
    "attention_mass int8": lambda: observe(torch.int8),
    "attention_mass float8": lambda: observe(torch.float8_e4m3fn),
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
                    "limit_bytes": SHARED_BYTES[capability],
                }
            ),
            flush=True,
        )
        return made

    capability = int(sys.argv[1])
    driver.set_active(Driver(capability))
    gpu.shared_memory_bytes = lambda device: SHARED_BYTES[capability]
    JITFunction.run = compile_only
    for name in sys.argv[2:] or KERNELS:
        current = name
        KERNELS[name]()


if __name__ == "__main__":
    main()

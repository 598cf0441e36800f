"""Attention mass:  a_j = sum_t sum_h softmax_j(scale * q_t . k_j), of one layer.

Shapes: T last rows of a sequence of n tokens, H KV heads, G query heads per KV head, D head size,
P slots per block, B blocks; the cache is `[N, L, 2, H, P * D]` (`kv_rows`). Row t is at position
n - T + t and sees the positions up to its own. The KV of all n tokens is stored before.

It is the weight that the last rows give to each token, summed over rows and heads: T * H * G
together. SnapKV (arXiv 2404.14469) selects the KV of a prompt by it. C++ on CPUs
(`cpu/attention_mass.cpp`), Triton on GPUs, torch elsewhere.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vlm_kernels import gpu
from vlm_kernels.cpu import native
from vlm_kernels.decode_attention import TYPES, Step
from vlm_kernels.kv_rows import (
    NATIVE_TYPES,
    block_size_of,
    check_cache_type,
    layer_views,
    values_of,
)

SYMBOL = "triptych_attention_mass"
ARGUMENTS = (
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
    ctypes.c_void_p, ctypes.c_int64, ctypes.c_float,
)  # fmt: skip
"""step, q, token stride, head stride, rows, out, layer, scale"""


def attention_mass_reference(
    q_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    blocks_B: np.ndarray,
    num_tokens: int,
    *,
    scale: float,
) -> torch.Tensor:
    """The definition: one row and one head at a time, in float32."""
    num_rows, num_heads, head_dim = q_THD.shape
    num_kv_heads, block_size = kv_cache.shape[3], block_size_of(kv_cache, head_dim)
    mass_N = torch.zeros(num_tokens)
    for t in range(num_rows):
        seen = num_tokens - num_rows + t + 1
        blocks = values_of(kv_cache[blocks_B[: -(-seen // block_size)], layer, 0], head_dim)
        for h in range(num_heads):
            keys = blocks[:, h * num_kv_heads // num_heads].reshape(-1, head_dim)[:seen].float()
            mass_N[:seen] += torch.softmax(scale * (keys @ q_THD[t, h].float()), dim=0)
    return mass_N


def attention_mass(
    q_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    blocks_B: np.ndarray,
    num_tokens: int,
    *,
    scale: float,
) -> torch.Tensor:
    """Sum the attention that the last rows of one sequence pay to each of its tokens.

    On a CPU, the result does not depend on the number of threads.

    Args:
        q_THD: queries after rotation, `[T, H * G, D]`; head h reads KV head h // G.
        kv_cache: `[N, L, 2, H, P * D]`, contiguous.
        layer: layer index in the cache.
        blocks_B: int32, the blocks of the sequence; on the host.
        num_tokens: n, at least T.
        scale: factor of the scores, positive.

    Returns:
        float32 `[num_tokens]` on q's device, every element written.

    Raises:
        ValueError: a shape, type, device or block number is wrong.
    """
    _check(q_THD, kv_cache, layer, blocks_B, num_tokens, scale)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    if gpu.serves(q_THD.device):
        from vlm_kernels.gpu.attention_mass import attention_mass as launch

        blocks = torch.from_numpy(blocks_B).to(q_THD.device)
        rows, scales = layer_views(kv_cache, layer, q_THD.shape[-1])
        return launch(q_THD, rows, scales, blocks, num_tokens, scale=scale)
    is_host = q_THD.device.type == "cpu"
    run = _kernel() if is_host and kv_cache.dtype in NATIVE_TYPES else None
    if run is None or q_THD.dtype not in TYPES:
        return _by_torch(q_THD, kv_cache, layer, blocks_B, num_tokens, scale)
    mass_N = q_THD.new_empty(num_tokens, dtype=torch.float32)
    blocks_B = np.ascontiguousarray(blocks_B, np.int32)
    num_kv = np.array([num_tokens], np.int32)
    step = Step(
        blocks_B.ctypes.data,
        num_kv.ctypes.data,
        None,
        kv_cache.data_ptr(),
        num_rows=1,
        table_width=len(blocks_B),
        window=0,
        num_layers=kv_cache.shape[1],
        num_kv_heads=kv_cache.shape[3],
        num_groups=q_THD.shape[1] // kv_cache.shape[3],
        head_dim=q_THD.shape[2],
        block_size=block_size_of(kv_cache, q_THD.shape[2]),
        q_is_bf16=q_THD.dtype == torch.bfloat16,
        kv_type=NATIVE_TYPES[kv_cache.dtype],
        num_threads=torch.get_num_threads(),
    )
    run(
        ctypes.byref(step),
        q_THD.data_ptr(),
        *q_THD.stride()[:2],
        len(q_THD),
        mass_N.data_ptr(),
        layer,
        scale,
    )
    return mass_N


def _check(
    q_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    blocks_B: np.ndarray,
    num_tokens: int,
    scale: float,
) -> None:
    gpu.check_floats("attention_mass: q", q_THD)
    if kv_cache.dim() != 5 or kv_cache.shape[2] != 2 or not kv_cache.is_contiguous():
        raise ValueError(f"kv_cache {tuple(kv_cache.shape)}: must be contiguous [N, L, 2, H, P*D]")
    check_cache_type(kv_cache)
    if q_THD.dim() != 3 or not len(q_THD) or q_THD.shape[1] % kv_cache.shape[3]:
        raise ValueError(
            f"attention_mass: q is {tuple(q_THD.shape)}, must be [1 or more, a multiple of "
            f"{kv_cache.shape[3]}, D]"
        )
    if q_THD.device != kv_cache.device:
        raise ValueError(f"attention_mass: q is on {q_THD.device}, the cache on {kv_cache.device}")
    if not 0 <= layer < kv_cache.shape[1]:
        raise ValueError(f"layer {layer}: the cache has {kv_cache.shape[1]}")
    capacity = len(blocks_B) * block_size_of(kv_cache, q_THD.shape[-1])
    if blocks_B.dtype != np.int32 or blocks_B.ndim != 1 or not len(q_THD) <= num_tokens <= capacity:
        raise ValueError(
            f"attention_mass: {num_tokens} tokens of {len(q_THD)} rows in blocks "
            f"{blocks_B.dtype} {blocks_B.shape}, which hold {capacity}"
        )
    if blocks_B.min() < 0 or blocks_B.max() >= len(kv_cache):
        raise ValueError(f"attention_mass: a block is not in 0 to {len(kv_cache) - 1}")
    if not scale > 0:
        raise ValueError(f"attention_mass: scale is {scale}, must be positive")


def _by_torch(
    q_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    blocks_B: np.ndarray,
    num_tokens: int,
    scale: float,
) -> torch.Tensor:
    """As the reference, one KV head at a time."""
    num_rows, num_heads, head_dim = q_THD.shape
    num_kv_heads = kv_cache.shape[3]
    blocks = torch.from_numpy(blocks_B.astype(np.int64)).to(kv_cache.device)
    position = torch.arange(num_tokens, device=q_THD.device)
    hidden = (
        position > (num_tokens - num_rows + torch.arange(num_rows, device=q_THD.device))[:, None]
    )
    mass_N = torch.zeros(num_tokens, device=q_THD.device)
    for h in range(num_kv_heads):
        pieces = kv_cache[:, layer, 0, h].index_select(0, blocks)
        keys = values_of(pieces, head_dim).reshape(-1, head_dim)[:num_tokens].float()
        groups = num_heads // num_kv_heads
        q = q_THD[:, h * groups : (h + 1) * groups].float().transpose(0, 1)
        scores = (scale * (q @ keys.T)).masked_fill(hidden, float("-inf"))
        mass_N += torch.softmax(scores, dim=-1).sum((0, 1))
    return mass_N


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    return native.function(SYMBOL, *ARGUMENTS)

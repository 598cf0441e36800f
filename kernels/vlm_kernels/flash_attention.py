"""Attention of packed segments in bfloat16, by a C++ kernel for CPUs that multiply bfloat16.

    o_t = sum_j softmax_j(scale * q_t . k_j) v_j   over the keys [first_t, end_t) of t's segment

`segments.py` defines segments, and has the reference; `cpu/flash_attention.cpp` is the kernel. Keys
are rows of tensors, or slots of KV blocks of any type. Nothing is gathered, and no mask is built.

    segments = plan_segments(...)                  once per step
    flash_attention(segments, q, k, v, out)        once per layer; or
    flash_paged_attention(segments, q, cache, ...)

Shapes: T packed queries, S segments, K keys, H KV heads, G query heads per KV head, D head size.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vlm_kernels.cpu import native
from vlm_kernels.decode_attention import check_cache
from vlm_kernels.kv_rows import NATIVE_TYPES, block_size_of
from vlm_kernels.mixed_blocks import num_entries
from vlm_kernels.segments import Segments

SYMBOL = "triptych_flash_attention"
ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p)
"""segments, tensors"""


class SegmentsStep(ctypes.Structure):
    """`Segments` in cpu/flash_keys.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "tokens", "num_queries", "num_keys", "key_start", "block_table", "first", "end",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_segments", "table_width",
                "num_layers", "num_kv_heads", "num_groups", "head_dim", "block_size",
                "kv_type", "num_threads",
            )
        ),
    )  # fmt: skip


class _Tensors(ctypes.Structure):
    """`Tensors` in cpu/flash_keys.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p if name in ("q", "k", "v", "out") else ctypes.c_int64)
            for name in (
                "q", "q_token", "q_head", "k", "k_token", "k_head", "v", "v_token", "v_head",
                "out", "layer",
            )
        ),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )  # fmt: skip


def can_attend_segments(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel supports this type and device on this machine."""
    return device.type == "cpu" and dtype == torch.bfloat16 and _kernel() is not None


def can_attend_blocks(kv_cache: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel supports keys in these KV blocks on this machine."""
    return can_attend_segments(dtype, kv_cache.device) and kv_cache.dtype in NATIVE_TYPES


def flash_attention(
    segments: Segments,
    q_THD: torch.Tensor,
    k_KHD: torch.Tensor,
    v_KHD: torch.Tensor,
    out_THD: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> None:
    """Attend. Writes every element of `out` whose token is in a segment, and no other.

    Args:
        segments: without a block table.
        q_THD: queries `[T, H * G, D]` in bfloat16; head h reads KV head h // G. The inner stride of
            all tensors is 1.
        k_KHD: keys, bfloat16.
        v_KHD: values, bfloat16.
        out_THD: same shape and type as q, contiguous; overlaps no other tensor.
        scale: factor of the scores.
        softcap: bound c of the scores s, which become c tanh(s / c); None sets no bound.

    Raises:
        ValueError: a shape, type or stride is wrong; the text says which.
    """
    if k_KHD.shape != v_KHD.shape or k_KHD.shape[2] != q_THD.shape[2]:
        raise ValueError(
            f"k {tuple(k_KHD.shape)}, v {tuple(v_KHD.shape)}: must fit q {tuple(q_THD.shape)}"
        )
    for name, tensor in (("k", k_KHD), ("v", v_KHD)):
        _check(name, tensor)
    _run(
        segments,
        segments_of_rows(segments, *k_KHD.shape),
        q_THD,
        out_THD,
        _Tensors(
            k=k_KHD.data_ptr(), k_token=k_KHD.stride(0), k_head=k_KHD.stride(1),
            v=v_KHD.data_ptr(), v_token=v_KHD.stride(0), v_head=v_KHD.stride(1),
            scale=scale, softcap=softcap or 0.0,
        ),
    )  # fmt: skip


def flash_paged_attention(
    segments: Segments,
    q_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    out_THD: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> None:
    """As `flash_attention`, for keys and values in KV blocks.

    Args:
        segments: with a block table; entries after a segment's end are not read.
        q_THD: as above.
        kv_cache: `[N, L, 2, H, P * D]`, contiguous, of one of `NATIVE_TYPES`.
        layer: layer index in the cache.
        out_THD: as above.
        scale: as above.
        softcap: as above.

    Raises:
        ValueError: a shape, type, stride or block number is wrong; the text says which.
    """
    num_layers = kv_cache.shape[1]
    step = segments_of_blocks(segments, kv_cache, head_dim=q_THD.shape[2])
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer}: the cache has {num_layers}")
    tensors = _Tensors(k=kv_cache.data_ptr(), layer=layer, scale=scale, softcap=softcap or 0.0)
    _run(segments, step, q_THD, out_THD, tensors)


def segments_of_rows(
    segments: Segments, num_keys: int, num_kv_heads: int, head_dim: int
) -> SegmentsStep:
    """The kernel's arguments for segments whose keys are rows of tensors, except `num_groups`.

    Raises ValueError as above; `segments` must outlive the result.
    """
    if segments.block_table is not None:
        raise ValueError("segments: they have a block table, and k and v no blocks")
    if len(segments.tokens) and (segments.key_start + segments.num_keys).max() > num_keys:
        raise ValueError(f"k has {num_keys} rows: the segments have more keys")
    return _step(segments, num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=1)


def segments_of_blocks(
    segments: Segments, kv_cache: torch.Tensor, *, head_dim: int
) -> SegmentsStep:
    """The kernel's arguments for segments whose keys are in KV blocks, except `num_groups`.

    Raises ValueError as above; `segments` and the cache must outlive the result.
    """
    check_cache(kv_cache)
    _, num_layers, _, num_kv_heads, _ = kv_cache.shape
    num_blocks = num_entries(kv_cache)
    block_size, table = block_size_of(kv_cache, head_dim), segments.block_table
    if table is None or table.ndim != 2 or len(table) != len(segments.tokens):
        raise ValueError("block_table: must have a row per segment")
    if (segments.num_keys > table.shape[1] * block_size).any():
        raise ValueError(f"block_table {table.shape}: a segment has more keys")
    read = table[np.arange(table.shape[1]) * block_size < segments.num_keys[:, None]]
    if (read < 0).any() or (read >= num_blocks).any():
        raise ValueError(f"block_table: a block that is read is not in 0 to {num_blocks - 1}")
    return _step(
        segments,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        kv_type=NATIVE_TYPES[kv_cache.dtype],
        block_table=table.ctypes.data,
        table_width=table.shape[1],
    )


def _step(segments: Segments, **fields: Any) -> SegmentsStep:
    arrays = {
        name: getattr(segments, name).ctypes.data
        for name in ("tokens", "num_queries", "num_keys", "key_start", "first", "end")
    }
    return SegmentsStep(
        **arrays, **fields, num_segments=len(segments.tokens), num_threads=torch.get_num_threads()
    )


def _run(
    segments: Segments,
    step: SegmentsStep,
    q_THD: torch.Tensor,
    out_THD: torch.Tensor,
    tensors: _Tensors,
) -> None:
    """Check the arguments that both functions share, and compute."""
    num_tokens, num_heads, _ = q_THD.shape
    _check("q", q_THD)
    _check("out", out_THD)
    if num_heads % step.num_kv_heads or num_tokens < len(segments.first):
        raise ValueError(
            f"q {tuple(q_THD.shape)}: must be [{len(segments.first)} or more, "
            f"a multiple of {step.num_kv_heads}, D]"
        )
    if out_THD.shape != q_THD.shape or not out_THD.is_contiguous():
        raise ValueError(f"out {tuple(out_THD.shape)}: must be contiguous and like q")
    step.num_groups = num_heads // step.num_kv_heads
    tensors.q, tensors.q_token, tensors.q_head = q_THD.data_ptr(), *q_THD.stride()[:2]
    tensors.out = out_THD.data_ptr()
    kernel = _kernel()
    assert kernel is not None
    kernel(ctypes.byref(step), ctypes.byref(tensors))


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu":
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}: must be bfloat16, cpu")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has inner stride {tensor.stride(-1)}: must be 1")


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    return native.function(SYMBOL, *ARGUMENTS)

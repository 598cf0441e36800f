"""Dense attention in bfloat16 by the C++ kernel, where this CPU multiplies bfloat16.

`dense_attention.dense_attention_reference` is the definition, `cpu/flash_attention.cpp` the kernel
with its mathematics. Tensors are views: what lies token by token is neither copied nor transposed.

Shapes: S sequences, H KV heads, G query heads per KV head, Q queries, K keys, D head size.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from vlm_kernels.cpu import native


def can_attend_dense(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel computes this, on this machine."""
    return device.type == "cpu" and dtype == torch.bfloat16 and _kernel() is not None


def flash_attention(
    q_SHGQD: torch.Tensor,
    k_SHKD: torch.Tensor,
    v_SHKD: torch.Tensor,
    out_SHGQD: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
) -> None:
    """Attend, and write every element of `out`.

    Args:
        q_SHGQD: queries in bfloat16, as the others; of all, the inner stride is 1.
        k_SHKD: keys, at least one.
        v_SHKD: values.
        out_SHGQD: overlaps no other.
        scale: factor of the scores.
        causal: the queries are the last Q of the K positions, and see none behind themselves.

    Raises:
        ValueError: a shape, type or stride is wrong; says which.
    """
    seqs, heads, groups, queries, head_dim = q_SHGQD.shape
    keys = k_SHKD.shape[2]
    if k_SHKD.shape != (seqs, heads, keys, head_dim) or v_SHKD.shape != k_SHKD.shape:
        raise ValueError(
            f"k {tuple(k_SHKD.shape)}, v {tuple(v_SHKD.shape)}: must fit q {tuple(q_SHGQD.shape)}"
        )
    if out_SHGQD.shape != q_SHGQD.shape:
        raise ValueError(f"out {tuple(out_SHGQD.shape)}: must be like q {tuple(q_SHGQD.shape)}")
    if keys < 1 or (causal and queries > keys):
        raise ValueError(f"{keys} keys for {queries} queries: too few")
    tensors = (q_SHGQD, k_SHKD, v_SHKD, out_SHGQD)
    for name, tensor in zip(("q", "k", "v", "out"), tensors, strict=True):
        if tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu":
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}: must be bfloat16, cpu")
        if tensor.stride(-1) != 1 and head_dim > 1:
            raise ValueError(f"{name} has inner stride {tensor.stride(-1)}: must be 1")
    strides = [*q_SHGQD.stride()[:4]]
    for x in (k_SHKD, v_SHKD):
        strides += [x.stride(0), x.stride(1), 0, x.stride(2)]
    strides += out_SHGQD.stride()[:4]
    kernel = _kernel()
    assert kernel is not None
    kernel(
        *(x.data_ptr() for x in tensors),
        (ctypes.c_int64 * 16)(*strides),
        (ctypes.c_int64 * 6)(seqs, heads, groups, queries, keys, head_dim),
        scale,
        causal,
        torch.get_num_threads(),
    )


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    return native.function(
        "triptych_flash_attention",
        *(pointer,) * 6, ctypes.c_float, number, number,
    )  # fmt: skip

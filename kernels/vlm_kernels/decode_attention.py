"""Paged attention of decoding sequences: one query token each, over the KV blocks of its sequence.

`paged_attention.py` has the mathematics and the reference; `cpu/paged_attention.cpp` is the kernel.
Scores and sums are float32 for every type of q and KV. If the CPU multiplies bfloat16, weights are
rounded to it, as transformers' `sdpa` does; its `eager` also rounds scores.

    rows = plan_decode(...)             once per step: numbers and addresses
    attend_decode(rows, q, ..., out)    once per layer: one call, all rows
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vlm_kernels.cpu import native
from vlm_kernels.kv_rows import NATIVE_TYPES, block_size_of
from vlm_kernels.mixed_blocks import num_entries

TYPES = (torch.float32, torch.bfloat16)
"""Types of q."""

SYMBOL = "triptych_paged_attention"
ARGUMENTS = (
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
    ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_float,
)  # fmt: skip
"""step, q, token stride, head stride, out, layer, scale, soft cap"""


class Step(ctypes.Structure):
    """`Step` in cpu/paged_rows.h."""

    _fields_ = (
        ("block_table", ctypes.c_void_p),
        ("num_kv", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_rows", "table_width", "window",
                "num_layers", "num_kv_heads", "num_groups", "head_dim", "block_size",
                "q_is_bf16", "kv_type", "num_threads",
            )
        ),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decoding sequences of one step, in the layout of the kernel.

    Attributes:
        step: the arguments that all layers share; it points into `arrays` and `kv_cache`.
        arrays: kept alive for `step`.
        kv_cache: kept alive for `step`.
        num_tokens: minimum number of packed tokens of q.
        head_dim: D.
        dtype: of q.
    """

    step: Step
    arrays: tuple[np.ndarray, ...]
    kv_cache: torch.Tensor
    num_tokens: int
    head_dim: int
    dtype: torch.dtype


def can_attend_decode(kv_cache: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel supports this cache and type on this machine."""
    return (
        kv_cache.device.type == "cpu"
        and kv_cache.dtype in NATIVE_TYPES
        and dtype in TYPES
        and _kernel() is not None
    )


def plan_decode(
    tokens: np.ndarray,
    num_kv: np.ndarray,
    block_table: np.ndarray,
    kv_cache: torch.Tensor,
    *,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> DecodeRows:
    """Check and lay out the rows of one step.

    Args:
        tokens: `[R]`, the index of each row's query among the packed tokens.
        num_kv: `[R]`, positions of each row's sequence, its own included.
        block_table: `[R, B]`; entries after a sequence's end are not read.
        kv_cache: `[N, L, 2, H, P * D]`, contiguous, of one of `NATIVE_TYPES`, on the CPU.
        head_dim: D.
        dtype: of q, float32 or bfloat16.
        window: positions that a row sees, its own included; None is all.

    Raises:
        ValueError: a shape, type or block number is wrong; the text says which.
    """
    check_cache(kv_cache)
    if dtype not in TYPES:
        raise ValueError(f"q {dtype}: not built")
    _, num_layers, _, num_kv_heads, _ = kv_cache.shape
    num_blocks = num_entries(kv_cache)
    block_size, num_rows = block_size_of(kv_cache, head_dim), len(tokens)
    if tokens.shape != (num_rows,) or num_kv.shape != (num_rows,) or num_rows == 0:
        raise ValueError(f"tokens {tokens.shape} and num_kv {num_kv.shape}: one of each per row")
    if block_table.ndim != 2 or len(block_table) != num_rows:
        raise ValueError(f"block_table {block_table.shape}: must have {num_rows} rows")
    width = block_table.shape[1]
    if (num_kv < 1).any() or (num_kv > width * block_size).any() or (tokens < 0).any():
        raise ValueError(f"num_kv must be 1 to {width * block_size}, and tokens at least 0")
    if window is not None and window < 1:
        raise ValueError(f"window {window}: must be at least 1")
    used = np.arange(width) * block_size < num_kv[:, None]
    read = block_table[used]
    if (read < 0).any() or (read >= num_blocks).any():
        raise ValueError(f"block_table: a block that is read is not in 0 to {num_blocks - 1}")
    arrays = (
        np.ascontiguousarray(block_table, np.int32),
        np.ascontiguousarray(num_kv, np.int32),
        np.ascontiguousarray(tokens, np.int64),
    )
    step = Step(
        *(array.ctypes.data for array in arrays),
        kv_cache.data_ptr(),
        num_rows=num_rows,
        table_width=width,
        window=window or 0,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        q_is_bf16=dtype == torch.bfloat16,
        kv_type=NATIVE_TYPES[kv_cache.dtype],
        num_threads=torch.get_num_threads(),
    )
    return DecodeRows(step, arrays, kv_cache, int(tokens.max()) + 1, head_dim, dtype)


def attend_decode(
    rows: DecodeRows,
    q_THD: torch.Tensor,
    layer: int,
    out_THD: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> None:
    """Write the outputs of the rows to their places in `out_THD`; other places are unchanged.

    Args:
        rows: of this step.
        q_THD: packed queries `[T, H * G, D]`, the inner stride 1; head h reads KV head h // G.
        layer: layer index in the cache.
        out_THD: same shape and type as q, contiguous.
        scale: factor of the scores.
        softcap: bound c of the scores, c tanh(s / c); None sets no bound.

    Raises:
        ValueError: a shape, type or stride is wrong; the text says which.
    """
    step = rows.step
    num_tokens, num_heads, head_dim = q_THD.shape
    if q_THD.dtype != rows.dtype or out_THD.dtype != rows.dtype:
        raise ValueError(f"q is {q_THD.dtype}, out {out_THD.dtype}: planned for {rows.dtype}")
    if head_dim != rows.head_dim or num_tokens < rows.num_tokens or num_heads % step.num_kv_heads:
        raise ValueError(
            f"q {tuple(q_THD.shape)}: must be [{rows.num_tokens} or more, a multiple of "
            f"{step.num_kv_heads}, {rows.head_dim}]"
        )
    token_stride, head_stride, inner = q_THD.stride()
    if inner != 1 and head_dim > 1:
        raise ValueError(f"q has inner stride {inner}: must be 1")
    if out_THD.shape != q_THD.shape or not out_THD.is_contiguous():
        raise ValueError(f"out {tuple(out_THD.shape)}: must be contiguous and like q")
    if not 0 <= layer < step.num_layers:
        raise ValueError(f"layer {layer}: the cache has {step.num_layers}")
    if q_THD.device.type != "cpu" or out_THD.device.type != "cpu":
        raise ValueError("q and out must be on the CPU")
    step.num_groups = num_heads // step.num_kv_heads
    kernel = _kernel()
    assert kernel is not None
    kernel(
        ctypes.byref(step),
        q_THD.data_ptr(),
        token_stride,
        head_stride,
        out_THD.data_ptr(),
        layer,
        scale,
        softcap or 0.0,
    )


def check_cache(kv_cache: torch.Tensor) -> None:
    """Raise ValueError if the kernels cannot read this cache."""
    if kv_cache.ndim != 5 or kv_cache.shape[2] != 2 or not kv_cache.is_contiguous():
        raise ValueError(f"kv_cache {tuple(kv_cache.shape)}: must be contiguous [N, L, 2, H, P*D]")
    if kv_cache.dtype not in NATIVE_TYPES or kv_cache.device.type != "cpu":
        raise ValueError(f"kv_cache {kv_cache.dtype} on {kv_cache.device}: not built")


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    return native.function(SYMBOL, *ARGUMENTS)

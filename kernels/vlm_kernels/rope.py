"""Rotary positions:  x_t = x_t * cos_t + rotate(x_t) * sin_t  with rotate((a, b)) = (-b, a).

Shapes: T tokens, H heads, D head size; a and b are the halves of D. cos and sin are given per token
and feature, so one function supports plain positions (arXiv 2104.09864) and those of several axes
(2409.12191). Both products and their sum are rounded to x's type, as in transformers. With float32
tables, which vision towers use, only the sum is rounded. C++ on CPUs (`cpu/rope.cpp`), Triton on
GPUs: in place, instead of six passes over copies.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from vlm_kernels import gpu
from vlm_kernels.cpu import native
from vlm_kernels.kv_rows import layer_views
from vlm_kernels.opaque import opaque
from vlm_kernels.store_kv import check_store, store_kv

SYMBOL = "triptych_rope"
_POINTER, _SIZE, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
ARGUMENTS = (
    *(_POINTER, _SIZE, _SIZE, _POINTER, _POINTER),
    *(_SIZE, _SIZE, _SIZE, _NUMBER, _NUMBER, _NUMBER),
)


def rope_reference(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """The definition; returns a new tensor."""
    a, b = x_THD.chunk(2, dim=-1)
    rotated = torch.cat((-b, a), dim=-1)
    return (x_THD * cos_TD[:, None] + rotated * sin_TD[:, None]).to(x_THD.dtype)


@opaque("rope(Tensor(a!) x_THD, Tensor cos_TD, Tensor sin_TD) -> ()")
def rope(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> None:
    """Rotate queries or keys, in place.

    Args:
        x_THD: float32 or bfloat16, on GPUs float16 too; the inner axis has stride 1.
        cos_TD: of the same type, or float32.
        sin_TD: of the type of cos.

    Raises:
        ValueError: a shape, type or stride does not fit.
    """
    check_rope(x_THD, cos_TD, sin_TD)
    if gpu.serves(x_THD.device):
        from vlm_kernels.gpu.rope import rope as launch

        launch(x_THD, cos_TD.contiguous(), sin_TD.contiguous())
        return
    run = _kernel() if x_THD.device.type == "cpu" else None
    if run is None or x_THD.dtype not in {torch.float32, torch.bfloat16}:
        x_THD.copy_(rope_reference(x_THD, cos_TD, sin_TD))
        return
    cos_TD, sin_TD = cos_TD.contiguous(), sin_TD.contiguous()
    run(
        x_THD.data_ptr(),
        x_THD.stride(0),
        x_THD.stride(1),
        cos_TD.data_ptr(),
        sin_TD.data_ptr(),
        *x_THD.shape,
        x_THD.dtype == torch.bfloat16,
        cos_TD.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def rope_store_kv(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slots_T: torch.Tensor,
) -> None:
    """Rotate queries in place; write rotated keys, and values, into their slots.

    It is `rope` and `store_kv`. On GPUs one kernel rotates keys while it writes them, unless the
    tables are of another type.

    Args:
        q_THD: queries before rotation.
        k_THD: keys before rotation; whether they are also rotated in place is undefined.
        v_THD: values.
        cos_TD: of the type of q and k, or float32, as for `rope`.
        sin_TD: of the type of cos.
        kv_cache: as for `store_kv`.
        layer: layer index in the cache.
        slots_T: as for `store_kv`.

    Raises:
        ValueError: a shape, type, stride or layer does not fit.
    """
    check_rope(q_THD, cos_TD, sin_TD, heads="q")
    check_rope(k_THD, cos_TD, sin_TD, heads="k")
    check_store(k_THD, v_THD, kv_cache, layer, slots_T)
    is_of_one_type = q_THD.dtype == k_THD.dtype == cos_TD.dtype
    if not gpu.serves(kv_cache.device) or not is_of_one_type:
        rope(q_THD, cos_TD, sin_TD)
        rope(k_THD, cos_TD, sin_TD)
        store_kv(k_THD, v_THD, kv_cache, layer, slots_T)
        return
    from vlm_kernels.gpu.rope import rope_store_kv as launch

    views = layer_views(kv_cache, layer, k_THD.shape[-1])
    launch(q_THD, k_THD, v_THD, cos_TD.contiguous(), sin_TD.contiguous(), *views, slots_T)


def check_rope(
    x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, *, heads: str = "x"
) -> None:
    """Raise ValueError for a wrong shape, type or stride; `heads` is the name of x in messages."""
    if x_THD.dim() != 3:
        raise ValueError(f"rope: {heads} {tuple(x_THD.shape)}: must be [T, H, D]")
    num_tokens, _, head_dim = x_THD.shape
    for name, table in (("cos", cos_TD), ("sin", sin_TD)):
        if table.shape != (num_tokens, head_dim) or head_dim % 2:
            raise ValueError(f"rope: {heads} {tuple(x_THD.shape)}, {name} {tuple(table.shape)}")
        is_known = table.dtype in {x_THD.dtype, torch.float32} and table.dtype == cos_TD.dtype
        if not is_known or table.device != x_THD.device:
            raise ValueError(
                f"rope: {heads} is {x_THD.dtype} on {x_THD.device}, {name} {table.dtype} on "
                f"{table.device}"
            )
    if x_THD.stride(2) != 1:
        raise ValueError(f"rope: {heads} has strides {x_THD.stride()}, the last must be 1")
    if gpu.serves(x_THD.device):
        gpu.check_floats(f"rope: {heads}", x_THD)


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    return native.function(SYMBOL, *ARGUMENTS)

"""LayerNorm:  y_t = (x_t - m_t) / sqrt(mean((x_t - m_t)^2) + eps) * w + b,  m_t = mean(x_t).

Shapes: T tokens, D features. Computed in float32 and rounded once, as torch does. C++ on CPUs
(`cpu/norm.cpp`), torch elsewhere.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from vlm_kernels.cpu import native
from vlm_kernels.opaque import opaque

SYMBOL = "triptych_layer_norm"
_POINTER, _SIZE, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
ARGUMENTS = (
    *(_POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE),
    *(ctypes.c_float, _NUMBER, _NUMBER),
)


def layer_norm_reference(
    x_TD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """The definition."""
    wide = x_TD.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * weight_D.float() + bias_D.float()).to(x_TD.dtype)


@opaque("layer_norm(Tensor x_TD, Tensor weight_D, Tensor bias_D, *, float eps) -> Tensor")
def layer_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Normalise each row.

    Args:
        x_TD: rows may be strided; C++ supports float32 and bfloat16.
        weight_D: of the same type.
        bias_D: of the same type.
        eps: added to the mean square.

    Returns:
        `[T, D]`, every element written.

    Raises:
        ValueError: a shape or type does not fit.
    """
    for name, vector in (("weight", weight_D), ("bias", bias_D)):
        fits = x_TD.dim() == 2 and vector.shape == x_TD.shape[1:]
        if not fits or vector.dtype != x_TD.dtype or vector.device != x_TD.device:
            raise ValueError(
                f"layer_norm: x is {x_TD.dtype} {tuple(x_TD.shape)} on {x_TD.device}, the {name} "
                f"{vector.dtype} {tuple(vector.shape)} on {vector.device}"
            )
    run = _kernel() if x_TD.device.type == "cpu" else None
    if run is None or x_TD.dtype not in {torch.float32, torch.bfloat16}:
        return functional.layer_norm(x_TD, weight_D.shape, weight_D, bias_D, eps)
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    weight_D, bias_D = weight_D.contiguous(), bias_D.contiguous()
    y_TD = x_TD.new_empty(x_TD.shape)
    run(
        x_TD.data_ptr(),
        x_TD.stride(0),
        weight_D.data_ptr(),
        bias_D.data_ptr(),
        y_TD.data_ptr(),
        *x_TD.shape,
        eps,
        x_TD.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return y_TD


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    return native.function(SYMBOL, *ARGUMENTS)

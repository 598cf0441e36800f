"""RMSNorm:  y_t = (x_t / sqrt(mean(x_t^2) + eps)) * w      for each token t (arXiv 1910.07467).

Shapes: T tokens, D features. The mean is in float32; the scaled x is rounded to its type before it
is multiplied by w, as in transformers' Llama and Qwen. C++ on CPUs (`cpu/norm.cpp`), Triton
on GPUs: one pass instead of six. Gemma multiplies by 1 + w and rounds once, at the end.

With a residual, h_t = x_t + r_t is normalised. It is rounded to its type before, as in two separate
modules.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from vlm_kernels import gpu
from vlm_kernels.cpu import native
from vlm_kernels.opaque import opaque

SYMBOL = "triptych_rms_norm"
_POINTER, _SIZE, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
ARGUMENTS = (
    *(_POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _SIZE),
    *(ctypes.c_float, _NUMBER, _NUMBER, _NUMBER),
)


def rms_norm_reference(
    x_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float, adds_one: bool = False
) -> torch.Tensor:
    """The definition."""
    wide = x_TD.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if adds_one:
        return (scaled * (1.0 + weight_D.float())).to(x_TD.dtype)
    return weight_D * scaled.to(x_TD.dtype)


def add_rms_norm_reference(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition."""
    h_TD = x_TD + residual_TD
    return rms_norm_reference(h_TD, weight_D, eps=eps), h_TD


@opaque("rms_norm(Tensor x_TD, Tensor weight_D, *, float eps, bool adds_one=False) -> Tensor")
def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float, adds_one: bool = False
) -> torch.Tensor:
    """Normalise each row.

    Args:
        x_TD: float32 or bfloat16, on GPUs float16 too; rows may be strided.
        weight_D: of the same type.
        eps: added to the mean square.
        adds_one: the factor is 1 + w, and only the result is rounded.

    Returns:
        `[T, D]`, every element written.

    Raises:
        ValueError: a shape or type does not fit.
    """
    if x_TD.dim() != 2 or weight_D.shape != x_TD.shape[1:]:
        raise ValueError(f"rms_norm: x {tuple(x_TD.shape)}, weight {tuple(weight_D.shape)}")
    if x_TD.dtype != weight_D.dtype or x_TD.device != weight_D.device:
        raise ValueError(
            f"rms_norm: x is {x_TD.dtype} on {x_TD.device}, the weight {weight_D.dtype} on "
            f"{weight_D.device}"
        )
    if gpu.serves(x_TD.device):
        gpu.check_floats("rms_norm: x", x_TD)
        from vlm_kernels.gpu.rms_norm import rms_norm as launch

        x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
        return launch(x_TD, weight_D.contiguous(), eps=eps, adds_one=adds_one)[0]
    run = _kernel() if x_TD.device.type == "cpu" else None
    if run is None or x_TD.dtype not in {torch.float32, torch.bfloat16}:
        return rms_norm_reference(x_TD, weight_D, eps=eps, adds_one=adds_one)
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    weight_D = weight_D.contiguous()
    y_TD = x_TD.new_empty(x_TD.shape)
    run(
        x_TD.data_ptr(),
        x_TD.stride(0),
        weight_D.data_ptr(),
        y_TD.data_ptr(),
        *x_TD.shape,
        eps,
        x_TD.dtype == torch.bfloat16,
        adds_one,
        torch.get_num_threads(),
    )
    return y_TD


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, and normalise each row.

    Args:
        x_TD: output of a layer; rows may be strided.
        residual_TD: input of that layer, of the same shape and type.
        weight_D: of the same type.
        eps: added to the mean square.

    Returns:
        y and h, `[T, D]` each, every element written.

    Raises:
        ValueError: a shape or type does not fit.
    """
    if residual_TD.shape != x_TD.shape or residual_TD.dtype != x_TD.dtype:
        raise ValueError(
            f"add_rms_norm: x is {x_TD.dtype} {tuple(x_TD.shape)}, the residual "
            f"{residual_TD.dtype} {tuple(residual_TD.shape)}"
        )
    if x_TD.dim() != 2 or weight_D.shape != x_TD.shape[1:] or weight_D.dtype != x_TD.dtype:
        raise ValueError(
            f"add_rms_norm: x is {x_TD.dtype} {tuple(x_TD.shape)}, the weight {weight_D.dtype} "
            f"{tuple(weight_D.shape)}"
        )
    if not x_TD.device == residual_TD.device == weight_D.device:
        raise ValueError("add_rms_norm: x, residual and weight are on several devices")
    if not gpu.serves(x_TD.device):
        h_TD = x_TD + residual_TD
        return rms_norm(h_TD, weight_D, eps=eps), h_TD
    gpu.check_floats("add_rms_norm: x", x_TD)
    from vlm_kernels.gpu.rms_norm import rms_norm as launch

    x_TD, residual_TD = (x if x.stride(1) == 1 else x.contiguous() for x in (x_TD, residual_TD))
    return launch(x_TD, weight_D.contiguous(), residual_TD, eps=eps)


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    return native.function(SYMBOL, *ARGUMENTS)

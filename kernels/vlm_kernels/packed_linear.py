"""Linear layers on packed weights:  y = x W^T + b, and what usually follows it, in one pass.

    plain      y = x W^T + b                          W [N, K], b [N]
    residual   y = r + (x W^T + b)                    r [M, N]
    activated  y = z * sigmoid(1.702 z)               z = x W^T + b; GELU of CLIP and Qwen2-VL
    gated      y = silu(x G^T) * (x U^T)              G, U [N, K]

Shapes: M rows of x, K inputs, N outputs. All in bfloat16, sums in float32; each product, SiLU and
sum of two tensors is rounded to bfloat16, as transformers' modules do one after the other.

    pack(W)            [panels, K / 2, 32, 2]: 32 outputs a panel, pairs of inputs side by side
    pack_gated(G, U)   likewise, 16 rows of G and the same 16 of U in each panel

One layout serves one row and thousands. A row's result depends on no other row. C++ for CPUs with
AVX512-BF16 (`cpu/linear.cpp`); `has_kernel` says whether this is one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from vlm_kernels.cpu import native

PANEL = 32
_PLAIN, _RESIDUAL, _GATED, _QUICK_GELU = range(4)


@dataclasses.dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights in panels; `panels` `[ceil(N / 32), ceil(K / 2), 32, 2]`, zeros beyond N and K.

    Of gated weights there are `2 N` rows in panels, and `num_outputs` is N.
    """

    panels: torch.Tensor
    num_outputs: int
    num_inputs: int
    is_gated: bool = False


def pack(weight_NK: torch.Tensor) -> PackedWeights:
    """Bring bfloat16 weights into panels; a copy."""
    return PackedWeights(_in_panels(weight_NK), *weight_NK.shape)


def pack_gated(gate_NK: torch.Tensor, up_NK: torch.Tensor) -> PackedWeights:
    """Bring the two matrices of a gated layer into shared panels; a copy."""
    _check(gate_NK.shape == up_NK.shape, f"gate {gate_NK.shape} and up {up_NK.shape} differ")
    num_outputs, num_inputs = gate_NK.shape
    half = PANEL // 2
    padding = (0, 0, 0, -num_outputs % half)
    parts = [functional.pad(w, padding).view(-1, half, num_inputs) for w in (gate_NK, up_NK)]
    mixed = torch.cat(parts, dim=1).view(-1, num_inputs)
    return PackedWeights(_in_panels(mixed), num_outputs, num_inputs, is_gated=True)


def packed_linear_reference(
    x_MK: torch.Tensor,
    weights: PackedWeights,
    bias_N: torch.Tensor | None = None,
    residual_MN: torch.Tensor | None = None,
    *,
    quick_gelu: bool = False,
) -> torch.Tensor:
    """The definition, on unpacked weights, each product in float32."""
    rows = weights.panels.transpose(1, 2).flatten(2).flatten(0, 1).float()
    if weights.is_gated:
        gate, up = rows.view(-1, 2, PANEL // 2, rows.shape[-1]).unbind(1)
        opened = functional.silu(_product(x_MK, gate.flatten(0, 1), weights))
        return opened * _product(x_MK, up.flatten(0, 1), weights)
    y_MN = _product(x_MK, rows, weights, bias_N)
    if quick_gelu:
        return y_MN * torch.sigmoid(1.702 * y_MN)
    return y_MN if residual_MN is None else residual_MN + y_MN


def packed_linear(
    x_MK: torch.Tensor,
    weights: PackedWeights,
    bias_N: torch.Tensor | None = None,
    residual_MN: torch.Tensor | None = None,
    *,
    quick_gelu: bool = False,
) -> torch.Tensor:
    """Multiply by packed weights.

    Args:
        x_MK: bfloat16; rows may lie apart, the inner axis has stride 1.
        weights: from `pack` or `pack_gated`.
        bias_N: bfloat16; none with gated weights.
        residual_MN: bfloat16, added to the rounded product; none with gated weights.
        quick_gelu: activate the rounded product; without a residual.

    Returns:
        `[M, N]` bfloat16, every element written.

    Raises:
        ValueError: a shape, type or stride does not fit.
    """
    num_rows, num_outputs = len(x_MK), weights.num_outputs
    _check(x_MK.dim() == 2 and x_MK.shape[1] == weights.num_inputs, f"x has shape {x_MK.shape}")
    _check(_is_plain(x_MK), f"x is {x_MK.dtype} with strides {x_MK.stride()}")
    if bias_N is not None:
        _check(bias_N.shape == (num_outputs,), f"the bias has shape {bias_N.shape}")
        _check(_is_plain(bias_N), f"the bias is {bias_N.dtype}")
    if residual_MN is not None:
        _check(residual_MN.shape == (num_rows, num_outputs), f"residual {residual_MN.shape}")
        _check(_is_plain(residual_MN), f"the residual is {residual_MN.dtype}")
    extras = bias_N is not None or residual_MN is not None or quick_gelu
    _check(not (weights.is_gated and extras), "gated weights have no bias, residual, activation")
    _check(not (quick_gelu and residual_MN is not None), "a residual is not activated")
    run = _kernel()
    if run is None:
        return packed_linear_reference(x_MK, weights, bias_N, residual_MN, quick_gelu=quick_gelu)
    if x_MK.shape[1] % 2:
        x_MK = functional.pad(x_MK, (0, 1))
    follows = _PLAIN if residual_MN is None else _RESIDUAL
    if weights.is_gated or quick_gelu:
        follows = _GATED if weights.is_gated else _QUICK_GELU
    y_MN = x_MK.new_empty(num_rows, num_outputs)
    run(
        x_MK.data_ptr(),
        x_MK.stride(0),
        weights.panels.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        None if residual_MN is None else residual_MN.data_ptr(),
        0 if residual_MN is None else residual_MN.stride(0),
        y_MN.data_ptr(),
        num_outputs,
        num_rows,
        num_outputs * (2 if weights.is_gated else 1),
        x_MK.shape[1],
        follows,
        torch.get_num_threads(),
    )
    return y_MN


def has_kernel() -> bool:
    """Whether this machine has the fast path, the only reason to pack."""
    return _kernel() is not None


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    has = native.function("triptych_has_linear_bf16", returns=ctypes.c_int)
    if has is None or not has():
        return None
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    return native.function(
        "triptych_linear_bf16",
        *(pointer, size, pointer, pointer, pointer, size, pointer, size),
        *(number, number, number, number, number),
    )


def _in_panels(weight_NK: torch.Tensor) -> torch.Tensor:
    _check(weight_NK.dtype == torch.bfloat16, f"weights are {weight_NK.dtype}, not bfloat16")
    num_outputs, num_inputs = weight_NK.shape
    if num_outputs % PANEL or num_inputs % 2:
        padding = (0, num_inputs % 2, 0, -num_outputs % PANEL)
        weight_NK = functional.pad(weight_NK, padding)
    pairs = weight_NK.contiguous().view(torch.int32)  # of inputs, moved as one
    panels = pairs.view(-1, PANEL, pairs.shape[1]).transpose(1, 2).contiguous()
    return panels.view(torch.bfloat16).view(*panels.shape, 2)


def _product(
    x_MK: torch.Tensor,
    rows: torch.Tensor,
    weights: PackedWeights,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = rows[: weights.num_outputs, : weights.num_inputs]
    y_MN = functional.linear(x_MK.float(), rows, None if bias_N is None else bias_N.float())
    return y_MN.to(x_MK.dtype)


def _is_plain(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.stride(-1) == 1


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"packed_linear: {message}")

"""Linear layers on packed weights:  y = x W^T + b, and common next operations, in one pass.

    plain      y = x W^T + b                          W [N, K], b [N]
    residual   y = r + (x W^T + b)                    r [M, N]
    activated  y = act(z),  z = x W^T + b             z * sigmoid(1.702 z), or GELU by tanh
    gated      y = act(x G^T) * (x U^T)               G, U [N, K]; SILU or GELU

Shapes: M rows of x, K inputs, N outputs, all in bfloat16. Each product, activation and sum of two
tensors is rounded to bfloat16, as in separate modules of transformers.

    bfloat16 weights   sums in float32                              `cpu/linear.cpp`
    int8 weights       x is also rounded to int8, per row:          `cpu/linear_int8.cpp`
                       x_mk ~ a_m p_mk,  a_m = max_k |x_mk| / 127
                       y_mn = a_m s_n sum_k p_mk q_nk,  the sum in integers
    with known inputs  x_mk ~ a p_mk by one scale of all rows (`InputScale`); larger ones clipped

One layout suits one row and thousands (`packed_weights`). A row's result depends on no other row.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from vlm_kernels.cpu import native
from vlm_kernels.packed_weights import PANEL, PackedWeights, clip, quantise

SYMBOL = "triptych_linear_int8"
_POINTER, _SIZE, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_OPERANDS = (
    *(_POINTER, _POINTER, _SIZE, _POINTER, _SIZE),
    *(_NUMBER, _NUMBER, _NUMBER, _NUMBER, _NUMBER),
)
_SCALING = (_POINTER, _POINTER, ctypes.c_float, _NUMBER)
ARGUMENTS = (_POINTER, _SIZE, _POINTER, *_SCALING, *_OPERANDS)
BFLOAT16_ARGUMENTS = (_POINTER, _SIZE, _POINTER, *_OPERANDS)


class Activation(enum.Enum):
    """The activation after a product; for gated weights, that of the gate."""

    SILU = "silu"
    QUICK_GELU = "quick_gelu"
    GELU = "gelu_tanh"


_PLAIN, _RESIDUAL = 0, 1
_ACTIVATED = {Activation.QUICK_GELU: 2, Activation.GELU: 3}
_GATED = {Activation.SILU: 4, Activation.GELU: 5}
"""Activations of gated weights; the numbers are those of `Epilogue` in cpu/linear.h, as above."""


def packed_linear_reference(
    x_MK: torch.Tensor,
    weights: PackedWeights,
    bias_N: torch.Tensor | None = None,
    residual_MN: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """The definition, each product in float32."""
    sums = _product(x_MK, weights)
    if weights.is_gated:
        sums = sums if bias_N is None else sums + bias_N.float()
        gate, up = sums.view(len(x_MK), -1, 2, PANEL // 2).unbind(2)
        opened = activate(gate.flatten(1).to(x_MK.dtype), activation or Activation.SILU)
        return (opened * up.flatten(1).to(x_MK.dtype))[:, : weights.num_outputs]
    sums = sums[:, : weights.num_outputs]
    y_MN = (sums if bias_N is None else sums + bias_N.float()).to(x_MK.dtype)
    if activation is not None:
        return activate(y_MN, activation)
    return y_MN if residual_MN is None else residual_MN + y_MN


def activate(z: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply an activation as transformers computes it."""
    if activation is Activation.SILU:
        return functional.silu(z)
    if activation is Activation.GELU:
        return functional.gelu(z, approximate="tanh")
    return z * torch.sigmoid(1.702 * z)


def packed_linear(
    x_MK: torch.Tensor,
    weights: PackedWeights,
    bias_N: torch.Tensor | None = None,
    residual_MN: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """Multiply by packed weights.

    Args:
        x_MK: bfloat16; rows may be strided, the inner axis has stride 1.
        weights: from `pack` or `pack_gated`.
        bias_N: bfloat16; for gated weights from `mix_biases`.
        residual_MN: bfloat16, added to the rounded product; must be None for gated weights.
        activation: of the rounded product, without a residual; None is SiLU for gated weights.

    Returns:
        `[M, N]` bfloat16, every element written. If a row of x is not finite, its result is not.

    Raises:
        ValueError: a shape, type or stride is wrong.
    """
    _check_operands(x_MK, weights, bias_N, residual_MN)
    follows = epilogue_of(weights, activation, has_residual=residual_MN is not None)
    run = _kernel() if weights.is_int8 else _bfloat16_kernel()
    if run is None:
        return packed_linear_reference(x_MK, weights, bias_N, residual_MN, activation)
    if x_MK.shape[1] % 2 and not weights.is_int8:
        x_MK = functional.pad(x_MK, (0, 1))
    scaling: tuple[Any, ...] = ()
    if weights.is_int8:
        scaling = _at(weights.scales), _at(weights.offsets), *weights.inputs
    y_MN = x_MK.new_empty(len(x_MK), weights.num_outputs)
    run(
        x_MK.data_ptr(),
        x_MK.stride(0),
        weights.panels.data_ptr(),
        *scaling,
        _at(bias_N),
        _at(residual_MN),
        0 if residual_MN is None else residual_MN.stride(0),
        y_MN.data_ptr(),
        weights.num_outputs,
        len(x_MK),
        weights.num_outputs * (2 if weights.is_gated else 1),
        x_MK.shape[1],
        follows,
        torch.get_num_threads(),
    )
    return y_MN


def has_kernel() -> bool:
    """Whether this machine has the fast bfloat16 path; only then is packing useful."""
    return _bfloat16_kernel() is not None


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    return native.function(SYMBOL, *ARGUMENTS)


@functools.cache
def _bfloat16_kernel() -> Callable[..., Any] | None:
    has = native.function("triptych_has_linear_bf16", returns=ctypes.c_int)
    if has is None or not has():
        return None
    return native.function("triptych_linear_bf16", *BFLOAT16_ARGUMENTS)


def _product(x_MK: torch.Tensor, weights: PackedWeights) -> torch.Tensor:
    """Float32 `[M, panels * 32]`: the dequantised sums."""
    if weights.scales is None:
        return functional.linear(x_MK.float(), weights.rows())
    is_known = weights.inputs.is_known
    codes, scales = clip(x_MK, weights.inputs) if is_known else quantise(x_MK)
    sums = codes.double() @ weights.rows().double().T  # integers, exact
    return sums.float() * (scales * weights.scales)


def epilogue_of(
    weights: PackedWeights, activation: Activation | None, *, has_residual: bool = False
) -> int:
    """The kernel's number for the operations after the product; ValueError if unsupported."""
    if weights.is_gated:
        _check(not has_residual, "gated weights have no residual")
        number = _GATED.get(activation or Activation.SILU)
    elif activation is not None:
        _check(not has_residual, "a residual is not activated")
        number = _ACTIVATED.get(activation)
    else:
        number = _RESIDUAL if has_residual else _PLAIN
    if number is None:
        kind = "gated" if weights.is_gated else "plain"
        raise ValueError(f"packed_linear: {kind} weights are not followed by {activation}")
    return number


def _check_operands(
    x_MK: torch.Tensor,
    weights: PackedWeights,
    bias_N: torch.Tensor | None,
    residual_MN: torch.Tensor | None,
) -> None:
    _check(x_MK.dim() == 2 and x_MK.shape[1] == weights.num_inputs, f"x has shape {x_MK.shape}")
    _check(_is_plain(x_MK), f"x is {x_MK.dtype} with strides {x_MK.stride()}")
    if bias_N is not None:
        _check(bias_N.shape == (weights.num_biases,), f"the bias has shape {bias_N.shape}")
        _check(_is_plain(bias_N), f"the bias is {bias_N.dtype}")
    if residual_MN is not None:
        fits = residual_MN.shape == (len(x_MK), weights.num_outputs)
        _check(fits, f"residual {residual_MN.shape}")
        _check(_is_plain(residual_MN), f"the residual is {residual_MN.dtype}")


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_plain(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.stride(-1) == 1


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"packed_linear: {message}")

"""RMSNorm after an addition:  h_t = x_t + r_t,  y_t = rms_norm(h_t)      for each token t.

Shapes: T tokens, D features. h is rounded to its type before it is normalised, as in two separate
modules. One pass in Triton on GPUs; elsewhere the sum, then `rms_norm`.
"""

from __future__ import annotations

import torch

from vlm_kernels import gpu
from vlm_kernels.rms_norm import rms_norm, rms_norm_reference


def add_rms_norm_reference(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition."""
    h_TD = x_TD + residual_TD
    return rms_norm_reference(h_TD, weight_D, eps=eps), h_TD


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

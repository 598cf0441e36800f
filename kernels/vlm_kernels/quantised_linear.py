"""Linear layers on quantised weights:  y = x W^T + b  with  W_nk = s_ng * c_nk,  g = k // group.

    int8    codes [N, K]                 one scale per output: the group is K
    int4    codes [N, K / 2] in pairs    groups of 32 or 128 inputs; codes from -8 to 7
            byte i of a group: element i in the low four bits, element i + group / 2 in the high

Shapes: M rows of x, K inputs, N outputs. x keeps its type, sums are float32. Decode is limited by
reading weights, so a half or a quarter of the bytes is up to twice or four times as fast. If
products are the limit, nothing is gained. Triton on GPUs; elsewhere torch, which dequantises the
weights to x's type at each call. (On CPUs, `packed_linear` has its own int8 products.)
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional

from vlm_kernels import gpu
from vlm_kernels.opaque import opaque

GROUPS = (32, 128)
"""Group sizes of int4."""


@dataclasses.dataclass(frozen=True, slots=True)
class QuantisedWeights:
    """Codes and scales of `[N, K]` weights.

    Attributes:
        codes: int8 `[N, K]`, or uint8 `[N, K / 2]` for int4 in pairs; contiguous.
        scales: float32 `[N, K / group]`, contiguous.
        group: number of inputs that share a scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group: int

    @property
    def num_inputs(self) -> int:
        """The number of inputs, K."""
        return self.scales.shape[1] * self.group

    @property
    def is_int4(self) -> bool:
        """Whether a byte holds two codes."""
        return self.codes.dtype == torch.uint8


def quantise_weights(weight_NK: torch.Tensor, *, group: int | None = None) -> QuantisedWeights:
    """Quantise weights; a copy.

    Args:
        weight_NK: any float type.
        group: 32 or 128 for int4; None is int8.

    Raises:
        ValueError: the group has another size, or does not divide K.
    """
    num_inputs = weight_NK.shape[1]
    if group is None:
        scales = weight_NK.float().abs().amax(dim=1, keepdim=True) / 127
        return QuantisedWeights(_codes(weight_NK, scales, 127).contiguous(), scales, num_inputs)
    if group not in GROUPS or num_inputs % group:
        raise ValueError(
            f"quantise_weights: group {group} of {num_inputs}: must be one of {GROUPS}"
        )
    grouped = weight_NK.reshape(len(weight_NK), -1, group)  # [N, K / group, group]
    scales = grouped.float().abs().amax(dim=2) / 7
    low, high = (_codes(grouped, scales, 7).to(torch.uint8) & 15).chunk(2, dim=2)
    codes = (low | high << 4).flatten(1).contiguous()
    return QuantisedWeights(codes, scales.contiguous(), group)


def dequantised(weights: QuantisedWeights) -> torch.Tensor:
    """The weights as float32 `[N, K]`."""
    codes = weights.codes.view(*weights.scales.shape, -1)
    if weights.is_int4:
        signed = torch.cat((codes & 15, codes >> 4), dim=2).to(torch.int8)
        codes = torch.where(signed > 7, signed - 16, signed)
    return (codes.float() * weights.scales[..., None]).flatten(1)


def quantised_linear_reference(
    x_MK: torch.Tensor, weights: QuantisedWeights, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition, in float32."""
    bias = None if bias_N is None else bias_N.float()
    return functional.linear(x_MK.float(), dequantised(weights), bias).to(x_MK.dtype)


def quantised_linear(
    x_MK: torch.Tensor, weights: QuantisedWeights, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply by quantised weights.

    Args:
        x_MK: float32, float16 or bfloat16; rows may be strided, the inner axis has stride 1.
        weights: from `quantise_weights`, on the same device.
        bias_N: of x's type.

    Returns:
        `[M, N]`, every element written.

    Raises:
        ValueError: a shape, type, stride or device is wrong.
    """
    if x_MK.dim() != 2 or x_MK.shape[1] != weights.num_inputs:
        raise ValueError(f"quantised_linear: x {tuple(x_MK.shape)}, {weights.num_inputs} inputs")
    if x_MK.dtype not in gpu.FLOATS or x_MK.stride(1) != 1:
        raise ValueError(
            f"quantised_linear: x is {x_MK.dtype} with strides {x_MK.stride()}, the last must be 1"
        )
    if not x_MK.device == weights.codes.device == weights.scales.device:
        raise ValueError(
            f"quantised_linear: x is on {x_MK.device}, codes on {weights.codes.device}, scales on "
            f"{weights.scales.device}"
        )
    if bias_N is not None and (
        bias_N.shape != weights.codes.shape[:1]
        or bias_N.dtype != x_MK.dtype
        or bias_N.device != x_MK.device
    ):
        raise ValueError(
            f"quantised_linear: the bias is {bias_N.dtype} {tuple(bias_N.shape)} on {bias_N.device}"
        )
    return _multiply(x_MK, weights.codes, weights.scales, weights.group, bias_N)


@opaque(
    "quantised_linear(Tensor x_MK, Tensor codes, Tensor scales, int group, Tensor? bias_N) "
    "-> Tensor",
    shape=lambda x_MK, codes, *_: (x_MK.shape[0], codes.shape[0]),
)
def _multiply(
    x_MK: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    bias_N: torch.Tensor | None,
) -> torch.Tensor:
    if not gpu.serves(x_MK.device):
        weights = QuantisedWeights(codes, scales, group)
        return functional.linear(x_MK, dequantised(weights).to(x_MK.dtype), bias_N)
    from vlm_kernels.gpu.quantised_linear import quantised_linear as launch

    bias_N = None if bias_N is None else bias_N.contiguous()
    return launch(x_MK, codes, scales, group, bias_N)


def _codes(weight: torch.Tensor, scales: torch.Tensor, limit: int) -> torch.Tensor:
    """Integers from -limit to limit; 0 for a group of zeros."""
    scales = scales[..., None] if weight.dim() > scales.dim() else scales
    safe = torch.where(scales > 0, scales, 1)
    return (weight.float() / safe).round().clamp(-limit, limit).to(torch.int8)

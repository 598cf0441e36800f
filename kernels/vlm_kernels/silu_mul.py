"""SiLU·mul:  y = silu(g) * u,  silu(g) = g / (1 + exp(-g)): between the products of a gated MLP.

Shapes: M rows, N columns. The gate is SwiGLU's (arXiv 2002.05202). SiLU is rounded to its type
before the product, as in two separate modules. One pass in Triton on GPUs; on CPUs it is part of
`packed_linear`, and this function uses torch.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from vlm_kernels import gpu
from vlm_kernels.opaque import opaque


def silu_mul_reference(gate_MN: torch.Tensor, up_MN: torch.Tensor) -> torch.Tensor:
    """The definition."""
    return functional.silu(gate_MN) * up_MN


@opaque("silu_mul(Tensor gate_MN, Tensor up_MN) -> Tensor")
def silu_mul(gate_MN: torch.Tensor, up_MN: torch.Tensor) -> torch.Tensor:
    """Activate and multiply.

    Args:
        gate_MN: rows may be strided; the inner axis has stride 1.
        up_MN: of the same shape and type; rows may be strided.

    Returns:
        `[M, N]`, every element written.

    Raises:
        ValueError: a shape, type or stride is wrong.
    """
    if gate_MN.dim() != 2 or gate_MN.shape != up_MN.shape or gate_MN.dtype != up_MN.dtype:
        raise ValueError(
            f"silu_mul: gate is {gate_MN.dtype} {tuple(gate_MN.shape)}, up {up_MN.dtype} "
            f"{tuple(up_MN.shape)}"
        )
    if gate_MN.stride(1) != 1 or up_MN.stride(1) != 1 or gate_MN.device != up_MN.device:
        raise ValueError(
            f"silu_mul: gate has strides {gate_MN.stride()} on {gate_MN.device}, up "
            f"{up_MN.stride()} on {up_MN.device}; the last must be 1"
        )
    if not gpu.serves(gate_MN.device):
        return silu_mul_reference(gate_MN, up_MN)
    gpu.check_floats("silu_mul: gate", gate_MN)
    from vlm_kernels.gpu.silu_mul import silu_mul as launch

    return launch(gate_MN, up_MN)

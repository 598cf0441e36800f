"""Linear layers whose weights lie in the order in which this CPU multiplies them.

    y = x W^T + b        x [..., K], W [N, K], b [N]

oneDNN multiplies blocks of W. Given a plain matrix it copies W into blocks at every call, which for
the few rows of a decode step costs more than the product; packed once, W is only read. Measured on
two cores with AVX512-BF16, bfloat16: 1.4 to 2.2 times as fast with up to 64 rows, and no slower
with more, so that every layer is packed, whatever its shape.

    float32    plain: products stay those of transformers, bit for bit
    float16    plain: CPUs without AVX512-FP16 have no fast product of it
    CUDA       plain: the GPU's library needs no order of its own
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap

import torch
from torch import nn

PACKED_ROWS = 256
"""Rows of x that the order of W is chosen for; measured as good for 1 to 2,048."""

MAX_COPY_SHARE = 0.11
"""A head that shares its weights with the embedding table is packed as a second copy, the table
being read row by row; but only where the copy is at most this share of all weights."""

_MADV_DONTNEED = 4
_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """What was packed: linear layers, the bytes of their weights, and bytes that exist twice."""

    num_layers: int = 0
    num_bytes: int = 0
    copied_bytes: int = 0

    @property
    def backend(self) -> str:
        """The library that computes the packed layers."""
        return "onednn" if self.num_layers else "none"


class PackedLinear(nn.Module):
    """`nn.Linear` in bfloat16 on a CPU, its weights packed; equal to it up to rounding."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = (
            None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), False)
        )
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., K]` to `[..., N]`."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return y

    def extra_repr(self) -> str:
        """As `nn.Linear` shows itself."""
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing makes sense for these weights on this machine."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(model: nn.Module) -> Packing:
    """Replace the linear layers of a model by packed ones; nothing stays mapped from its files.

    One layer after the other: what it replaces is given back before the next is read, so that the
    weights are never in memory twice.
    """
    users = _users(model)
    total = sum(p.numel() * p.element_size() for p in set(model.parameters()))
    packing = Packing()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            num_bytes = child.weight.numel() * child.weight.element_size()
            is_shared = users[id(child.weight)] > 1
            if is_shared and num_bytes > total * MAX_COPY_SHARE:
                continue
            setattr(parent, name, PackedLinear(child))
            if not is_shared:
                _give_back(child.weight)
            packing = Packing(
                packing.num_layers + 1,
                packing.num_bytes + num_bytes,
                packing.copied_bytes + num_bytes * is_shared,
            )
    _own(model)
    return packing


def _users(model: nn.Module) -> dict[int, int]:
    """How many modules hold each parameter."""
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    return users


def _own(model: nn.Module) -> None:
    """Copy what was not packed out of the mapped files, so that the files can be unmapped."""
    for parameter in set(model.parameters()):
        mapped = parameter.data
        parameter.data = mapped.clone()
        _give_back(mapped)
    for buffer in model.buffers():
        buffer.data = buffer.detach().clone()
    _libc.malloc_trim(0)


def _give_back(weight: torch.Tensor) -> None:
    """Let the system drop the pages of a weight that nobody reads again.

    The mapping of a file lives until its last tensor is gone; its pages need not.
    """
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.numel() * weight.element_size()) // mmap.PAGESIZE
    size = end * mmap.PAGESIZE - start
    if size > 0:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_DONTNEED)

"""Linear layers with weights packed in the order in which the CPU's kernel reads them.

    y = x W^T + b        x [..., K], W [N, K], b [N]

With a plain matrix, a library reorders W at every call. For the few rows of a decode step, this
costs more than the product. Packed weights are only read. All layers are packed, whatever their
shape; layers with the same input are packed as one (`docs/decisions/0013`).

    AMX, AVX512-BF16   our kernel (`vlm_kernels.packed_linear`)
    other CPUs         oneDNN, through torch
    int8, if asked     our kernel on any CPU: weights and activations are rounded to int8
    float32            plain: products equal those of transformers, bit for bit
    float16            plain: CPUs without AVX512-FP16 have no fast float16 product
    CUDA               plain: the GPU's library needs no special order
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from vlm_kernels import PackedWeights, packed_linear
from vlm_kernels.layer_weights import Linear
from vlm_kernels.packed_linear import Activation, activate, has_kernel
from vlm_kernels.packed_weights import BY_ROW, InputScale, mix_biases, pack, pack_gated
from vlm_worker.model.memory import DONTNEED, advise

PACKED_ROWS = 256
"""Rows of x for which oneDNN chooses the order of W; by measurement, it suits 1 to 2,048 rows."""

MAX_COPY_SHARE = 0.11
"""A head that shares its weights with the embedding table is packed as a second copy, because the
table is read by rows. This is done only if the copy is at most this share of all weights."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """Statistics of packing.

    Attributes:
        num_bytes: bytes of the packed layers.
        copied_bytes: bytes of copies of shared weights.
        backend: computes the packed layers, except int8 layers on a CPU, which use our kernel.
        num_int8_layers: layers that were rounded to int8.
        saved_bytes: bytes that rounding saved.
    """

    num_layers: int = 0
    num_bytes: int = 0
    copied_bytes: int = 0
    backend: str = "none"
    num_int8_layers: int = 0
    saved_bytes: int = 0

    def with_layer(
        self, weight: torch.Tensor, num_bytes: int, *, is_int8: bool, is_copy: bool = False
    ) -> Packing:
        """Add a layer whose `weight` has `num_bytes` after packing."""
        return Packing(
            self.num_layers + 1,
            self.num_bytes + num_bytes,
            self.copied_bytes + num_bytes * is_copy,
            self.backend,
            self.num_int8_layers + is_int8,
            self.saved_bytes + (0 if is_copy else weight.nbytes - num_bytes),
        )


class PackedLinear(nn.Module):
    """`nn.Linear` in bfloat16 on a CPU with packed weights; equal to it up to rounding."""

    def __init__(
        self, linear: nn.Linear, *, int8: bool = False, inputs: InputScale = BY_ROW
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = _own_bias(linear.bias)
        weight = linear.weight.detach()
        packs = int8 or has_kernel()
        self.packed = _calibrated(pack(weight, int8=int8), inputs) if packs else None
        self._reordered = (
            None
            if self.packed is not None
            else torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        )

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """`[..., K]` to `[..., N]`; then either added to `residual` or activated, if given."""
        if self.packed is None:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._reordered, self.bias, "none", [], ""
            )
            if activation is not None:
                return activate(y, activation)
            return y if residual is None else residual + y
        rows = None if residual is None else residual.reshape(-1, self.out_features)
        y = packed_linear(x.reshape(-1, self.in_features), self.packed, self.bias, rows, activation)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        kind = "int8" if self.packed is not None and self.packed.is_int8 else "packed"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"


class JointLinear(nn.Module):
    """Linear layers with the same input: computed one by one, or packed as one."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(linears)
        self._sizes = [linear.out_features for linear in linears]
        self.packed: PackedWeights | None = None
        self.bias: nn.Parameter | None = None

    def pack(self, *, int8: bool, inputs: InputScale = BY_ROW) -> None:
        """Copy the weights of the parts into one packed matrix, and drop the parts."""
        weight, bias = concatenated(list(self.parts))
        self.packed = _calibrated(pack(weight, int8=int8), inputs)
        self.bias = _own_bias(bias)
        self.parts = nn.ModuleList()

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`[T, K]` to `[T, N]` per layer; if packed, they are views of one `[T, sum of N]`."""
        if self.packed is None:
            return tuple(part(x_TD) for part in self.parts)
        return torch.split(packed_linear(x_TD, self.packed, self.bias), self._sizes, dim=1)


class GatedLinear(nn.Module):
    """activation(gate(x)) * up(x): three operations, or one if packed."""

    def __init__(
        self, gate: nn.Linear, up: nn.Linear, activation: Activation = Activation.SILU
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList([gate, up])
        self.activation = activation
        self.packed: PackedWeights | None = None
        self.bias: nn.Parameter | None = None

    def pack(self, *, int8: bool, inputs: InputScale = BY_ROW) -> None:
        """Copy the weights of both parts into one packed matrix, and drop the parts."""
        linears: list[Any] = list(self.parts)
        weights = (linear.weight.detach() for linear in linears)
        self.packed = _calibrated(pack_gated(*weights, int8=int8), inputs)
        if all(linear.bias is not None for linear in linears):
            self.bias = _own_bias(mix_biases(*(linear.bias.detach() for linear in linears)))
        self.parts = nn.ModuleList()

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """`[T, K]` to `[T, N]`."""
        if self.packed is None:
            gate, up = (part(x_TD) for part in self.parts)
            return activate(gate, self.activation) * up
        return packed_linear(x_TD, self.packed, self.bias, activation=self.activation)


def concatenated(linears: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Concatenated weights and biases of layers with the same input; None if none has a bias."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
        for linear in linears
    ]
    return weight, torch.cat(biases).detach()


def linear_weights(linear: nn.Module) -> Linear | None:
    """The weights as `vlm_kernels.decoder_layers` expects them; None if our kernel did not pack."""
    if not isinstance(linear, PackedLinear | JointLinear | GatedLinear) or linear.packed is None:
        return None
    bias = linear.bias
    return Linear(linear.packed, None if bias is None else bias.detach())


def activated_product(linear: nn.Module, x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`activation(linear(x))`, in one pass if the layer is packed."""
    if isinstance(linear, PackedLinear):
        return linear(x, activation=activation)
    return activate(linear(x), activation)


def add_product(linear: nn.Module, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
    """`residual + linear(x)`, in one pass if the layer is packed."""
    if isinstance(linear, PackedLinear):
        return linear(x_TD, residual_TD)
    return residual_TD + linear(x_TD)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed weights of this dtype are faster on this device."""
    return device.type == "cpu" and dtype == torch.bfloat16 and _onednn_has_bfloat16()


def _onednn_has_bfloat16() -> bool:
    """Whether this CPU has what oneDNN needs to multiply bfloat16; so has one with our kernel."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(
    model: nn.Module,
    *,
    int8: Collection[nn.Module] = (),
    inputs: Mapping[nn.Module, InputScale] = MappingProxyType({}),
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Packing:
    """Replace the linear layers of a bfloat16 model on a CPU by packed ones, and unmap its files.

    The linear layers of the parts `int8` are rounded to int8; `inputs` has the scales of those that
    are calibrated. Layers are replaced one by one, after
    the embedding tables, which are often the largest. The pages of a weight are dropped before the
    next is read, so weights are never in memory twice. If this CPU does not multiply bfloat16, only
    the layers in int8 are packed. `progress` is called with the bytes of the weights that were
    read, and of all.
    """
    packs_bfloat16 = _onednn_has_bfloat16()
    users = _users(model)
    rounded = {id(module) for part in int8 for module in part.modules()}
    total = sum(parameter.nbytes for parameter in set(model.parameters()))
    backend = "native" if has_kernel() else "onednn" if packs_bfloat16 else "none"
    packing = Packing(backend=backend)
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    _own(tables)
    done = sum(table.nbytes for table in tables)
    progress(done, total)
    for joint in [m for m in model.modules() if isinstance(m, JointLinear | GatedLinear)]:
        is_int8 = id(joint) in rounded
        if is_int8 or has_kernel():
            weights: list[Any] = [part.weight for part in joint.parts]
            joint.pack(int8=is_int8, inputs=inputs.get(joint, BY_ROW))
            for weight in weights:
                _drop_pages(weight)
                num_bytes = weight.numel() if is_int8 else weight.nbytes
                packing = packing.with_layer(weight, num_bytes, is_int8=is_int8)
                done += weight.nbytes
            progress(done, total)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            is_shared = users[id(child.weight)] > 1
            if is_shared and child.weight.nbytes > total * MAX_COPY_SHARE:
                continue
            is_int8 = id(child) in rounded
            if not is_int8 and not packs_bfloat16:
                continue
            packed = PackedLinear(child, int8=is_int8, inputs=inputs.get(child, BY_ROW))
            setattr(parent, name, packed)
            if not is_shared:
                _drop_pages(child.weight)
            num_bytes = child.weight.numel() if is_int8 else child.weight.nbytes
            packing = packing.with_layer(
                child.weight, num_bytes, is_int8=is_int8, is_copy=is_shared
            )
            done += 0 if is_shared else child.weight.nbytes
            progress(done, total)
    _own(set(model.parameters()) - tables)
    for buffer in model.buffers():
        buffer.data = buffer.detach().clone()
    _libc.malloc_trim(0)
    return packing


def _calibrated(weights: PackedWeights, inputs: InputScale) -> PackedWeights:
    return weights.calibrated(inputs) if inputs.is_known else weights


def _own_bias(bias: torch.Tensor | None) -> nn.Parameter | None:
    return None if bias is None else nn.Parameter(bias.detach().clone(), False)


def _users(model: nn.Module) -> dict[int, int]:
    """Number of modules that use each parameter, by its `id`."""
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    return users


def _own(parameters: Collection[torch.Tensor]) -> None:
    """Copy parameters that are not packed out of the mapped files, so these can be unmapped."""
    for parameter in parameters:
        mapped = parameter.data
        parameter.data = mapped.clone()
        _drop_pages(mapped)


def _drop_pages(weight: torch.Tensor) -> None:
    """Let the kernel drop the pages of a weight that is not read again.

    A file stays mapped until its last tensor is freed; its pages need not stay in memory.
    """
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE
    size = end * mmap.PAGESIZE - start
    if size > 0:
        advise(start, size, DONTNEED)

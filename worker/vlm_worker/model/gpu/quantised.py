"""Linear layers on a GPU with int8 or int4 weights; activations are not rounded.

A decode step is bound by reading weights, and reads a half or a quarter of the bytes. A prompt
chunk gains nothing, and its products may be slower. On CPUs, int8 rounds weights and activations
(`docs/decisions/0016`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch import nn

from vlm_kernels import QuantisedWeights, quantise_weights, quantised_linear
from vlm_kernels.quantised_linear import GROUPS
from vlm_worker.model.gpu.walk import modules_in
from vlm_worker.model.linear import Packing


class QuantisedLinear(nn.Module):
    """`nn.Linear` with rounded weights."""

    def __init__(self, linear: nn.Linear, *, group: int | None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weights = quantise_weights(linear.weight.detach(), group=group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., K]` to `[..., N]`."""
        y = quantised_linear(x.reshape(-1, self.in_features), self.weights, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """The fields that `repr` prints, as for `nn.Linear`."""
        kind = f"int4 by {self.weights.group}" if self.weights.is_int4 else "int8"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"


def quantise_linears(model: nn.Module, parts: Collection[nn.Module], *, weights: str) -> Packing:
    """Round the linear layers of some parts of a model, on their device.

    Args:
        model: as loaded. A head that shares its weights with the embedding table is not rounded.
        parts: their linear layers are rounded.
        weights: `int8`, with a scale per output; or `int4`, with a scale per 128 or 32 inputs. If
            neither divides the inputs of a layer, that layer gets int8.
    """
    rounded = {id(module) for part in parts for module in part.modules()}
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    packing = Packing(backend="triton")
    for parent, name, child in modules_in(model):
        if type(child) is not nn.Linear or id(child) not in rounded:
            continue
        if id(child.weight) in tables:
            continue
        made = QuantisedLinear(child, group=_group(child) if weights == "int4" else None)
        setattr(parent, name, made)
        packing = _with_layer(packing, child.weight, made.weights)
    return packing


def _group(linear: nn.Linear) -> int | None:
    """The largest group size that divides a layer's inputs; None means int8."""
    return max((group for group in GROUPS if linear.in_features % group == 0), default=None)


def _with_layer(packing: Packing, before: torch.Tensor, after: QuantisedWeights) -> Packing:
    num_bytes = sum(x.numel() * x.element_size() for x in (after.codes, after.scales))
    return dataclasses.replace(
        packing,
        num_layers=packing.num_layers + 1,
        num_bytes=packing.num_bytes + num_bytes,
        num_int8_layers=packing.num_int8_layers + (not after.is_int4),
        saved_bytes=packing.saved_bytes + before.numel() * before.element_size() - num_bytes,
    )

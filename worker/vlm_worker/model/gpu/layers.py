"""Decoder layers on a GPU: joined matrix products, and fused kernels between them.

    x, r ─▶ r = x + r, norm ─▶ q, k, v ─▶ rope, k and v into the cache ─▶ attention ─▶ o ─▶ x
         ─▶ r = x + r, norm ─▶ gate, up ─▶ silu(gate) * up ─▶ down ─▶ x

Operations that a comma or "and" joins are one kernel. The norm of the next layer adds a layer's
output x to the residual r. So all layers are one module for transformers' loop, which has no r.
Each operation rounds like `model.layers`, in the same order.

Linear layers may have int8 or int4 weights; activations are not rounded. A decode step is bound by
reading weights, and reads a half or a quarter of the bytes. A prompt chunk gains nothing, and its
products may be slower. On CPUs, int8 rounds weights and activations (`docs/decisions/0016`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vlm_kernels import (
    Activation,
    add_rms_norm,
    paged_attention,
    quantise_weights,
    quantised_linear,
    rope,
    rope_store_kv,
    silu_mul,
)
from vlm_kernels.quantised_linear import GROUPS
from vlm_worker.model.attention import StepContext, planes_forward
from vlm_worker.model.layers import DecoderLayer, Mlp, Norm
from vlm_worker.model.linear import GatedLinear, JointLinear, Packing, concatenated

PLANES_ATTENTION = frozenset({"CLIPAttention", "SiglipAttention"})
"""Classes of transformers that compute what `PlanesAttention` does."""


def use_gpu_kernels(model: Any) -> None:
    """Join the products that `use_kernels` left separate, and fuse the decoder's layers.

    The layers are fused only if all can be. Gemma 3's cannot: it has norms of queries and of
    outputs between the operations that are fused here.
    """
    for parent, name, child in modules_in(model):
        if isinstance(child, JointLinear):
            setattr(parent, name, FusedLinear(child))
        elif isinstance(child, GatedLinear) and child.activation == Activation.SILU:
            setattr(parent, name, JoinedGate(child))
        elif type(child).__name__ in PLANES_ATTENTION:
            setattr(parent, name, PlanesAttention(child))
    decoder = model.get_decoder()
    layers = list(getattr(decoder, "layers", ()))
    if layers and all(_can_fuse(layer) for layer in layers):
        decoder.layers = nn.ModuleList([FusedLayers(layers)])


def _can_fuse(layer: nn.Module) -> bool:
    return (
        isinstance(layer, DecoderLayer)
        and layer.q_norm is None
        and layer.o_norm is None
        and isinstance(layer.mlp.up, JoinedGate)
    )


class FusedLinear(nn.Module):
    """Linear layers with the same input as one product."""

    def __init__(self, joint: JointLinear) -> None:
        super().__init__()
        self.product, self._sizes = _join(joint.parts)

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`[T, K]` to `[T, N]` per layer, as views of one `[T, sum of N]`."""
        return self.product(x_TD).split(self._sizes, dim=-1)


class JoinedGate(nn.Module):
    """silu(gate(x)) * up(x): one product and one kernel."""

    def __init__(self, gated: GatedLinear) -> None:
        super().__init__()
        self.product, self._sizes = _join(gated.parts)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """`[T, K]` to `[T, N]`."""
        return silu_mul(*self.product(x_TD).split(self._sizes, dim=-1))


class PlanesAttention(nn.Module):
    """Attention of a tower over images of one size; one product for queries, keys and values."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        parts = attention.q_proj, attention.k_proj, attention.v_proj
        self.qkv, self.o = FusedLinear(JointLinear(parts)), attention.out_proj
        self._head_dim: int = attention.head_dim
        self._scaling: float = attention.scale

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **_unused: Any
    ) -> tuple[torch.Tensor, None]:
        """`[B, T, D]` to the same shape, with the signature of transformers' attention."""
        q, k, v = (
            x.unflatten(-1, (-1, self._head_dim)).transpose(1, 2) for x in self.qkv(hidden_states)
        )
        o, _ = planes_forward(self, q, k, v, attention_mask, scaling=self._scaling)
        return self.o(o.flatten(2)), None


def _join(parts: nn.ModuleList) -> tuple[nn.Module, list[int]]:
    """One linear layer with the concatenated outputs, and the number of outputs of each part."""
    linears: list[Any] = list(parts)
    weight, bias = concatenated(linears)
    product = nn.Linear(1, 1, bias=bias is not None, device="meta")
    product.out_features, product.in_features = weight.shape
    product.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        product.bias = nn.Parameter(bias, requires_grad=False)
    return product, [linear.out_features for linear in linears]


class FusedLayers(nn.Module):
    """All layers of a decoder as one module."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FusedLayer(layer) for layer in layers)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: StepContext,
        **_unused: Any,
    ) -> torch.Tensor:
        """`[1, T, D]` to `[1, T, D]`, with the signature of one of transformers' layers."""
        cos_TD, sin_TD = (x[0] for x in position_embeddings)
        x_TD, residual_TD = hidden_states[0], None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, cos_TD, sin_TD, step)
        return (x_TD if residual_TD is None else residual_TD + x_TD)[None]


class FusedLayer(nn.Module):
    """One decoder layer; it shares the modules of the layer that it replaces."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = layer.attention_norm, layer.mlp_norm
        self.qkv, self.o = layer.qkv, layer.o
        self.mlp: Mlp = layer.mlp
        self._layer_idx, self._head_dim = layer.layer_idx, layer.head_dim
        self._scaling: float = layer.scaling
        self._window: int | None = layer.window

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        step: StepContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer's output and its residual, both `[T, D]`; the caller adds them."""
        y_TD, residual_TD = _add_norm(self.attention_norm, x_TD, residual_TD)
        attended = self._attend(y_TD, cos_TD, sin_TD, step)
        y_TD, residual_TD = _add_norm(self.mlp_norm, self.o(attended), residual_TD)
        return self.mlp(y_TD), residual_TD

    def _attend(
        self, y_TD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        """The attention output, `[T, num_heads * head_dim]`."""
        q_THD, k_THD, v_THD = (x.unflatten(-1, (-1, self._head_dim)) for x in self.qkv(y_TD))
        cache, layer = step.kv_cache, self._layer_idx
        if step.observation is None:
            rope_store_kv(q_THD, k_THD, v_THD, cos_TD, sin_TD, cache, layer, step.slot_mapping)
        else:
            rope(q_THD, cos_TD, sin_TD)
            step.observation.add(q_THD, cache, layer, self._scaling)
        plan = step.plan(self._window)
        return paged_attention(q_THD, cache, layer, plan, scale=self._scaling).flatten(1)


def _add_norm(
    norm: Norm, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and this sum; the first layer has no residual."""
    if residual_TD is None:
        return norm(x_TD), x_TD
    return add_rms_norm(x_TD, residual_TD, norm.weight, eps=norm.eps)


def modules_in(parent: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield each descendant as (parent, name, module); replacements are descended into, too.

    The iterator drops a replaced module before it yields the next. So a model whose weights are
    copied layer by layer is never on a GPU twice.
    """
    for name in [name for name, _ in parent.named_children()]:
        yield parent, name, getattr(parent, name)
        yield from modules_in(getattr(parent, name))


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
        kind = f"int4 by {self.weights.group}" if self.weights.is_int4 else "int8"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"


def quantise_linears(
    model: nn.Module,
    parts: Collection[nn.Module],
    *,
    weights: str,
    packing: Packing = Packing(backend="triton"),  # noqa: B008  frozen
) -> Packing:
    """Round the linear layers of some parts of a model, on their device.

    Args:
        model: as loaded. A head that shares its weights with the embedding table is not rounded.
        parts: their linear layers are rounded.
        weights: `int8`, with a scale per output; or `int4`, with a scale per 128 or 32 inputs. If
            neither divides the inputs of a layer, that layer gets int8.
        packing: of the parts that are rounded already.
    """
    rounded = {id(module) for part in parts for module in part.modules()}
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for parent, name, child in modules_in(model):
        if type(child) is not nn.Linear or id(child) not in rounded:
            continue
        if id(child.weight) in tables:
            continue
        linear = QuantisedLinear(child, group=_group(child) if weights == "int4" else None)
        setattr(parent, name, linear)
        num_bytes = linear.weights.codes.nbytes + linear.weights.scales.nbytes
        packing = packing.with_layer(child.weight, num_bytes, is_int8=not linear.weights.is_int4)
    return packing


def _group(linear: nn.Linear) -> int | None:
    """The largest group size that divides a layer's inputs; None means int8."""
    return max((group for group in GROUPS if linear.in_features % group == 0), default=None)

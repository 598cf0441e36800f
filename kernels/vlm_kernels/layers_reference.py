"""The definitions of `decoder_layers` and `vision_layers`: a sequence of single kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_kernels.decoder_layers import LayerKind
from vlm_kernels.flash_attention import flash_attention
from vlm_kernels.layer_norm import layer_norm
from vlm_kernels.layer_weights import Heads, LayerNorm, LayerWeights, Linear, Norm, Tail
from vlm_kernels.packed_linear import Activation, packed_linear
from vlm_kernels.paged_attention import paged_attention
from vlm_kernels.rms_norm import rms_norm
from vlm_kernels.rope import rope
from vlm_kernels.segments import Segments
from vlm_kernels.store_kv import store_kv


def decoder_layers_reference(
    layers: Sequence[LayerWeights],
    heads: Heads,
    x_TD: torch.Tensor,
    kv_cache: torch.Tensor,
    slots_T: torch.Tensor,
    kinds: Sequence[LayerKind],
) -> torch.Tensor:
    """Returns the output as a new tensor; stores new keys and values in the cache."""
    parts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    for number, layer in enumerate(layers):
        kind = kinds[layer.kind]
        joint = _product(layer.qkv, _normed(layer.attention_norm, x_TD))
        q, k, v = torch.split(joint.view(len(x_TD), -1, heads.head_dim), parts, dim=1)
        q, k = _normed(layer.q_norm, q), _normed(layer.k_norm, k)
        rope(q, kind.cos, kind.sin)
        rope(k, kind.cos, kind.sin)
        store_kv(k, v, kv_cache, number, slots_T)
        attended = paged_attention(q, kv_cache, number, kind.plan, scale=layer.scale).flatten(1)
        x_TD = x_TD + _normed(layer.o_norm, _product(layer.o, attended))
        hidden = _product(layer.up, _normed(layer.mlp_norm, x_TD), layer.activation)
        x_TD = x_TD + _normed(layer.down_norm, _product(layer.down, hidden))
    return x_TD


def vision_layer_reference(
    layer: LayerWeights,
    heads: Heads,
    x_TD: torch.Tensor,
    segments: Segments,
    positions: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Returns the output as a new tensor."""
    parts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    joint = _product(layer.qkv, _normed(layer.attention_norm, x_TD))
    q, k, v = torch.split(joint.view(len(x_TD), -1, heads.head_dim), parts, dim=1)
    if positions is not None:
        rope(q, *positions)
        rope(k, *positions)
    attended = torch.empty_like(q, memory_format=torch.contiguous_format)
    flash_attention(segments, q, k, v, attended, scale=layer.scale)
    x_TD = x_TD + _product(layer.o, attended.flatten(1))
    hidden = _product(layer.up, _normed(layer.mlp_norm, x_TD), layer.activation)
    return x_TD + _product(layer.down, hidden)


def logits_reference(tail: Tail, x_TD: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
    """Logits of the rows: the last norm and the head."""
    return _product(tail.head, _normed(tail.norm, x_TD[rows_R]))


def _product(
    linear: Linear, x_TD: torch.Tensor, activation: Activation | None = None
) -> torch.Tensor:
    return packed_linear(x_TD, linear.weights, linear.bias, activation=activation)


def _normed(norm: Norm | LayerNorm | None, x: torch.Tensor) -> torch.Tensor:
    """Normalise the last axis; returns x if there is no norm."""
    if norm is None:
        return x
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(norm, LayerNorm):
        return layer_norm(rows, norm.weight, norm.bias, eps=norm.eps).view(x.shape)
    return rms_norm(rows, norm.weight, eps=norm.eps, adds_one=norm.adds_one).view(x.shape)

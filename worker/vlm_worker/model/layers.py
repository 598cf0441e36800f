"""Decoder layers, norms and MLPs as a few kernels, in place of transformers' modules.

    Llama's form    x ─▶ norm ─▶ q, k, v ─▶ rope ─▶ attention over KV blocks ─▶ o ─▶ + x
                    x ─▶ norm ─▶ silu(gate) * up ─▶ down ─▶ + x
    Gemma 3's form  also norms of q and k, and after o and down; GELU in place of SiLU

transformers computes a layer in about thirty small calls. For the few rows of a decode step, these
cost as much as the matrix products. The values here are equal up to the order of sums: each
operation rounds like the module that it replaces.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from vlm_kernels import layer_norm, layer_weights, rms_norm, rope
from vlm_kernels.decoder_layers import DecoderLayers, LayerKind
from vlm_kernels.layer_weights import Heads, Tail
from vlm_kernels.native_layers import has_layers
from vlm_kernels.packed_linear import Activation
from vlm_worker.model.attention import StepContext, paged_forward
from vlm_worker.model.linear import (
    GatedLinear,
    JointLinear,
    activated_product,
    add_product,
    linear_weights,
)

NORMS = frozenset(
    {"Gemma3RMSNorm", "LlamaRMSNorm", "Qwen2RMSNorm", "Qwen2VLRMSNorm", "Qwen2_5_VLRMSNorm"}
)
"""Classes of transformers that compute what `Norm` does."""

ACTIVATIONS = {
    "SiLU": Activation.SILU,
    "SiLUActivation": Activation.SILU,
    "GELUTanh": Activation.GELU,
    "QuickGELUActivation": Activation.QUICK_GELU,
}


def mlp_of(mlp: Any) -> Mlp | None:
    """The replacement of transformers' MLP; None if there is no kernel for its activation."""
    return gated_mlp(mlp) if hasattr(mlp, "gate_proj") else _plain_mlp(mlp)


def gated_mlp(mlp: Any) -> Mlp | None:
    """The replacement of a gated MLP; None if there is no kernel for its activation."""
    activation = ACTIVATIONS.get(type(mlp.act_fn).__name__)
    if activation not in {Activation.SILU, Activation.GELU}:
        return None
    gated = GatedLinear(mlp.gate_proj, mlp.up_proj, activation)
    return Mlp(gated, mlp.down_proj, activation)


def _plain_mlp(mlp: Any) -> Mlp | None:
    function = mlp.act if hasattr(mlp, "act") else mlp.activation_fn
    activation = ACTIVATIONS.get(type(function).__name__)
    if activation not in {Activation.QUICK_GELU, Activation.GELU}:
        return None
    return Mlp(mlp.fc1, mlp.fc2, activation)


class Mlp(nn.Module):
    """Two matrix products; the activation between them is fused into the first, or its gate."""

    def __init__(self, up: nn.Module, down: nn.Module, activation: Activation) -> None:
        super().__init__()
        self.up, self.down, self.activation = up, down, activation
        self._is_gated = isinstance(up, GatedLinear)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., D]` to the same shape, plus `residual`."""
        hidden = self.up(x) if self._is_gated else activated_product(self.up, x, self.activation)
        if residual is not None:
            return add_product(self.down, hidden, residual)
        y: torch.Tensor = self.down(hidden)
        return y


class Norm(nn.Module):
    """RMSNorm over the last axis; it shares the weight of the module that it replaces."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self._adds_one = type(norm).__name__ == "Gemma3RMSNorm"
        self.eps: float = norm.eps if self._adds_one else norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., D]` to the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        return rms_norm(rows, self.weight, eps=self.eps, adds_one=self._adds_one).view(x.shape)

    def weights(self) -> layer_weights.Norm:
        return layer_weights.Norm(self.weight.detach(), self.eps, self._adds_one)


class LayerNorm(nn.Module):
    """LayerNorm over the last axis; it shares the weights of the module that it replaces."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., D]` to the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        return layer_norm(rows, self.weight, self.bias, eps=self.eps).view(x.shape)

    def weights(self) -> layer_weights.LayerNorm:
        return layer_weights.LayerNorm(self.weight.detach(), self.bias.detach(), self.eps)


def norm_of(norm: Any) -> Norm | LayerNorm | None:
    """The replacement of transformers' norm; None if there is no kernel."""
    if type(norm).__name__ in NORMS:
        return Norm(norm)
    is_plain = type(norm) is nn.LayerNorm and len(norm.normalized_shape) == 1
    return LayerNorm(norm) if is_plain and norm.bias is not None else None


def packed_layer(layer: Any, **fields: Any) -> layer_weights.LayerWeights | None:
    """A layer's weights as `vlm_kernels` expects them; None if the layer is not packed.

    `fields` are other fields of LayerWeights.
    """
    qkv, o, up, down = map(linear_weights, (layer.qkv, layer.o, layer.mlp.up, layer.mlp.down))
    if qkv is None or o is None or up is None or down is None:
        return None
    return layer_weights.LayerWeights(
        attention_norm=layer.attention_norm.weights(),
        qkv=qkv,
        o=o,
        mlp_norm=layer.mlp_norm.weights(),
        up=up,
        down=down,
        scale=layer.scaling,
        activation=layer.mlp.activation,
        **fields,
    )


class DecoderLayer(nn.Module):
    """One layer over packed tokens; it reuses the weights of the layer that it replaces."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, gated_mlp(layer.mlp)
        assert mlp is not None
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.window: int | None = getattr(attention, "sliding_window", None)
        self.attention_norm = Norm(layer.input_layernorm)
        self.qkv = JointLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o = attention.o_proj
        self.mlp = mlp
        self.q_norm = self.k_norm = self.o_norm = self.down_norm = None
        if hasattr(layer, "pre_feedforward_layernorm"):
            self.mlp_norm = Norm(layer.pre_feedforward_layernorm)
            self.q_norm, self.k_norm = Norm(attention.q_norm), Norm(attention.k_norm)
            self.o_norm = Norm(layer.post_attention_layernorm)
            self.down_norm = Norm(layer.post_feedforward_layernorm)
        else:
            self.mlp_norm = Norm(layer.post_attention_layernorm)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: StepContext,
        **_unused: Any,
    ) -> torch.Tensor:
        """`[1, T, D]` to `[1, T, D]`, called as transformers' models call a layer."""
        x_TD = hidden_states[0]
        attended = self._attend(x_TD, position_embeddings, step)
        if self.o_norm is None or self.down_norm is None:
            x_TD = add_product(self.o, attended, x_TD)
            return self.mlp(self.mlp_norm(x_TD), x_TD)[None]
        x_TD = x_TD + self.o_norm(self.o(attended))
        return (x_TD + self.down_norm(self.mlp(self.mlp_norm(x_TD))))[None]

    def weights(self, kind: int) -> layer_weights.LayerWeights | None:
        """See `packed_layer`; `kind` is the index of the layer's kind in the native call."""
        norms = {name: getattr(self, name) for name in ("q_norm", "k_norm", "o_norm", "down_norm")}
        weights = {name: norm.weights() for name, norm in norms.items() if norm is not None}
        return packed_layer(self, kind=kind, **weights)

    def _attend(
        self,
        x_TD: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: StepContext,
    ) -> torch.Tensor:
        """The attention output, `[T, num_heads * head_dim]`."""
        parts = self.qkv(self.attention_norm(x_TD))
        q_THD, k_THD, v_THD = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_THD = self.q_norm(q_THD), self.k_norm(k_THD)
        cos_TD, sin_TD = (x[0] for x in position_embeddings)
        rope(q_THD, cos_TD, sin_TD)
        rope(k_THD, cos_TD, sin_TD)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        o, _ = paged_forward(
            self, q, k, v, None, scaling=self.scaling, step=step, sliding_window=self.window
        )
        return o[0].flatten(1)


KindKey = tuple[str | None, int | None]
"""A layer's type, or None if positions do not depend on it, and its window."""


class Decoder:
    """The language model: embeddings to logits; on CPUs in one native call if possible.

        embeddings ─▶ positions ─▶ layers, norm, head ─▶ logits
                                   if each layer is a `DecoderLayer` packed in bfloat16: one call
                                   (`vlm_kernels.decoder_layers`)
                                   else: transformers' model calls layer by layer

    Both ways compute the same values, to the last bit.
    """

    def __init__(self, text_model: Any, head: nn.Module) -> None:
        self._text_model, self._head = text_model, head
        kinds = _layer_kinds(text_model)
        self._kinds = list(dict.fromkeys(kinds))
        self._types = {layer_type for layer_type, _ in self._kinds}
        self._native = _native_layers(text_model, head, kinds)

    def logits(
        self,
        embeds_TD: torch.Tensor,
        positions_PT: torch.Tensor,
        step: StepContext,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute logits `[R, V]` in the dtype of the head.

        Args:
            embeds_TD: contiguous; overwritten.
            positions_PT: int64; P is 1, or 3 for M-RoPE.
            step: the context of this step.
            rows_R: int64, packed positions whose logits are computed; None is all.
        """
        native = self._native
        if native is not None and native.tail is not None and rows_R is not None:
            kinds = self._kinds_of_step(embeds_TD, _positions(positions_PT), step)
            return native.logits(embeds_TD, step.kv_cache, step.slot_mapping, kinds, rows_R)
        hidden_TD = self.hidden(embeds_TD, positions_PT, step)
        return self.head(hidden_TD if rows_R is None else hidden_TD[rows_R])

    def hidden(
        self, embeds_TD: torch.Tensor, positions_PT: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        """Compute the inputs `[T, D]` of the head; arguments as those of `logits`."""
        positions = _positions(positions_PT)
        if self._native is None:
            output = self._text_model(
                inputs_embeds=embeds_TD[None], position_ids=positions, use_cache=False, step=step
            )
            hidden_TD: torch.Tensor = output.last_hidden_state[0]
            return hidden_TD
        kinds = self._kinds_of_step(embeds_TD, positions, step)
        self._native(embeds_TD, step.kv_cache, step.slot_mapping, kinds)
        normed_TD: torch.Tensor = self._text_model.norm(embeds_TD)
        return normed_TD

    def head(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Compute logits `[R, V]` from results of `hidden`."""
        logits_RV: torch.Tensor = self._head(hidden_RD)
        return logits_RV

    def observe(
        self, embeds_TD: torch.Tensor, positions_PT: torch.Tensor, step: StepContext
    ) -> None:
        """Run all layers, layer by layer, for the `observation` of the step."""
        positions = _positions(positions_PT)
        self._text_model(
            inputs_embeds=embeds_TD[None], position_ids=positions, use_cache=False, step=step
        )

    def _kinds_of_step(
        self, embeds_TD: torch.Tensor, positions: torch.Tensor, step: StepContext
    ) -> list[LayerKind]:
        rotary = self._text_model.rotary_emb
        tables = {
            layer_type: rotary(embeds_TD[None], positions, *([layer_type] if layer_type else []))
            for layer_type in self._types
        }
        kinds = []
        for layer_type, window in self._kinds:
            cos, sin = (table[0].contiguous() for table in tables[layer_type])
            kinds.append(LayerKind(cos, sin, step.plan(window)))
        return kinds


def _positions(positions_PT: torch.Tensor) -> torch.Tensor:
    """The positions as transformers' models expect them: `[1, T]`, or `[3, 1, T]` for M-RoPE."""
    return positions_PT[:, None] if len(positions_PT) > 1 else positions_PT


def _layer_kinds(text_model: Any) -> list[KindKey]:
    """The kind of each layer; empty if a layer is not a `DecoderLayer`."""
    layers = list(text_model.layers)
    if not all(isinstance(layer, DecoderLayer) for layer in layers):
        return []
    by_type = "layer_type" in inspect.signature(text_model.rotary_emb.forward).parameters
    types = text_model.config.layer_types if by_type else [None] * len(layers)
    return [(kind, layer.window) for kind, layer in zip(types, layers, strict=True)]


def _native_layers(text_model: Any, head: nn.Module, kinds: list[KindKey]) -> DecoderLayers | None:
    """Build the native call; None if a layer cannot be part of it.

    A head that is not packed, because it shares a large embedding table, is not part of the call.
    """
    if not kinds or not has_layers():
        return None
    numbers = list(dict.fromkeys(kinds))
    weights = [
        layer.weights(numbers.index(kind))
        for kind, layer in zip(kinds, text_model.layers, strict=True)
    ]
    packed = [one for one in weights if one is not None]
    if len(packed) < len(weights):
        return None
    config, norm, linear = text_model.config, text_model.norm, linear_weights(head)
    heads = Heads(
        config.num_attention_heads, config.num_key_value_heads, text_model.layers[0].head_dim
    )
    tail = Tail(norm.weights(), linear) if isinstance(norm, Norm) and linear is not None else None
    return DecoderLayers(packed, heads, tail)

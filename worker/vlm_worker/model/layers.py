"""Layers as a few kernels, in place of transformers' modules.

    decoder, of Llama's form    x ─▶ norm ─▶ q, k, v ─▶ rope ─▶ attention over KV blocks ─▶ o ─▶ + x
                                x ─▶ norm ─▶ silu(gate) * up ─▶ down ─▶ + x
    of Gemma 3's                norms of q and k, too, and behind o and down; GELU for SiLU
    vision, of Qwen's towers    x ─▶ norm ─▶ qkv ─▶ rope ─▶ attention in segments ─▶ o ─▶ + x
                                x ─▶ norm ─▶ gated or plain MLP ─▶ + x

transformers computes a layer in some thirty small calls, which for the few rows of a decode step
cost as much as its products. The same values come out, up to the order of sums: each step here
rounds as the modules that it replaces. The MLPs of CLIP and SigLIP are replaced by themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vlm_kernels import decoder_weights, rms_norm, rope
from vlm_kernels.packed_linear import Activation
from vlm_worker.model.attention import StepContext, paged_forward, varlen_forward
from vlm_worker.model.linear import (
    GatedLinear,
    JointLinear,
    activated_product,
    add_product,
    linear_weights,
)

DECODER_LAYERS = frozenset(
    {"Gemma3DecoderLayer", "LlamaDecoderLayer", "Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer"}
)
"""Classes of transformers that compute what `DecoderLayer` does."""

VISION_BLOCKS = frozenset({"Qwen2VLVisionBlock", "Qwen2_5_VLVisionBlock"})
"""Classes of transformers that compute what `VisionBlock` does."""

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


def use_kernels(model: nn.Module) -> None:
    """Replace the layers, MLPs and norms that have kernels; the others stay transformers'."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            made = _in_place_of(child)
            if made is not None:
                setattr(parent, name, made)


def _in_place_of(module: Any) -> nn.Module | None:
    kind = type(module).__name__
    if kind in DECODER_LAYERS and _gated_mlp(module.mlp) is not None:
        return DecoderLayer(module)
    if kind in VISION_BLOCKS and _mlp(module.mlp) is not None:
        return VisionBlock(module)
    if kind in {"CLIPMLP", "SiglipMLP"}:
        return _mlp(module)
    return Norm(module) if kind in NORMS else None


def _mlp(mlp: Any) -> Mlp | None:
    return _gated_mlp(mlp) if hasattr(mlp, "gate_proj") else _plain_mlp(mlp)


def _gated_mlp(mlp: Any) -> Mlp | None:
    activation = ACTIVATIONS.get(type(mlp.act_fn).__name__)
    if activation not in {Activation.SILU, Activation.GELU}:
        return None
    return Mlp(GatedLinear(mlp.gate_proj, mlp.up_proj, activation), mlp.down_proj)


def _plain_mlp(mlp: Any) -> Mlp | None:
    function = mlp.act if hasattr(mlp, "act") else mlp.activation_fn
    activation = ACTIVATIONS.get(type(function).__name__)
    if activation not in {Activation.QUICK_GELU, Activation.GELU}:
        return None
    return Mlp(mlp.fc1, mlp.fc2, activation)


class Mlp(nn.Module):
    """Two products, what lies between them inside the first."""

    def __init__(
        self, up: nn.Module, down: nn.Module, activation: Activation | None = None
    ) -> None:
        super().__init__()
        self.up, self.down, self._activation = up, down, activation

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., D]` to the same shape, added to the residual if there is one."""
        if self._activation is None:
            hidden = self.up(x)
        else:
            hidden = activated_product(self.up, x, self._activation)
        if residual is not None:
            return add_product(self.down, hidden, residual)
        y: torch.Tensor = self.down(hidden)
        return y


class Norm(nn.Module):
    """RMSNorm over the last axis; takes over the weight of the module that it replaces."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self._adds_one = type(norm).__name__ == "Gemma3RMSNorm"
        self.eps: float = norm.eps if self._adds_one else norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., D]` to the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        return rms_norm(rows, self.weight, eps=self.eps, adds_one=self._adds_one).view(x.shape)

    def weights(self) -> decoder_weights.Norm:
        """As `vlm_kernels.decoder_layers` takes it."""
        return decoder_weights.Norm(self.weight.detach(), self.eps, self._adds_one)


class DecoderLayer(nn.Module):
    """One layer over packed tokens; takes over the weights of the layer that it replaces."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, _gated_mlp(layer.mlp)
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

    def weights(self, kind: int) -> decoder_weights.LayerWeights | None:
        """As `vlm_kernels.decoder_layers` takes it, of a kind; None where it is not packed."""
        up = self.mlp.up
        assert isinstance(up, GatedLinear)
        qkv, o, gate_up, down = map(linear_weights, (self.qkv, self.o, up, self.mlp.down))
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        return decoder_weights.LayerWeights(
            attention_norm=self.attention_norm.weights(),
            qkv=qkv,
            o=o,
            mlp_norm=self.mlp_norm.weights(),
            gate_up=gate_up,
            down=down,
            scale=self.scaling,
            kind=kind,
            activation=up.activation,
            **{
                name: norm.weights()
                for name in ("q_norm", "k_norm", "o_norm", "down_norm")
                if (norm := getattr(self, name)) is not None
            },
        )

    def _attend(
        self,
        x_TD: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: StepContext,
    ) -> torch.Tensor:
        """Attention's answer for each token, heads side by side."""
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


class VisionBlock(nn.Module):
    """One layer over the patches of packed pictures; takes over the weights of the one before."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        attention, mlp = block.attn, _mlp(block.mlp)
        assert mlp is not None
        self._num_heads: int = attention.num_heads
        self._scaling: float = attention.scaling
        self.attention_norm, self.mlp_norm = (
            Norm(norm) if type(norm).__name__ in NORMS else norm
            for norm in (block.norm1, block.norm2)
        )
        self.qkv, self.o, self.mlp = attention.qkv, attention.proj, mlp

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_unused: Any,
    ) -> torch.Tensor:
        """`[T, D]` to `[T, D]`, called as transformers' towers call a block."""
        qkv = self.qkv(self.attention_norm(hidden_states))
        q_THD, k_THD, v_THD = qkv.view(len(qkv), 3, self._num_heads, -1).unbind(1)
        for x_THD in (q_THD, k_THD):
            rope(x_THD, *position_embeddings)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        o, _ = varlen_forward(self, q, k, v, None, scaling=self._scaling, cu_seq_lens_q=cu_seqlens)
        x_TD = add_product(self.o, o[0].flatten(1), hidden_states)
        return self.mlp(self.mlp_norm(x_TD), x_TD)
